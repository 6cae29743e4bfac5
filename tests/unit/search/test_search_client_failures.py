"""The client against servers that fail: retries, breakers, deadlines; a failure is never an empty list."""

import asyncio
import time

import pytest
from aiohttp import web

from async_search_rl.errors import SearchFailedError
from async_search_rl.http import OverloadedError
from search.client import SearchClient
from tests.search_servers import Reply, Server, passages, run, status


@pytest.mark.parametrize("failure", [status(503, Retry_After="0"), status(502), status(504)])
def test_errors_of_the_server_are_retried(failure: Reply) -> None:
    server = Server("a", failure, passages)

    async def scenario(client: SearchClient) -> None:
        assert (await client.search("q"))[0].title == "q"
        assert len(server.requests) == 2

    run([server], scenario)


def test_retries_are_bounded_and_end_in_a_failure() -> None:
    server = Server("a", status(503, Retry_After="0"))

    async def scenario(client: SearchClient) -> None:
        with pytest.raises(SearchFailedError, match="503"):
            await client.search("q")
        assert len(server.requests) == 2

    run([server], scenario, retries=1)


def test_there_is_no_wait_after_the_last_attempt() -> None:
    async def scenario(client: SearchClient) -> None:
        started = asyncio.get_running_loop().time()
        with pytest.raises(SearchFailedError, match="503"):
            await client.search("q")
        assert asyncio.get_running_loop().time() - started < 10

    run([Server("a", status(503, Retry_After="20"))], scenario, retries=0)


@pytest.mark.parametrize("attempt", range(8))
def test_a_full_server_is_left_alone_for_as_long_as_it_asks(attempt: int) -> None:
    client = SearchClient(["http://127.0.0.1:9"])
    waits = [client._wait_s(attempt, OverloadedError("the queue is full", 3.0)) for _ in range(20)]
    assert min(waits) >= 3.0
    assert len(set(waits)) > 1, "not everyone comes back at once"


def test_one_bad_query_fails_alone() -> None:
    async def choosy(server: Server, queries: list[str]) -> web.Response:
        if "bad" in queries:
            return web.json_response({"error": "SearchFailedError", "message": "no such line"}, status=502)
        return await passages(server, queries)

    server = Server("a", choosy)
    asked = [*(f"q{i}" for i in range(5)), "bad", *(f"q{i}" for i in range(5, 20))]

    async def scenario(client: SearchClient) -> None:
        answers = await asyncio.gather(*map(client.search, asked), return_exceptions=True)
        failed = [query for query, answer in zip(asked, answers, strict=True) if isinstance(answer, Exception)]
        assert failed == ["bad"]
        with pytest.raises(SearchFailedError, match="no such line"):
            raise next(answer for answer in answers if isinstance(answer, Exception))
        assert client.replicas[0].available_in(0.0) == 0, "a server whose index fails at a query is not a dead one"
        assert server.most_at_once <= 2

    run([server], scenario, retries=1, connections=2, breaker_failures=2)


def test_a_replica_whose_index_fails_at_everything_is_left_alone() -> None:
    async def broken(server: Server, queries: list[str]) -> web.Response:
        return web.json_response({"error": "SearchFailedError", "message": "no index"}, status=502)

    servers = [Server("a", broken), Server("b", passages)]

    async def scenario(client: SearchClient) -> None:
        for i in range(40):
            assert len(await client.search(f"q{i}")) == 1
        assert client.replicas[0].available_in(time.monotonic()) > 0

    run(servers, scenario, breaker_failures=3, breaker_cooldown_s=60.0)


def test_a_wrong_request_is_not_retried() -> None:
    server = Server("a", status(400))

    async def scenario(client: SearchClient) -> None:
        with pytest.raises(SearchFailedError, match="told so"):
            await client.search("q")
        assert len(server.requests) == 1

    run([server], scenario)


async def _too_few(server: Server, queries: list[str]) -> web.Response:
    return web.json_response({"result": []})


async def _no_json(server: Server, queries: list[str]) -> web.Response:
    return web.Response(text="<html>")


async def _null(server: Server, queries: list[str]) -> web.Response:
    return web.json_response({"result": [None for _ in queries]})


@pytest.mark.parametrize("nonsense", [_too_few, _no_json, _null])
def test_a_malformed_reply_is_a_failure(nonsense: Reply) -> None:
    async def scenario(client: SearchClient) -> None:
        with pytest.raises(SearchFailedError, match="Search-R1"):
            await client.search("q")

    run([Server("a", nonsense)], scenario)


def test_the_deadline_holds_and_travels() -> None:
    async def never(server: Server, queries: list[str]) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    server = Server("a", never)

    async def scenario(client: SearchClient) -> None:
        started = asyncio.get_running_loop().time()
        with pytest.raises(SearchFailedError, match=r"must answer within 0\.3 s"):
            await client.search("q")
        assert asyncio.get_running_loop().time() - started < 5
        assert 0 < float(server.headers[0]["Request-Timeout"]) <= 0.3

    run([server], scenario, timeout_s=0.3)


def test_each_search_has_a_deadline_of_its_own_however_late_its_neighbours_came() -> None:
    async def never(server: Server, queries: list[str]) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async def scenario(client: SearchClient) -> None:
        loop = asyncio.get_running_loop()

        async def seconds_until_failure(after_s: float) -> float:
            await asyncio.sleep(after_s)
            asked = loop.time()
            with pytest.raises(SearchFailedError):
                await client.search("q")
            return loop.time() - asked

        # The first occupies the one connection; the other two travel together once it has failed.
        waits = await asyncio.gather(*map(seconds_until_failure, (0.0, 0.25, 0.9)))
        assert all(wait < 1.5 for wait in waits), waits

    run([Server("a", never)], scenario, timeout_s=1.0, connections=1)
