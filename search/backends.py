"""From the configuration to an opened index: which back end, in which folder, built first where it is missing.

In: the section ``retrieval``. Out: an :class:`search.index.Index`. Each back end's module is imported only when it is asked for,
so that a lexical service needs neither torch nor FAISS.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import ConfigError
from search.corpus import Corpus, index_folder, open_corpus
from search.index import CorpusIndex, Index, RowIndex
from search.manifest import Manifest, Parameter, begin_build, end_build, new_manifest, read_manifest, require_match

if TYPE_CHECKING:
    from search.encoder import Encoder, EncoderSpec

Progress = Callable[[int, int], None]
ROW_BACKENDS = ("bm25", "tantivy", "rank_bm25", "dense", "hybrid")
COMPILED_LIMIT = 4_000_000
"""Documents up to which bm25s' compiled kernel was measured to be the fastest (benchmarks/README.md); tantivy beyond."""


def no_progress(done: int, total: int) -> None:
    """Reports to nobody."""


def thread_count(settings: RetrievalSection) -> int:
    """Search threads to use."""
    return settings.threads or os.cpu_count() or 1


def lexical_backend(settings: RetrievalSection, documents: int) -> str:
    """The lexical back end that is fastest for a corpus of ``documents``, among those installed."""
    compiled = settings.bm25_kernel == "numba" or (settings.bm25_kernel == "auto" and _installed("numba"))
    if _installed("tantivy") and (documents > COMPILED_LIMIT or not compiled):
        return "tantivy"
    return "bm25"


def open_backend(settings: RetrievalSection) -> Index:
    """The index that ``settings`` describe, ready to search; a missing one is built first.

    Raises:
        ConfigError, DataError: a key is missing or impossible, a file is missing or not what it must be.
    """
    index = _open_unranked(settings)
    if not settings.rerank:
        return index
    from search.rerank import RerankIndex, load_cross_encoder

    score = load_cross_encoder(settings.rerank, settings.encoder_max_tokens, settings.encoder_batch)
    return RerankIndex(index, score, Path(settings.rerank).name, settings.rerank_candidates)


def open_rows(settings: RetrievalSection, corpus: Corpus, backend: str, progress: Progress = no_progress) -> RowIndex:
    """The row index ``backend`` of ``corpus``, built first where it is missing."""
    if backend == "rank_bm25":
        from search.rank_bm25_index import RankBm25Index

        return RankBm25Index(corpus, settings.k1, settings.b)
    if backend == "bm25":
        return _open_bm25(settings, corpus, progress)
    if backend == "tantivy":
        return _open_tantivy(settings, corpus, progress)
    if backend == "dense":
        return _open_dense(settings, corpus, progress)
    if backend == "hybrid":
        from search.hybrid import HybridIndex

        lexical = open_rows(settings, corpus, lexical_backend(settings, len(corpus)), progress)
        return HybridIndex([lexical, _open_dense(settings, corpus, progress)], settings.hybrid_candidates, settings.rrf_k)
    raise ConfigError(f"retrieval.backend must be one of {', '.join(ROW_BACKENDS)} for an index over a corpus, got {backend!r}")


def resolve_backend(settings: RetrievalSection, corpus: Corpus) -> str:
    """``retrieval.backend`` with ``auto`` decided."""
    return lexical_backend(settings, len(corpus)) if settings.backend == "auto" else settings.backend


def corpus_folder(settings: RetrievalSection) -> Path:
    """Where offsets and index folders lie: ``retrieval.index`` if that is a folder, else beside the corpus."""
    if not settings.corpus:
        raise ConfigError("retrieval.corpus must name a file of JSON lines, got ''")
    named = Path(settings.index)
    return named if settings.index and not named.is_file() else index_folder(settings.corpus)


def _open_unranked(settings: RetrievalSection) -> Index:
    if settings.backend == "remote":
        from search.remote import RemoteIndex

        urls = [url.strip() for url in settings.remote_url.split(",") if url.strip()]
        return RemoteIndex(urls, settings.timeout_s, settings.retries)
    if settings.backend == "online":
        from search.engines import ENGINES, engine_keys
        from search.online import OnlineIndex

        engine = ENGINES[settings.online_engine]
        return OnlineIndex(engine, engine_keys(engine), settings.online_url, settings.timeout_s, settings.retries)
    corpus = open_corpus(settings.corpus, corpus_folder(settings))
    return CorpusIndex(open_rows(settings, corpus, resolve_backend(settings, corpus)), corpus)


