"""From the configuration to an opened index: which back end, in which folder, built first where it is missing.

Each back end's module is imported only when it is asked for, so that a lexical service needs neither torch nor FAISS.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import ConfigError
from search.corpus import Corpus, index_folder, open_corpus
from search.index import CorpusIndex, Index, RowIndex
from search.manifest import Parameter, new_manifest, read_manifest, require_match, write_manifest

Progress = Callable[[int, int], None]
LEXICAL_LIMIT = 200_000
"""Documents from which tantivy answers faster than bm25s (benchmarks/README.md)."""


def no_progress(done: int, total: int) -> None:
    """Reports to nobody."""


def threads(settings: RetrievalSection) -> int:
    """Search threads to use."""
    return settings.threads or os.cpu_count() or 1


def open_backend(settings: RetrievalSection) -> Index:
    """The index that ``settings`` describe, ready to search; a missing one is built first.

    Raises:
        ConfigError, DataError: a key is missing or impossible, a file is missing or not what it must be.
    """
    corpus = open_corpus(settings.corpus, corpus_folder(settings))
    return CorpusIndex(open_rows(settings, corpus, no_progress), corpus)


def corpus_folder(settings: RetrievalSection) -> Path:
    """Where offsets and indexes lie."""
    return Path(settings.index) if settings.index else index_folder(settings.corpus)


def lexical_backend(settings: RetrievalSection, corpus: Corpus) -> str:
    """The lexical back end to use for a corpus of this size."""
    return settings.backend


def open_rows(settings: RetrievalSection, corpus: Corpus, progress: Progress) -> RowIndex:
    """Open the row index of ``settings.backend``."""
    backend = settings.backend
    if backend == "rank_bm25":
        from search.rank_bm25_index import RankBm25Index

        return RankBm25Index(corpus, settings.k1, settings.b)
    if backend in ("auto", "bm25"):
        return _open_bm25(settings, corpus, progress)
    raise ConfigError(f"retrieval.backend must be one that is served, got {backend!r}")


def _open_bm25(settings: RetrievalSection, corpus: Corpus, progress: Progress) -> RowIndex:
    from search.analyzer import ANALYZER
    from search.bm25 import Bm25Index, choose_kernel
    from search.bm25_build import build_bm25

    folder = corpus_folder(settings) / "bm25"
    parameters: dict[str, Parameter] = {"retrieval.k1": settings.k1, "retrieval.b": settings.b, "analyzer": ANALYZER}
    manifest = read_manifest(folder)
    if manifest is None:
        build_bm25(corpus, folder, settings.k1, settings.b, progress)
        manifest = new_manifest("bm25", corpus.stamp, parameters, ("bm25s", "PyStemmer", "numpy"))
        write_manifest(folder, manifest)
    require_match(folder, manifest, corpus.stamp, parameters)
    return Bm25Index(folder, choose_kernel(settings.bm25_kernel), threads(settings))
