"""The one interface behind which every back end stands, and what it answers with.

In: a batch of queries. Out: for each query its hits, best first. An index is used by one thread at a time (the worker's).
Back ends that rank the rows of a corpus implement :class:`RowIndex`; :class:`CorpusIndex` gives them their documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from search.corpus import Corpus

NO_ROW = -1
"""Fills the places of a query with fewer than top-k matching documents."""


class Hit(NamedTuple):
    """One document of an answer."""

    document: bytes
    """The document as a JSON object, as it stands in the corpus (a newline may follow)."""
    score: float


Answer = list[Hit] | Exception
"""The hits of one query, or why it alone failed."""


class Index(Protocol):
    """A back end, ready to search."""

    releases_gil: bool
    """Whether a search leaves the interpreter to other threads; otherwise the worker is a process of its own."""

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """At most ``topk`` hits for each of the non-empty ``queries``, best first; an empty list where nothing matches.

        The answer to a query does not depend on the others in its batch. What fails is raised, or stands as an exception in
        the place of the one query it concerns; it is never turned into an empty list.
        """
        ...

    def info(self) -> dict[str, Any]:
        """What `/info` shows: back end, manifest, sizes."""
        ...

    def close(self) -> None:
        """Release files, threads and devices."""
        ...


class Ranking(NamedTuple):
    """Rows and scores of a batch, best first."""

    rows_QK: NDArray[np.int64]
    """Corpus rows; NO_ROW from the first place without a match on."""
    scores_QK: NDArray[np.float32]


class RowIndex(Protocol):
    """A back end over the rows of a corpus."""

    releases_gil: bool

    def rank(self, queries: Sequence[str], topk: int) -> Ranking:
        """The ``topk`` best rows of each query; fewer columns where the corpus is smaller."""
        ...

    def info(self) -> dict[str, Any]:
        """Name, parameters and sizes."""
        ...

    def close(self) -> None:
        """Release files, threads and devices."""
        ...


class CorpusIndex:
    """An :class:`Index` made of a :class:`RowIndex` and the corpus whose rows it ranks."""

    def __init__(self, rows: RowIndex, corpus: Corpus) -> None:
        self.rows = rows
        self.corpus = corpus
        self.releases_gil = rows.releases_gil

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """See :class:`Index`."""
        rows_QK, scores_QK = self.rows.rank(queries, min(topk, len(self.corpus)))
        found_QK = rows_QK != NO_ROW
        hits = list(map(Hit, self.corpus.documents(rows_QK[found_QK]), scores_QK[found_QK].tolist()))
        ends_Q = np.cumsum(found_QK.sum(axis=1)).tolist()
        return [hits[start:end] for start, end in itertools.pairwise([0, *ends_Q])]

    def info(self) -> dict[str, Any]:
        """See :class:`Index`."""
        return {**self.rows.info(), "corpus": self.corpus.info()}

    def close(self) -> None:
        """See :class:`Index`."""
        self.rows.close()
        self.corpus.close()