def _open_bm25(settings: RetrievalSection, corpus: Corpus, progress: Progress) -> RowIndex:
    from search.analyzer import ANALYZER
    from search.bm25 import Bm25Index, choose_kernel
    from search.bm25_build import build_bm25

    kernel = choose_kernel(settings.bm25_kernel)
    if kernel == "numba" and not _installed("numba"):
        raise ConfigError("retrieval.bm25_kernel 'numba' needs the package numba, which is not installed")
    folder = corpus_folder(settings) / "bm25"
    parameters: dict[str, Parameter] = {"retrieval.k1": settings.k1, "retrieval.b": settings.b, "analyzer": ANALYZER}
    manifest = new_manifest("bm25", corpus.stamp, parameters, ("bm25s", "PyStemmer", "numpy"))
    _ensure(folder, manifest, corpus, lambda: build_bm25(corpus, folder, settings.k1, settings.b, progress))
    return Bm25Index(folder, kernel, thread_count(settings))


def _open_tantivy(settings: RetrievalSection, corpus: Corpus, progress: Progress) -> RowIndex:
    _require_installed("tantivy", "tantivy", "tantivy")
    from search.tantivy_index import ANALYZER, TantivyIndex, build_tantivy

    folder = corpus_folder(settings) / "tantivy"
    manifest = new_manifest("tantivy", corpus.stamp, {"analyzer": ANALYZER}, ("tantivy",))
    _ensure(folder, manifest, corpus, lambda: build_tantivy(corpus, folder, progress))
    return TantivyIndex(folder, thread_count(settings))


def _open_dense(settings: RetrievalSection, corpus: Corpus, progress: Progress) -> RowIndex:
    _require_installed("faiss", "dense", "faiss-cpu or faiss-gpu")
    from search.encoder import Encoder
    from search.faiss_build import INDEX_NAME, build_dense
    from search.faiss_index import FaissIndex

    encoder = Encoder(encoder_spec(settings), thread_count(settings))
    path = Path(settings.index)
    if not (settings.index and path.is_file()):
        folder = corpus_folder(settings) / "dense"
        manifest = new_manifest(
            "dense", corpus.stamp, dense_parameters(settings, encoder), ("faiss-cpu", "faiss-gpu", "sentence-transformers")
        )
        _ensure(folder, manifest, corpus, lambda: build_dense(corpus, encoder, folder, settings.faiss, progress))
        path = folder / INDEX_NAME
    return FaissIndex(
        path,
        encoder,
        len(corpus),
        thread_count(settings),
        nprobe=settings.faiss_nprobe,
        ef_search=settings.faiss_ef_search,
        gpu=settings.faiss_gpu,
    )


def encoder_spec(settings: RetrievalSection) -> EncoderSpec:
    """The encoder that ``settings`` describe."""
    from search.encoder import EncoderSpec

    return EncoderSpec(
        path=settings.encoder,
        pooling=settings.encoder_pooling,
        query_prefix=settings.query_prefix,
        passage_prefix=settings.passage_prefix,
        max_tokens=settings.encoder_max_tokens,
        batch=settings.encoder_batch,
        device=settings.encoder_device,
    )


def dense_parameters(settings: RetrievalSection, encoder: Encoder) -> dict[str, Parameter]:
    """What decides the vectors of a dense index and its kind; the query prefix too, for it must fit the passages'."""
    return {
        "retrieval.faiss": settings.faiss,
        "retrieval.encoder": encoder.spec.name,
        "retrieval.encoder_pooling": settings.encoder_pooling,
        "retrieval.encoder_max_tokens": settings.encoder_max_tokens,
        "retrieval.passage_prefix": settings.passage_prefix,
        "retrieval.query_prefix": settings.query_prefix,
        "dimension": encoder.dimension,
    }


def _ensure(folder: Path, wanted: Manifest, corpus: Corpus, build: Callable[[], None]) -> None:
    """Build what is missing; refuse what does not fit."""
    found = read_manifest(folder)
    if found is None:
        begin_build(folder, wanted)
        build()
        end_build(folder, wanted)
    else:
        require_match(folder, found, corpus.stamp, wanted.parameters)


def _require_installed(module: str, extra: str, package: str) -> None:
    if not _installed(module):
        raise ConfigError(f"retrieval.backend {extra!r} needs the package {package}, which is not installed")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
