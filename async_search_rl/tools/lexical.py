"""BM25 over a few thousand texts in memory, for preparing data: which passages would a search find?

In: texts. Out: rows and scores, best first. The trained system searches through the retrieval service instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from async_search_rl.tools.passages import Passage


class Bm25:
    """An index over ``texts`` with English stop words and stems (bm25s; k1 = 0.9, b = 0.4)."""

    def __init__(self, texts: Sequence[str]) -> None:
        import bm25s
        import Stemmer

        self._bm25s = bm25s
        self._stemmer = Stemmer.Stemmer("english")
        self._size = len(texts)
        self._index = bm25s.BM25(k1=0.9, b=0.4)
        self._index.index(self._tokens(texts), show_progress=False)

    def __call__(self, queries: Sequence[str], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and scores, both of shape (len(queries), min(k, texts)); a score of 0 means that no word matched."""
        rows, scores = self._index.retrieve(
            self._tokens(queries), k=min(k, self._size), show_progress=False, n_threads=0, backend_selection="numpy"
        )
        return np.asarray(rows, np.int64), np.asarray(scores, np.float32)

    def _tokens(self, texts: Sequence[str]) -> object:
        return self._bm25s.tokenize(list(texts), stopwords="en", stemmer=self._stemmer, show_progress=False)


class PassageSearch:
    """Search over the passages of a corpus, one query at a time."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = list(passages)
        self._index = Bm25([f"{passage.title}. {passage.text}" for passage in passages])

    def __call__(self, query: str, k: int) -> list[Passage]:
        """At most ``k`` passages that share a word with ``query``, best first."""
        rows, scores = self._index([query], k)
        return [self._passages[row] for row, score in zip(rows[0], scores[0], strict=True) if score > 0]
