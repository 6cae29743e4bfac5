"""The service's cache over failures and reloads of the index."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import DataError, SearchFailedError
from search.index import Answer, Hit
from tests.search_service import post, run, running

pytestmark = pytest.mark.integration


class Gate:
    """An index that answers when it is let; it counts what it is asked."""

    releases_gil = True

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        self.opened = False

    def search(self, queries: list[str], topk: int) -> list[Answer]:
        self.asked.append(list(queries))
        if self.error is not None and "capital city" not in queries:
            raise self.error
        return [[Hit(msgspec.json.encode({"id": query, "contents": query}), 1.0)] for query in queries]

    def info(self) -> dict[str, Any]:
        return {"backend": "gate"}

    def close(self) -> None: ...


async def until(happened: Callable[[], bool]) -> None:
    """Poll for something that tells nobody; the test's own deadline ends it."""
    while not happened():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_failures_are_errors_and_are_not_cached(settings: RetrievalSection) -> None:
    gate = Gate()

    async def scenario() -> None:
        async with running(settings, lambda: gate) as (url, retriever):
            gate.error = DataError("a damaged index")
            status, reply = await post(url, {"queries": ["a"]})
            assert (status, "damaged" in reply["message"]) == (502, True)
            gate.error = None
            assert (await post(url, {"queries": ["a"]}))[0] == 200
            assert retriever.metrics()["failed"] == 1

    run(scenario)


def test_a_reload_clears_the_cache(settings: RetrievalSection) -> None:
    gates: list[Gate] = []

    def open_gate() -> Gate:
        gates.append(Gate())
        return gates[-1]

    async def scenario() -> None:
        async with running(settings, open_gate) as (url, retriever):
            for _ in range(2):
                await post(url, {"queries": ["a"]})
            await retriever.reload()
            await post(url, {"queries": ["a"]})
        assert [gate.asked for gate in gates] == [[["capital city"], ["a"]], [["a"]]]

    run(scenario)


def test_an_answer_of_the_old_index_is_not_cached_after_a_reload(settings: RetrievalSection) -> None:
    entered, release = threading.Event(), threading.Event()

    class Held(Gate):
        def search(self, queries: list[str], topk: int) -> list[Answer]:
            if "capital city" not in queries:
                entered.set()
                assert release.wait(20)
            return super().search(queries, topk)

    gates: list[Gate] = [Held(), Gate()]

    async def scenario() -> None:
        async with running(settings, open_gate) as (url, retriever):
            first = asyncio.create_task(post(url, {"queries": ["a"]}))
            await asyncio.to_thread(entered.wait, 20)
            reload = asyncio.create_task(retriever.reload())
            await until(lambda: gates[1].opened)
            joined = asyncio.create_task(post(url, {"queries": ["a"]}))
            await until(lambda: retriever.metrics()["coalesced"] == 1)
            release.set()
            await asyncio.gather(first, joined, reload)
            await post(url, {"queries": ["a"]})
        assert gates[1].asked == [["a"]]

    waiting = list(gates)

    def open_gate() -> Gate:
        waiting[0].opened = True
        return waiting.pop(0)

    run(scenario)


def test_what_was_found_beside_a_failure_is_cached(settings: RetrievalSection) -> None:
    class Partly(Gate):
        def search(self, queries: list[str], topk: int) -> list[Answer]:
            found = super().search(queries, topk)
            return [SearchFailedError("bad") if query == "bad" else hits for query, hits in zip(queries, found, strict=True)]

    gate = Partly()

    async def scenario() -> None:
        async with running(settings, lambda: gate) as (url, retriever):
            assert (await post(url, {"queries": ["a", "bad"]}))[0] == 502
            assert (await post(url, {"queries": ["a"]}))[0] == 200
            assert retriever.metrics()["cache_hits"] == 1

    run(scenario)
