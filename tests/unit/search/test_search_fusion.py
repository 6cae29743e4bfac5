"""Rank fusion, reranking and the remote back end, over hand-written halves."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.errors import SearchFailedError
from search.hybrid import HybridIndex, fuse
from search.index import NO_ROW, Answer, Hit, Ranking
from search.rerank import RerankIndex


class Half:
    """Ranks the rows it was given, whatever the query."""

    releases_gil = True

    def __init__(self, rows: list[int]) -> None:
        self._rows = rows

    def rank(self, queries: Sequence[str], topk: int) -> Ranking:
        rows = (self._rows + [NO_ROW] * topk)[:topk]
        return Ranking(np.array([rows] * len(queries), np.int64), np.zeros((len(queries), topk), np.float32))

    def info(self) -> dict[str, Any]:
        return {"backend": "half"}

    def close(self) -> None: ...


def test_fusion_adds_reciprocal_ranks() -> None:
    assert fuse([[7, 8], [8, 9]], rrf_k=60) == [(8, 1 / 62 + 1 / 61), (7, 1 / 61), (9, 1 / 62)]


@given(st.lists(st.lists(st.integers(0, 20), unique=True), max_size=3), st.integers(1, 100))
def test_fusion_ranks_each_row_once_in_order(rankings: list[list[int]], rrf_k: int) -> None:
    fused = fuse(rankings, rrf_k)
    assert sorted(row for row, _ in fused) == sorted({row for ranking in rankings for row in ranking})
    assert all((-a[1], a[0]) < (-b[1], b[0]) for a, b in itertools.pairwise(fused))


def test_hybrid_pads_what_neither_half_found() -> None:
    index = HybridIndex([Half([3, 1]), Half([1])], candidates=2, rrf_k=60)
    rows_QK, scores_QK = index.rank(["a", "b"], 4)
    assert rows_QK.tolist() == [[1, 3, NO_ROW, NO_ROW]] * 2
    np.testing.assert_allclose(scores_QK[0], [1 / 62 + 1 / 61, 1 / 61, 0, 0], rtol=1e-6)


class Documents:
    """Finds a fixed list of documents for each query."""

    releases_gil = True

    def __init__(self, found: dict[str, Answer]) -> None:
        self._found = found

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        return [self._found[query] for query in queries]

    def info(self) -> dict[str, Any]:
        return {"backend": "documents"}

    def close(self) -> None: ...


def hits(*contents: str) -> list[Hit]:
    return [Hit(json.dumps({"id": text, "contents": text}).encode(), 0.0) for text in contents]


def test_reranking_scores_each_query_against_its_own_passages() -> None:
    seen: list[tuple[str, str]] = []

    def score(pairs: list[tuple[str, str]]) -> list[float]:
        seen.extend(pairs)
        return [float(len(text)) for _, text in pairs]

    failure = SearchFailedError("no")
    inner = Documents({"a": hits("x", "xxx", "xx"), "b": [], "c": failure, "d": hits("y", "yy")})
    answers = RerankIndex(inner, score, "fake", candidates=10).search(["a", "b", "c", "d"], 2)
    assert seen == [("a", "x"), ("a", "xxx"), ("a", "xx"), ("d", "y"), ("d", "yy")]
    assert [[json.loads(hit.document)["id"] for hit in answer] for answer in answers if isinstance(answer, list)] == [
        ["xxx", "xx"],
        [],
        ["yy", "y"],
    ]
    assert answers[2] is failure


def test_reranking_nothing_calls_nobody() -> None:
    def score(pairs: list[tuple[str, str]]) -> list[float]:
        raise AssertionError("nothing to score")

    assert RerankIndex(Documents({"a": []}), score, "fake", 10).search(["a"], 3) == [[]]
