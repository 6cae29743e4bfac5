"""Micro-batching with single flight: the queue between many requests and one search worker.

In: requests, each a tuple of queries and a top-k. Out: for each query its answer. An idle worker starts at once; while it is
busy, queries gather, and the next batch takes all of them up to a limit. Right after a batch the worker may wait a moment, a
tenth of the last search and ``max_wait_s`` at most, for the callers it has just answered to come back. Equal queries in
flight are one search. The queue is bounded; a request that does not fit whole is refused whole. Nothing here knows of HTTP.

A *flight* is one distinct (query, top-k) from its first request to its answer; a *call* is one request waiting for its flights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, cast

from async_search_rl.errors import SearchFailedError, ServiceError
from async_search_rl.http import OverloadedError

Answer = TypeVar("Answer")
Key = tuple[str, int]
"""A query and its top-k."""

_WAIT_SHARE = 0.1


class _Call(Generic[Answer]):
    """One request: its answers so far, how many are missing, and whom to wake."""

    __slots__ = ("answers", "done", "missing")

    def __init__(self, size: int, done: asyncio.Future[None]) -> None:
        self.answers: list[Answer | None] = [None] * size
        self.missing = size
        self.done = done


class _Flight(Generic[Answer]):
    """One distinct query and the places that wait for its answer."""

    __slots__ = ("key", "waiters")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.waiters: list[tuple[_Call[Answer], int]] = []


class Batcher(Generic[Answer]):
    """Batches queries in front of ``search(queries, topk)``, which is awaited once at a time; it answers each query, with an
    exception where that query alone failed.

    ``clock`` gives seconds. Use within one event loop; :meth:`close` fails whatever still waits.
    """

    def __init__(
        self,
        search: Callable[[list[str], int], Awaitable[Sequence[Answer | Exception]]],
        max_batch: int,
        max_wait_s: float,
        max_queue: int,
        clock: Callable[[], float],
    ) -> None:
        self._search = search
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._max_queue = max_queue
        self._clock = clock
        self._flights: dict[Key, _Flight[Answer]] = {}
        self._queues: dict[int, deque[_Flight[Answer]]] = {}
        self._queued = 0
        self._arrival = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._last_search_s = 0.0
        self._expected = 0
        self.coalesced = 0
        self.rejected = 0
        self.batches = 0
        self.batched_queries = 0
        self.busy_s = 0.0

    @property
    def queued(self) -> int:
        """Queries that wait for the worker."""
        return self._queued

    async def submit(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """The answers to ``queries``, in their order. Cancelling this leaves everyone else's flights alone.

        Raises:
            OverloadedError: the queue has no room for all of them.
            SearchFailedError: the search of one of them failed.
        """
        if not queries:
            return []
        keys = [(query, topk) for query in queries]
        new = len({key for key in keys if key not in self._flights})
        if self._queued + new > self._max_queue:
            self.rejected += len(queries)
            raise OverloadedError(f"the search queue holds {self._queued} of {self._max_queue} queries", self._backlog_s())
        call: _Call[Answer] = _Call(len(keys), asyncio.get_running_loop().create_future())
        for place, key in enumerate(keys):
            self._board(key, call, place)
        self._arrival.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run(), name="search-batcher")
        try:
            await call.done
        finally:
            if call.missing:
                self._leave(call, keys)
        return cast(list[Answer], call.answers)

    async def close(self) -> None:
        """Stop the worker and fail what waits."""
        if self._worker:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for flight in list(self._flights.values()):
            self._fail(flight, OverloadedError("the search service is stopping"))

    def _board(self, key: Key, call: _Call[Answer], place: int) -> None:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(key)
            self._queues.setdefault(key[1], deque()).append(flight)
            self._queued += 1
        else:
            self.coalesced += 1
        flight.waiters.append((call, place))

    def _leave(self, call: _Call[Answer], keys: Sequence[Key]) -> None:
        """Take ``call`` off its flights; a flight that nobody waits for any more is not searched."""
        for key in set(keys):
            flight = self._flights.get(key)
            if flight is not None:
                flight.waiters = [waiter for waiter in flight.waiters if waiter[0] is not call]

    async def _run(self) -> None:
        while True:
            while not self._queued:
                self._arrival.clear()
                await self._arrival.wait()
            await self._gather()
            batch = self._take()
            if not batch:
                continue
            started = self._clock()
            await self._fly(batch)
            self._last_search_s = self._clock() - started
            self.busy_s += self._last_search_s
            self.batches += 1
            self.batched_queries += len(batch)
            self._expected = min(self._max_batch, len(batch) + self._queued)

    async def _gather(self) -> None:
        """Wait a moment for as many queries as were there at the end of the last search."""
        window_s = min(self._max_wait_s, _WAIT_SHARE * self._last_search_s)
        if window_s > 0 and self._queued < self._expected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(window_s):
                    while self._queued < self._expected:
                        self._arrival.clear()
                        await self._arrival.wait()
        self._expected = 0

    def _take(self) -> list[_Flight[Answer]]:
        """The next batch: the flights that have waited longest of one top-k, without those nobody waits for."""
        topk = next(iter(self._queues))
        queue = self._queues[topk]
        batch: list[_Flight[Answer]] = []
        while queue and len(batch) < self._max_batch:
            flight = queue.popleft()
            self._queued -= 1
            if flight.waiters:
                batch.append(flight)
            else:
                del self._flights[flight.key]
        # The next batch is of another top-k, if there is one: none waits for ever behind a busy one.
        del self._queues[topk]
        if queue:
            self._queues[topk] = queue
        return batch

    async def _fly(self, batch: list[_Flight[Answer]]) -> None:
        topk = batch[0].key[1]
        try:
            answers = await self._search([flight.key[0] for flight in batch], topk)
            if len(answers) != len(batch):
                raise SearchFailedError(f"the index must answer {len(batch)} queries, got {len(answers)} answers")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if len(batch) == 1 or isinstance(error, ServiceError):
                for flight in batch:
                    self._fail(flight, error)
                return
            for flight in batch:  # One bad query must not fail the others.
                await self._fly([flight])
            return
        for flight, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                self._fail(flight, answer)
            else:
                self._land(flight, answer)

    def _land(self, flight: _Flight[Answer], answer: Answer) -> None:
        del self._flights[flight.key]
        for call, place in flight.waiters:
            call.answers[place] = answer
            call.missing -= 1
            if not call.missing and not call.done.done():
                call.done.set_result(None)

    def _fail(self, flight: _Flight[Answer], error: Exception) -> None:
        self._flights.pop(flight.key, None)
        failure = error if isinstance(error, ServiceError) else SearchFailedError(f"{type(error).__name__}: {error}")
        for call, _ in flight.waiters:
            if not call.done.done():
                call.done.set_exception(failure)

    def _backlog_s(self) -> float:
        """Seconds the queue needs at the speed measured so far."""
        return self._queued * self.busy_s / self.batched_queries if self.batched_queries else 1.0
