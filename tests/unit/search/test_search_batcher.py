"""The batcher: every request is answered exactly once with its own passages, whatever the interleaving and errors."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_search_rl.errors import SearchFailedError, ServiceError
from async_search_rl.http import OverloadedError
from search.batcher import Batcher


class Index:
    """A fake index: answers ``query@topk`` once it is told to go on; queries that start with "bad" fail their whole batch."""

    def __init__(self, held: bool = False) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.running = 0
        self.go = asyncio.Event()
        if not held:
            self.go.set()

    async def search(self, queries: list[str], topk: int) -> list[str | Exception]:
        self.batches.append((queries, topk))
        self.running += 1
        assert self.running == 1, "one search at a time"
        await self.go.wait()
        self.running -= 1
        if any(query.startswith("bad") for query in queries):
            raise ValueError("a bad query")
        return [SearchFailedError("alone") if query.startswith("alone") else f"{query}@{topk}" for query in queries]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def batcher_of(index: Index, max_batch: int = 4, max_wait_s: float = 0.0, max_queue: int = 100) -> Batcher[str]:
    return Batcher(index.search, max_batch, max_wait_s, max_queue, asyncio.get_running_loop().time)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_idle_worker_starts_at_once_and_a_busy_one_lets_queries_gather() -> None:
    async def scenario() -> None:
        index = Index(held=True)
        batcher = batcher_of(index)
        first = asyncio.create_task(batcher.submit(["a"], 3))
        await turns()
        rest = [asyncio.create_task(batcher.submit([query], 3)) for query in "bcdef"]
        await turns()
        index.go.set()
        assert await first == ["a@3"]
        assert await asyncio.gather(*rest) == [[f"{query}@3"] for query in "bcdef"]
        assert [queries for queries, _ in index.batches] == [["a"], ["b", "c", "d", "e"], ["f"]]
        await batcher.close()

    run(scenario)


@pytest.mark.parametrize(("max_wait_s", "second"), [(5.0, ["b", "c", "d", "e"]), (0.0, ["b", "c", "d"])])
def test_after_a_long_search_the_worker_waits_for_the_callers_it_has_answered(max_wait_s: float, second: list[str]) -> None:
    async def scenario() -> None:
        index = Index(held=True)
        hours = iter(range(1000))
        batcher: Batcher[str] = Batcher(index.search, 64, max_wait_s, 100, lambda: 3600.0 * next(hours))

        async def twice() -> None:
            await batcher.submit(["a"], 3)
            await turns(20)
            await batcher.submit(["e"], 3)

        first = asyncio.create_task(twice())
        await turns()
        others = [asyncio.create_task(batcher.submit([query], 3)) for query in "bcd"]
        await turns()
        index.go.set()
        await asyncio.gather(first, *others)
        assert [queries for queries, _ in index.batches][:2] == [["a"], second]
        await batcher.close()

    run(scenario)


def test_a_single_caller_never_waits() -> None:
    async def scenario() -> None:
        index = Index()
        hours = iter(range(1000))
        batcher: Batcher[str] = Batcher(index.search, 64, 3600.0, 100, lambda: 3600.0 * next(hours))
        for query in "abc":
            assert await batcher.submit([query], 3) == [f"{query}@3"]
        await batcher.close()

    run(scenario)


def test_equal_queries_in_flight_are_one_search() -> None:
    async def scenario() -> None:
        index = Index(held=True)
        batcher = batcher_of(index)
        calls = [asyncio.create_task(batcher.submit(["a", "b", "a"], 3)) for _ in range(3)]
        await turns()
        index.go.set()
        assert await asyncio.gather(*calls) == [["a@3", "b@3", "a@3"]] * 3
        assert sorted(query for queries, _ in index.batches for query in queries) == ["a", "b"]
        assert batcher.coalesced == 7
        await batcher.close()

    run(scenario)


def test_a_batch_has_one_topk() -> None:
    async def scenario() -> None:
        index = Index()
        batcher = batcher_of(index)
        calls = [batcher.submit(["a"], topk) for topk in (1, 2, 1, 3)]
        assert await asyncio.gather(*calls) == [["a@1"], ["a@2"], ["a@1"], ["a@3"]]
        assert [topk for _, topk in index.batches] == [1, 2, 3]
        await batcher.close()

    run(scenario)


def test_a_full_queue_refuses_whole_requests() -> None:
    async def scenario() -> None:
        index = Index(held=True)
        batcher = batcher_of(index, max_batch=1, max_queue=2)
        running = asyncio.create_task(batcher.submit(["a"], 3))
        await turns()
        waiting = asyncio.create_task(batcher.submit(["b"], 3))
        await turns()
        with pytest.raises(OverloadedError):
            await batcher.submit(["c", "d"], 3)
        joined = asyncio.create_task(batcher.submit(["a", "b", "c"], 3))
        await turns()
        index.go.set()
        assert await running == ["a@3"]
        assert await waiting == ["b@3"]
        assert await joined == ["a@3", "b@3", "c@3"]
        assert batcher.rejected == 2
        await batcher.close()

    run(scenario)


def test_one_bad_query_does_not_fail_its_neighbours() -> None:
    async def scenario() -> None:
        index = Index(held=True)
        batcher = batcher_of(index)
        calls = [asyncio.create_task(batcher.submit([query], 3)) for query in ("x", "good", "bad", "alone")]
        await turns()
        index.go.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers[:2] == [["x@3"], ["good@3"]]
        assert all(isinstance(answer, SearchFailedError) for answer in answers[2:])
        await batcher.close()

    run(scenario)


def test_abandoned_queries_are_not_searched() -> None:
    async def scenario() -> None:
        index = Index(held=True)
        batcher = batcher_of(index)
        first = asyncio.create_task(batcher.submit(["a"], 3))
        await turns()
        gone = asyncio.create_task(batcher.submit(["gone", "shared"], 3))
        stays = asyncio.create_task(batcher.submit(["shared"], 3))
        await turns()
        gone.cancel()
        await turns()
        index.go.set()
        assert await first == ["a@3"]
        assert await stays == ["shared@3"]
        assert [queries for queries, _ in index.batches] == [["a"], ["shared"]]
        await batcher.close()

    run(scenario)


def test_close_fails_what_waits() -> None:
    async def scenario() -> None:
        index = Index(held=True)
        batcher = batcher_of(index)
        calls = [asyncio.create_task(batcher.submit([query], 3)) for query in "ab"]
        await turns()
        await batcher.close()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, ServiceError) for answer in answers)

    run(scenario)


QUERY = st.sampled_from(["a", "b", "c", "d", "bad1", "alone1", "alone2"])
CALL = st.tuples(st.lists(QUERY, max_size=6), st.integers(1, 2), st.integers(0, 12), st.none() | st.integers(0, 12))


@settings(max_examples=150, deadline=None)
@given(st.lists(CALL, max_size=20), st.integers(1, 5), st.integers(1, 12), st.lists(st.integers(0, 12), max_size=4))
def test_every_request_is_answered_once_with_its_own(
    calls: list[tuple[list[str], int, int, int | None]], max_batch: int, max_queue: int, pauses: list[int]
) -> None:
    """Calls start at some turn of the loop and may be cancelled at another; the index pauses at some turns."""

    async def scenario() -> None:
        index = Index()
        batcher = batcher_of(index, max_batch=max_batch, max_queue=max_queue)

        async def call(queries: list[str], topk: int, start: int) -> list[str]:
            await turns(start)
            return await batcher.submit(queries, topk)

        tasks = [asyncio.create_task(call(queries, topk, start)) for queries, topk, start, _ in calls]
        for turn in range(14):
            if turn in pauses:
                index.go.clear()
            else:
                index.go.set()
            for task, (*_, cancelled) in zip(tasks, calls, strict=True):
                if cancelled == turn:
                    task.cancel()
            await turns(1)
        index.go.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for answer, (queries, topk, _, cancelled) in zip(answers, calls, strict=True):
            if isinstance(answer, asyncio.CancelledError):
                assert cancelled is not None
            elif isinstance(answer, OverloadedError):
                assert queries
            elif isinstance(answer, BaseException):
                assert isinstance(answer, SearchFailedError)
                assert any(query.startswith(("bad", "alone")) for query in queries)
            else:
                assert answer == [f"{query}@{topk}" for query in queries]
        assert all(len(queries) <= max_batch and len(set(queries)) == len(queries) for queries, _ in index.batches)
        await turns(20)
        assert batcher.queued == 0
        await batcher.close()

    run(scenario)
