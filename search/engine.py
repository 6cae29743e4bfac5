"""The retriever inside the service: cache, then batcher, then worker, and the counters of all three.

In: checked requests. Out: hits, or a typed error; an answer is never an empty list because something failed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import DeadlineError, SearchFailedError
from search.batcher import Batcher
from search.cache import LruCache
from search.index import Answer, Hit
from search.requests import RetrieveRequest
from search.worker import OpenIndex, Worker

_HIT_OVERHEAD_BYTES = 150
_LATENCIES = 4096
Hits = list[Hit]


class Retriever:
    """Answers requests from one index. Within one event loop: ``start``, ``retrieve`` as often as wanted, ``stop``."""

    def __init__(self, config: RetrievalSection, open_index: OpenIndex) -> None:
        self._config = config
        self._open_index = open_index
        self._worker = Worker(open_index)
        self._batcher: Batcher[Hits] = Batcher(
            self._search, config.max_batch, config.max_wait_ms / 1000, config.max_queue, time.monotonic
        )
        self._cache: LruCache[Hits] = LruCache(config.cache_entries, int(config.cache_mib * 2**20), _size_of)
        self._generation = 0
        self._requests = self._queries = self._failed = 0
        self._latencies_s: deque[float] = deque(maxlen=_LATENCIES)
        self.opened = False
        self.ready = False

    async def start(self, probe: str = "capital city") -> None:
        """Open the index and answer one real query; ``ready`` afterwards. Errors of either are raised."""
        await self._worker.start()
        self.opened = True
        [answer] = await self._worker.search([probe], self._config.topk)
        if isinstance(answer, Exception):
            raise answer
        self.ready = True

    async def retrieve(self, request: RetrieveRequest, timeout_s: float) -> list[Hits]:
        """The hits of each query, in order; an empty query has none.

        Raises:
            OverloadedError: the queue is full.
            SearchFailedError: the search failed.
            DeadlineError: it took longer than ``timeout_s`` or ``retrieval.timeout_s``.
        """
        started = time.perf_counter()
        answers: list[Hits] = [[] for _ in request.queries]
        missing = []
        for place, query in enumerate(request.queries):
            cached = self._cache.get((query, request.topk)) if query else answers[place]
            if cached is None:
                missing.append(place)
            else:
                answers[place] = cached
        if missing:
            found = await self._find([request.queries[place] for place in missing], request.topk, timeout_s)
            for place, hits in zip(missing, found, strict=True):
                answers[place] = hits
        self._requests += 1
        self._queries += len(answers)
        self._latencies_s.append(time.perf_counter() - started)
        return answers

    async def reload(self) -> None:
        """Open the index again, as it now is on disk, and forget what the old one answered. Requests go on meanwhile."""
        fresh = Worker(self._open_index)
        await fresh.start()
        old, self._worker = self._worker, fresh
        self._generation += 1
        self._cache.clear()
        await old.stop()

    async def stop(self) -> None:
        """Fail what waits and close the index."""
        self.ready = False
        await self._batcher.close()
        await self._worker.stop()

    def info(self) -> dict[str, Any]:
        """Description of the index."""
        return self._worker.info()

    def metrics(self) -> dict[str, float]:
        """Gauges and counters, by the names of the metrics table's scope ``search``."""
        batcher = self._batcher
        looked_up = self._cache.hits + self._cache.misses
        latencies = sorted(self._latencies_s)
        return {
            "queue": batcher.queued,
            "cache_entries": len(self._cache),
            "cache_hit_rate": self._cache.hits / looked_up if looked_up else 0.0,
            "batch_mean": batcher.batched_queries / batcher.batches if batcher.batches else 0.0,
            "latency_p50_s": _quantile(latencies, 0.5),
            "latency_p99_s": _quantile(latencies, 0.99),
            "requests": self._requests,
            "queries": self._queries,
            "cache_hits": self._cache.hits,
            "coalesced": batcher.coalesced,
            "rejected": batcher.rejected,
            "failed": self._failed,
            "busy_s": batcher.busy_s,
        }

    async def _find(self, queries: list[str], topk: int, timeout_s: float) -> list[Hits]:
        limit_s = min(timeout_s, self._config.timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                return await self._batcher.submit(queries, topk)
        except TimeoutError as error:
            self._failed += len(queries)
            raise DeadlineError(
                f"{len(queries)} queries must be answered within {limit_s:g} s, got no answer from the index"
            ) from error
        except SearchFailedError:
            self._failed += len(queries)
            raise

    async def _search(self, queries: list[str], topk: int) -> Sequence[Answer]:
        """Search, and cache what was found unless the index was opened again meanwhile."""
        generation = self._generation
        answers = await self._worker.search(queries, topk)
        if generation == self._generation and len(answers) == len(queries):
            for query, answer in zip(queries, answers, strict=True):
                if not isinstance(answer, Exception):
                    self._cache.put((query, topk), answer)
        return answers


def _size_of(hits: Hits) -> int:
    return _HIT_OVERHEAD_BYTES + sum(len(hit.document) + _HIT_OVERHEAD_BYTES for hit in hits)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
