"""The one search worker: a thread where the index leaves the interpreter free, a process of its own where it does not.

In: batches from the batcher, one at a time. Out: hits. The event loop waits for the worker only by awaiting it; a search that will
be over in hardly more time than a change of threads takes is done in the loop itself.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from async_search_rl.errors import DataError, SearchFailedError
from async_search_rl.http import OverloadedError
from search.index import Answer, CorpusIndex, Index

OpenIndex = Callable[[], Index]

_AT_ONCE_S = 0.002
"""A search expected to be shorter is done in the event loop; the interpreter leaves a thread running for longer than this."""


class Worker:
    """Opens an index by ``open_index`` and searches it. ``open_index`` must be picklable: it may be called in a child process.

    ``clock`` gives seconds.
    """

    def __init__(self, open_index: OpenIndex, clock: Callable[[], float] = time.perf_counter) -> None:
        self._open_index = open_index
        self._clock = clock
        self._executor: Executor | None = None
        self._index: Index | None = None
        self._info: dict[str, Any] = {}
        self._computes = False
        """Whether a search waits for nobody else, as one that asks another server does."""
        self._last_s, self._last_queries = math.inf, 1
        """Seconds and queries of the last search."""

    async def start(self) -> None:
        """Open the index. Errors of opening it are raised here.

        Whether a process is needed is known only once the index is open; it is then opened a second time, there. Lexical
        indexes are memory maps, so this costs little.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        loop = asyncio.get_running_loop()
        index = await loop.run_in_executor(thread, self._open_index)
        self._info = index.info()
        if index.releases_gil:
            self._executor, self._index, self._computes = thread, index, isinstance(index, CorpusIndex)
            return
        await loop.run_in_executor(thread, index.close)
        thread.shutdown()
        self._executor = self._new_process()

    async def search(self, queries: list[str], topk: int) -> list[Answer]:
        """See :class:`search.index.Index`. A worker process that died is replaced, and the batch fails."""
        executor = self._executor
        if executor is None:
            raise OverloadedError("the search worker is not running")
        loop = asyncio.get_running_loop()
        if self._index is not None:
            if self._computes and self._expected_s(len(queries)) < _AT_ONCE_S:
                answers = self._search_timed(self._index, queries, topk)
                await asyncio.sleep(0)  # Between two searches the loop has its turn.
                return answers
            return await loop.run_in_executor(executor, self._search_timed, self._index, queries, topk)
        try:
            return await loop.run_in_executor(executor, _search_in_child, queries, topk)
        except BrokenProcessPool as error:
            self._executor = self._new_process()
            raise SearchFailedError("the search worker's process died; a new one was started") from error

    def _expected_s(self, queries: int) -> float:
        """Seconds a search of ``queries`` may take: no less than the last one, for its cost may be one of calls."""
        return self._last_s * max(1.0, queries / self._last_queries)

    def _search_timed(self, index: Index, queries: Sequence[str], topk: int) -> list[Answer]:
        started_s = self._clock()
        answers = index.search(queries, topk)
        self._last_s, self._last_queries = self._clock() - started_s, len(queries)
        return answers

    def info(self) -> dict[str, Any]:
        """The index's own description, with the kind of worker."""
        return {**self._info, "worker": "thread" if self._index is not None else "process"}

    async def stop(self) -> None:
        """Close the index and end the worker."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        loop = asyncio.get_running_loop()
        index, self._index = self._index, None
        if index is not None:
            await loop.run_in_executor(executor, index.close)
        await loop.run_in_executor(None, executor.shutdown)

    def _new_process(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=context, initializer=_open_in_child, initargs=(self._open_index, os.getpid()))


_child_index: Index | None = None


def _open_in_child(open_index: OpenIndex, parent: int) -> None:
    global _child_index
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process in order.
    _die_with(parent)
    _child_index = open_index()


def _search_in_child(queries: Sequence[str], topk: int) -> list[Answer]:
    if _child_index is None:
        raise DataError("the index must be open before a search, got none")
    return _child_index.search(queries, topk)


def _die_with(parent: int) -> None:
    """End this process when ``parent`` is gone, so that a killed service leaves nothing running (Linux)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    prctl = getattr(libc, "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
