"""Overload, in small: beyond its capacity the service answers or says 503, and neither latency nor memory runs away."""

import asyncio
from pathlib import Path

import pytest

from async_search_rl.config.retrieval import RetrievalSection
from benchmarks.retrieval_load import folding_clients, overload
from benchmarks.retrieval_service import memory_bytes, service
from tests.search_data import documents, questions, write_corpus

pytestmark = pytest.mark.integration
MAX_GROWTH_BYTES = 16 * 2**20


def test_twice_the_capacity(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(3000))
    settings = RetrievalSection(corpus=str(corpus), backend="tantivy", threads=1, cache_entries=0, max_batch=4, max_queue=64)
    queries = questions(5000)
    with service(settings, tmp_path) as (url, process):
        capacity = asyncio.run(folding_clients(url, queries, 64, 1.0))["queries_per_s"]
        warm = asyncio.run(overload(url, queries, 2 * capacity, 2.0, fold=32))
        before = memory_bytes(process.pid)
        result = asyncio.run(overload(url, queries, 2 * capacity, 4.0, fold=32))
        after = memory_bytes(process.pid)
        assert asyncio.run(folding_clients(url, queries, 8, 0.5))["queries"] > 0
    assert set(warm["statuses"]) | set(result["statuses"]) <= {"200", "503"}
    assert result["statuses"]["503"] > 0
    assert result["statuses"]["200"] > 0
    assert result["accepted_p99_ms"] < 10_000
    assert after - before < MAX_GROWTH_BYTES
