"""The client against real sockets: folding, retries, hedges, breakers, deadlines; a failure is never an empty list."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from async_search_rl.errors import ConfigError, SearchFailedError
from async_search_rl.http import OverloadedError, listening
from search.client import SearchClient
from search.schema import Passage

Reply = Callable[["Server", list[str]], Awaitable[web.Response]]


async def passages(server: "Server", queries: list[str]) -> web.Response:
    """As Search-R1's server replies with scores."""
    found = [[{"document": {"id": "1", "contents": f'"{query}"\nfrom {server.name}'}, "score": 1.5}] for query in queries]
    return web.json_response({"result": found})


class Server:
    """A fake Search-R1 server whose replies follow ``script`` (its last item again and again)."""

    def __init__(self, name: str, *script: Reply) -> None:
        self.name = name
        self.script = list(script) or [passages]
        self.requests: list[list[str]] = []
        self.headers: list[Any] = []
        self.running = self.most_at_once = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert body["return_scores"] is True
        self.requests.append(body["queries"])
        self.headers.append(request.headers)
        reply = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        await asyncio.sleep(0)
        answer = await reply(self, body["queries"])
        self.running -= 1
        return answer

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/retrieve", self.answer)
        return app


def status(code: int, **headers: str) -> Reply:
    """Always this status, with the service's error body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def reply(server: Server, queries: list[str]) -> web.Response:
        return web.json_response({"error": "E", "message": "told so"}, status=code, headers=named)

    return reply


def run(servers: list[Server], scenario: Callable[[SearchClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            urls = [
                await stack.enter_async_context(listening(server.app(), "127.0.0.1", 0, None, stop_timeout_s=0.1))
                for server in servers
            ]
            await scenario(await stack.enter_async_context(SearchClient(urls, **options)))

    asyncio.run(main())


def test_concurrent_queries_travel_together() -> None:
    server = Server("a")

    async def scenario(client: SearchClient) -> None:
        found = await asyncio.gather(*(client.search(f"q{i}") for i in range(20)))
        assert found == [[Passage("1", f"q{i}", "from a", 1.5)] for i in range(20)]
        assert server.requests == [[f"q{i}" for i in range(20)]]

    run([server], scenario)


def test_each_topk_has_its_own_request() -> None:
    server = Server("a")

    async def scenario(client: SearchClient) -> None:
        await asyncio.gather(client.search("a"), client.search("b", topk=5), client.search("c"))
        assert sorted(server.requests) == [["a"], ["b"], ["c"]]

    run([server], scenario)


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


def test_nothing_found_is_an_empty_list() -> None:
    async def nothing(server: Server, queries: list[str]) -> web.Response:
        return web.json_response({"result": [[] for _ in queries]})

    async def scenario(client: SearchClient) -> None:
        assert await client.search("q") == []

    run([Server("a", nothing)], scenario)


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


def test_a_dead_replica_is_left_alone() -> None:
    server = Server("alive")

    async def scenario(client: SearchClient) -> None:
        dead = SearchClient(["http://127.0.0.1:9", client.replicas[0].url], breaker_failures=2, breaker_cooldown_s=60.0)
        async with dead:
            for i in range(12):
                assert (await dead.search(f"q{i}"))[0].text == "from alive"
            assert dead.replicas[0].available_in(asyncio.get_running_loop().time()) > 0
        assert len(server.requests) == 12

    run([server], scenario)


def test_a_slow_request_is_hedged_to_another_replica() -> None:
    async def scenario(client: SearchClient) -> None:
        slow = asyncio.Event()

        async def stuck(server: Server, queries: list[str]) -> web.Response:
            await slow.wait()
            return await passages(server, queries)

        for i in range(60):
            await client.search(f"warm{i}")
        assert all(replica.p95_s() is not None for replica in client.replicas)
        servers[0].script = [stuck]
        client.replicas[1].outstanding += 1  # So that the first one is chosen.
        found = await client.search("q")
        assert found[0].text == "from b"
        assert servers[0].requests[-1] == servers[1].requests[-1] == ["q"]
        slow.set()

    servers = [Server("a"), Server("b")]
    run(servers, scenario)


def test_the_token_is_sent() -> None:
    server = Server("a")

    async def scenario(client: SearchClient) -> None:
        await client.search("q")
        assert server.headers[0]["Authorization"] == "Bearer secret"

    run([server], scenario, token="secret")


def test_a_cancelled_search_leaves_the_others_alone() -> None:
    async def scenario(client: SearchClient) -> None:
        tasks = [asyncio.create_task(client.search(query)) for query in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[1], asyncio.CancelledError)
        assert [answer[0].title for answer in (found[0], found[2]) if isinstance(answer, list)] == ["a", "c"]

    run([Server("a")], scenario)


def test_closing_fails_what_waits() -> None:
    arrived = asyncio.Event()

    async def never(server: Server, queries: list[str]) -> web.Response:
        arrived.set()
        await asyncio.Event().wait()
        return web.Response()

    async def scenario(client: SearchClient) -> None:
        async with SearchClient([client.replicas[0].url], connections=1) as other:
            running = asyncio.create_task(other.search("a"))
            await arrived.wait()
            waiting = asyncio.create_task(other.search("b"))
            await asyncio.sleep(0)
        found = await asyncio.gather(running, waiting, return_exceptions=True)
        assert all(isinstance(answer, SearchFailedError) for answer in found)

    run([Server("a", never)], scenario)


def test_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"retrieval\.url"):
        SearchClient([])
