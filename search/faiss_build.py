"""Builds a FAISS index of a corpus: encode to a vector file (resumable, a chunk in memory), then train, add and write.

FAISS itself holds the finished index in memory while vectors are added; everything else is bounded by a chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import faiss
import msgspec
import numpy as np
from numpy.typing import NDArray

from async_search_rl.errors import ConfigError
from async_search_rl.files import write_whole
from search.corpus import Corpus
from search.encoder import Encoder

INDEX_NAME = "index.faiss"
_CHUNK_DOCS = 512
_ADD_ROWS = 65_536
_TRAIN_ROWS = 131_072
_SEED = 20


class _Encoded(msgspec.Struct, frozen=True):
    """Progress of the vector file."""

    rows: int
    dimension: int


def build_dense(corpus: Corpus, encoder: Encoder, folder: Path, factory: str, progress: Callable[[int, int], None]) -> None:
    r"""Encode every passage (``"Title"\ntext`` as it stands) and write ``folder/index.faiss``; row i of the index is row i.

    Goes on after the last encoded chunk of an interrupted build. ``progress(done, all)`` counts documents.

    Raises:
        ConfigError: FAISS does not know ``factory``.
    """
    new_index(encoder.dimension, factory)  # A wrong factory string must not cost hours of encoding first.
    folder.mkdir(parents=True, exist_ok=True)
    vectors_ND = encode_corpus(corpus, encoder, folder, progress)
    write_faiss(vectors_ND, factory, folder / INDEX_NAME)
    for name in ("vectors.f32", "vectors.json"):
        (folder / name).unlink()


def encode_corpus(corpus: Corpus, encoder: Encoder, folder: Path, progress: Callable[[int, int], None]) -> NDArray[np.float32]:
    """The passages' vectors [rows, dimension], in a memory-mapped file."""
    shape = (len(corpus), encoder.dimension)
    file, state = folder / "vectors.f32", folder / "vectors.json"
    done = 0
    if state.exists() and file.exists():
        encoded = msgspec.json.decode(state.read_bytes(), type=_Encoded)
        done = encoded.rows if encoded.dimension == encoder.dimension else 0
    vectors_ND = np.memmap(file, np.float32, "r+" if done else "w+", shape=shape)
    for start in range(done, len(corpus), _CHUNK_DOCS):
        stop = min(start + _CHUNK_DOCS, len(corpus))
        vectors_ND[start:stop] = encoder.passages(list(corpus.iter_contents(start, stop)))
        vectors_ND.flush()
        write_whole(state, msgspec.json.encode(_Encoded(stop, encoder.dimension)))
        progress(stop, len(corpus))
    return vectors_ND


def write_faiss(vectors_ND: NDArray[np.float32], factory: str, path: Path) -> None:
    """Write an inner-product index of unit vectors by its index_factory string.

    Raises:
        ConfigError: there are too few vectors to train it.
    """
    rows, dimension = vectors_ND.shape
    index = new_index(dimension, factory)
    if not index.is_trained:
        sample = np.random.default_rng(_SEED).choice(rows, min(rows, _TRAIN_ROWS), replace=False)
        try:
            index.train(np.ascontiguousarray(vectors_ND[np.sort(sample)]))
        except RuntimeError as error:
            raise ConfigError(f"retrieval.faiss {factory!r} cannot be trained on {rows} passages: {error}") from error
    for start in range(0, rows, _ADD_ROWS):
        index.add(np.ascontiguousarray(vectors_ND[start : start + _ADD_ROWS]))
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    faiss.write_index(index, str(aside))
    aside.replace(path)


def new_index(dimension: int, factory: str) -> faiss.Index:
    """An empty inner-product index.

    Raises:
        ConfigError: FAISS does not know ``factory``.
    """
    try:
        return faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(f"retrieval.faiss must be an index_factory string, got {factory!r}") from error
