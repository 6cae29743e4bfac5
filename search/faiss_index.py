"""Dense retrieval: an encoder and a FAISS inner-product index over the corpus's rows, on the CPU or on GPUs.

Opens this project's index folders and Search-R1's bare files (`e5_Flat.index`, `e5_HNSW64.index`) alike: row i is line i.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from async_search_rl.errors import ConfigError, DataError
from search.encoder import Encoder
from search.index import Ranking

Gpu = Literal["off", "one", "shard"]


class FaissIndex:
    """A :class:`search.index.RowIndex`. Equal scores are ordered by row. One thread at a time (GPU indexes demand it).

    Args:
        path: FAISS file.
        encoder: of the same model, prefixes and pooling as the vectors.
        rows: documents of the corpus.
        threads: OpenMP threads of a search.
        nprobe, ef_search: search effort of IVF and HNSW indexes; unused by others.
        gpu: `one` copies the index to a GPU in half precision, `shard` spreads it over all.

    Raises:
        DataError: the file is no FAISS inner-product index, or not of this corpus or encoder.
        ConfigError: a GPU is asked for and the installed FAISS knows none.
    """

    releases_gil = True

    def __init__(
        self, path: Path, encoder: Encoder, rows: int, threads: int, nprobe: int = 64, ef_search: int = 128, gpu: Gpu = "off"
    ) -> None:
        self._path = path
        self._encoder = encoder
        self._threads = threads
        index = _read(path)
        _require_fit(path, index, encoder.dimension, rows)
        self._kind = type(faiss.downcast_index(index)).__name__
        self._effort = _set_effort(index, nprobe, ef_search)
        self._index = index if gpu == "off" else _to_gpu(index, gpu)
        self._gpu = gpu

    def rank(self, queries: Sequence[str], topk: int) -> Ranking:
        """See :class:`search.index.RowIndex`."""
        return self.rank_vectors(self._encoder.queries(queries), topk)

    def rank_vectors(self, vectors_QD: NDArray[np.float32], topk: int) -> Ranking:
        """The best rows of already encoded queries."""
        faiss.omp_set_num_threads(self._threads)  # Holds for the calling thread only.
        scores_QK, rows_QK = self._index.search(vectors_QD, topk)
        order_QK = np.lexsort((rows_QK, -scores_QK), axis=1)
        return Ranking(np.take_along_axis(rows_QK, order_QK, 1), np.take_along_axis(scores_QK, order_QK, 1))

    def info(self) -> dict[str, Any]:
        """File, kind, encoder and effort."""
        spec = self._encoder.spec
        return {
            "backend": "dense",
            "file": str(self._path),
            "faiss": self._kind,
            "dimension": self._encoder.dimension,
            "encoder": spec.name,
            "pooling": spec.pooling,
            "query_prefix": spec.query_prefix,
            "passage_prefix": spec.passage_prefix,
            "device": self._encoder.device,
            "gpu": self._gpu,
            "threads": self._threads,
            **self._effort,
        }

    def close(self) -> None:
        """Nothing is held open but memory."""


def _read(path: Path) -> faiss.Index:
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise DataError(f"{path} must be a FAISS index file: {str(error).splitlines()[0]}") from error


def _require_fit(path: Path, index: faiss.Index, dimension: int, rows: int) -> None:
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise DataError(f"{path} must be an inner-product index, got metric {index.metric_type}")
    if index.d != dimension:
        raise DataError(f"{path} must have the encoder's {dimension} dimensions, got {index.d}")
    if index.ntotal != rows:
        raise DataError(f"{path} must have a vector for each of the corpus's {rows} documents, got {index.ntotal}")


def _set_effort(index: faiss.Index, nprobe: int, ef_search: int) -> dict[str, int]:
    """Set the search effort on the kinds that have one; what was set."""
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    if isinstance(inner, faiss.IndexIVF):
        inner.nprobe = min(nprobe, inner.nlist)
        return {"nprobe": int(inner.nprobe)}
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efSearch = ef_search
        return {"ef_search": ef_search}
    return {}


def _to_gpu(index: faiss.Index, gpu: Gpu) -> faiss.Index:
    devices = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    if not devices:
        raise ConfigError(f"retrieval.faiss_gpu must be 'off' where faiss-gpu or a GPU is missing, got {gpu!r}")
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = gpu == "shard"
    return faiss.index_cpu_to_all_gpus(index, co=options, ngpu=devices if gpu == "shard" else 1)
