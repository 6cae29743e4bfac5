"""Reciprocal rank fusion of a lexical and a dense ranking (Cormack, Clarke and Buettcher, SIGIR 2009)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from search.index import NO_ROW, Ranking, RowIndex


class HybridIndex:
    """A :class:`search.index.RowIndex`: a row's score is the sum of ``1 / (rrf_k + rank)`` over the halves that found it.

    Each half contributes its ``candidates`` best rows (at least top-k). Equal scores are ordered by row.
    """

    def __init__(self, halves: Sequence[RowIndex], candidates: int, rrf_k: int) -> None:
        self._halves = list(halves)
        self._candidates = candidates
        self._rrf_k = rrf_k
        self.releases_gil = all(half.releases_gil for half in halves)

    def rank(self, queries: Sequence[str], topk: int) -> Ranking:
        """See :class:`search.index.RowIndex`."""
        rankings = [half.rank(queries, max(topk, self._candidates)) for half in self._halves]
        rows_QK = np.full((len(queries), topk), NO_ROW, np.int64)
        scores_QK = np.zeros((len(queries), topk), np.float32)
        for i in range(len(queries)):
            best = fuse([[row for row in ranking.rows_QK[i].tolist() if row != NO_ROW] for ranking in rankings], self._rrf_k)[:topk]
            rows_QK[i, : len(best)] = [row for row, _ in best]
            scores_QK[i, : len(best)] = [score for _, score in best]
        return Ranking(rows_QK, scores_QK)

    def info(self) -> dict[str, Any]:
        """Both halves and the fusion's constants."""
        halves = [half.info() for half in self._halves]
        return {"backend": "hybrid", "candidates": self._candidates, "rrf_k": self._rrf_k, "halves": halves}

    def close(self) -> None:
        """Close both halves."""
        for half in self._halves:
            half.close()


def fuse(rankings: Sequence[Sequence[int]], rrf_k: int) -> list[tuple[int, float]]:
    """Rows with their fused scores, best first; each ranking lists distinct rows, best first."""
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for place, row in enumerate(ranking, start=1):
            scores[row] += 1.0 / (rrf_k + place)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
