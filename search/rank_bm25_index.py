"""BM25 by rank_bm25: for tiny corpora and as an oracle. It keeps the corpus's terms in memory and is built anew at every start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rank_bm25 import BM25Okapi

from async_search_rl.errors import ConfigError
from search.analyzer import ANALYZER, terms
from search.corpus import Corpus
from search.index import NO_ROW, Ranking

MAX_DOCUMENTS = 100_000


class RankBm25Index:
    """A :class:`search.index.RowIndex` over ``rank_bm25.BM25Okapi``; equal scores are ordered by row.

    Raises:
        ConfigError: the corpus is larger than rank_bm25 is meant for.
    """

    releases_gil = False

    def __init__(self, corpus: Corpus, k1: float, b: float) -> None:
        if len(corpus) > MAX_DOCUMENTS:
            raise ConfigError(
                f"a corpus for retrieval.backend 'rank_bm25' must have at most {MAX_DOCUMENTS} documents, got {len(corpus)}"
            )
        self._documents = terms(list(corpus.iter_contents()))
        self._terms = [frozenset(words) for words in self._documents]
        self._bm25 = BM25Okapi(self._documents, k1=k1, b=b)

    def rank(self, queries: Sequence[str], topk: int) -> Ranking:
        """See :class:`search.index.RowIndex`. Documents that share no term with the query are not ranked."""
        topk = min(topk, len(self._documents))
        rows_QK = np.full((len(queries), topk), NO_ROW, np.int64)
        scores_QK = np.zeros((len(queries), topk), np.float32)
        for i, words in enumerate(terms(queries)):
            scores_D = np.asarray(self._bm25.get_scores(words))
            # A common term's score may be 0 or less here, so a match is a shared term, not a positive score.
            matches = np.array([row for row, document in enumerate(self._terms) if not document.isdisjoint(words)], np.int64)
            best = matches[np.argsort(-scores_D[matches], kind="stable")[:topk]]
            rows_QK[i, : len(best)] = best
            scores_QK[i, : len(best)] = scores_D[best]
        return Ranking(rows_QK, scores_QK)

    def info(self) -> dict[str, Any]:
        """Parameters."""
        return {"backend": "rank_bm25", "k1": self._bm25.k1, "b": self._bm25.b, "analyzer": ANALYZER}

    def close(self) -> None:
        """Nothing is held open."""
