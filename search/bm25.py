"""BM25 by bm25s over its memory-mapped index: nothing is read before a query needs it.

With numba installed the scores are summed by bm25s' compiled kernel, which leaves the interpreter free and is some fifty times
faster than its NumPy one; both give the same ranking.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import bm25s
import numpy as np
from numpy.typing import NDArray

from search.analyzer import terms
from search.index import NO_ROW, Ranking

Kernel = Literal["numpy", "numba"]
_MIN_QUERIES_A_THREAD = 8


def choose_kernel(wanted: Literal["auto", "numpy", "numba"]) -> Kernel:
    """The kernel to use: ``auto`` takes numba where it is installed."""
    if wanted != "auto":
        return wanted
    return "numba" if importlib.util.find_spec("numba") else "numpy"


class Bm25Index:
    """A :class:`search.index.RowIndex`. Documents that share no term with the query are not ranked."""

    def __init__(self, folder: Path, kernel: Kernel, threads: int) -> None:
        self._bm25 = bm25s.BM25.load(folder, mmap=True, backend=kernel, show_progress=False)
        scores: dict[str, Any] = self._bm25.scores
        # Plain views of the maps: the compiled kernel takes no array subclass.
        self._bm25.scores = {
            key: value.view(np.ndarray) if isinstance(value, np.memmap) else value for key, value in scores.items()
        }
        self._documents = int(scores["num_docs"])
        self._kernel = kernel
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="bm25") if kernel == "numba" and threads > 1 else None
        self.releases_gil = kernel == "numba"

    def rank(self, queries: Sequence[str], topk: int) -> Ranking:
        """See :class:`search.index.RowIndex`. Equal scores stand in the order in which bm25s leaves them."""
        topk = min(topk, self._documents)
        rows_QK = np.full((len(queries), topk), NO_ROW, np.int64)
        scores_QK = np.zeros((len(queries), topk), np.float32)
        known = self._bm25.vocab_dict
        words = [[term for term in query if term in known] for query in terms(queries)]
        searched = [i for i, query in enumerate(words) if query]
        if searched:
            rows, scores = self._retrieve([words[i] for i in searched], topk)
            rows_QK[searched] = np.where(scores > 0, rows, NO_ROW)
            scores_QK[searched] = scores
        return Ranking(rows_QK, scores_QK)

    def info(self) -> dict[str, Any]:
        """Kernel, parameters and sizes."""
        return {
            "backend": "bm25",
            "kernel": self._kernel,
            "k1": self._bm25.k1,
            "b": self._bm25.b,
            "terms": len(self._bm25.vocab_dict),
            "threads": self._threads,
        }

    def close(self) -> None:
        """End the threads."""
        if self._pool:
            self._pool.shutdown()

    def _retrieve(self, words: list[list[str]], topk: int) -> tuple[NDArray[Any], NDArray[Any]]:
        parts = min(self._threads, len(words) // _MIN_QUERIES_A_THREAD)
        if self._pool is None or parts < 2:
            return self._retrieve_serially(words, topk)
        bounds = np.linspace(0, len(words), parts + 1).astype(int).tolist()
        answers = self._pool.map(
            lambda bound: self._retrieve_serially(words[bound[0] : bound[1]], topk), itertools.pairwise(bounds)
        )
        rows, scores = zip(*answers, strict=True)
        return np.concatenate(rows), np.concatenate(scores)

    def _retrieve_serially(self, words: list[list[str]], topk: int) -> tuple[NDArray[Any], NDArray[Any]]:
        # n_threads: 1 is numba's serial kernel, 0 is NumPy's plain loop.
        found = self._bm25.retrieve(words, k=topk, n_threads=1 if self._kernel == "numba" else 0, show_progress=False)
        return found.documents, found.scores
