"""The client against real sockets: folding, replicas, hedges, cancellation; nothing found is an empty list."""

import asyncio

import pytest
from aiohttp import web

from async_search_rl.errors import ConfigError, SearchFailedError
from search.client import SearchClient
from search.schema import Passage
from tests.search_servers import Server, passages, run


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


def test_nothing_found_is_an_empty_list() -> None:
    async def nothing(server: Server, queries: list[str]) -> web.Response:
        return web.json_response({"result": [[] for _ in queries]})

    async def scenario(client: SearchClient) -> None:
        assert await client.search("q") == []

    run([Server("a", nothing)], scenario)


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
