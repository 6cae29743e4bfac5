"""Builds a bm25s index from a corpus in bounded memory, with resume: two passes, one chunk of documents in memory at a time.

Pass one writes the term counts of each chunk to a part file; pass two turns counts into scores and scatters them into the
memory-mapped columns that bm25s reads. An interrupted build goes on after its last whole part. The files are bm25s' own, and
equal to what ``bm25s.BM25(k1, b, method="lucene").index(...)`` would save, vocabulary order aside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import bm25s
import msgspec
import numpy as np
from numpy.typing import NDArray

from search.analyzer import terms
from search.corpus import Corpus

CHUNK_DOCS = 20_000
_PARTS = "parts"


class _Part(msgspec.Struct, frozen=True):
    """Counts of one chunk: entry i says that term ``term_N[i]`` occurs ``count_N[i]`` times in document ``doc_N[i]``."""

    doc_N: NDArray[np.int32]
    term_N: NDArray[np.int32]
    count_N: NDArray[np.int32]
    length_D: NDArray[np.int32]


def build_bm25(corpus: Corpus, folder: Path, k1: float, b: float, progress: Callable[[int, int], None]) -> None:
    """Write a bm25s index of ``corpus`` (Lucene's variant; Kamphuis et al. 2020) into ``folder``.

    ``progress(done, all)`` counts documents over both passes. Memory: a chunk's terms, the vocabulary, and 16 bytes a term.
    """
    parts = folder / _PARTS
    parts.mkdir(parents=True, exist_ok=True)
    chunks = range(math.ceil(len(corpus) / CHUNK_DOCS))
    total = 2 * len(corpus)
    vocabulary = _resume_vocabulary(parts, len(chunks))
    for chunk in chunks:
        if not _part_file(parts, chunk).exists():
            _write_part(corpus, parts, chunk, vocabulary)
        progress(min((chunk + 1) * CHUNK_DOCS, len(corpus)), total)
    frequency_V, tokens = _totals(parts, len(chunks), len(vocabulary))
    _write_columns(parts, folder, len(chunks), frequency_V, tokens / len(corpus), (k1, b), len(corpus), progress)
    (folder / "vocab.index.json").write_text(json.dumps({**vocabulary, "": len(vocabulary)}, ensure_ascii=False), encoding="utf-8")
    parameters = {"k1": k1, "b": b, "delta": 0.5, "method": "lucene", "idf_method": "lucene", "dtype": "float32"}
    parameters |= {"int_dtype": "int32", "num_docs": len(corpus), "version": bm25s.__version__, "backend": "numpy"}
    (folder / "params.index.json").write_text(json.dumps(parameters, indent=1), encoding="utf-8")
    for chunk in chunks:
        _part_file(parts, chunk).unlink()
        _vocabulary_file(parts, chunk).unlink()
    parts.rmdir()


def _part_file(parts: Path, chunk: int) -> Path:
    return parts / f"{chunk:06d}.npz"


def _vocabulary_file(parts: Path, chunk: int) -> Path:
    return parts / f"{chunk:06d}.json"


def _resume_vocabulary(parts: Path, chunks: int) -> dict[str, int]:
    """The vocabulary after the whole parts that are there; later files of an interrupted build are removed."""
    vocabulary: dict[str, int] = {}
    whole = True
    for chunk in range(chunks):
        whole = whole and _part_file(parts, chunk).exists()
        if whole:
            for term in json.loads(_vocabulary_file(parts, chunk).read_text(encoding="utf-8")):
                vocabulary[term] = len(vocabulary)
        else:
            _part_file(parts, chunk).unlink(missing_ok=True)
    return vocabulary


def _write_part(corpus: Corpus, parts: Path, chunk: int, vocabulary: dict[str, int]) -> None:
    start = chunk * CHUNK_DOCS
    documents = terms(list(corpus.iter_contents(start, min(start + CHUNK_DOCS, len(corpus)))))
    known = len(vocabulary)
    ids_N = np.fromiter(
        (vocabulary.setdefault(term, len(vocabulary)) for words in documents for term in words), np.int64, sum(map(len, documents))
    )
    length_D = np.fromiter(map(len, documents), np.int32, len(documents))
    doc_N = np.repeat(np.arange(len(documents), dtype=np.int64), length_D)
    width = max(1, len(vocabulary))
    pair_N, count_N = np.unique(doc_N * width + ids_N, return_counts=True)
    _vocabulary_file(parts, chunk).write_text(json.dumps(list(vocabulary)[known:], ensure_ascii=False), encoding="utf-8")
    aside = parts / f".{chunk}.npz"
    np.savez(
        aside,
        doc=(pair_N // width + start).astype(np.int32),
        term=(pair_N % width).astype(np.int32),
        count=count_N.astype(np.int32),
        length=length_D,
    )
    aside.replace(_part_file(parts, chunk))


def _read_part(parts: Path, chunk: int) -> _Part:
    with np.load(_part_file(parts, chunk), allow_pickle=False) as arrays:
        return _Part(arrays["doc"], arrays["term"], arrays["count"], arrays["length"])


def _totals(parts: Path, chunks: int, vocabulary: int) -> tuple[NDArray[np.int64], int]:
    """Documents each term occurs in, and terms in all documents together."""
    frequency_V = np.zeros(vocabulary, np.int64)
    tokens = 0
    for chunk in range(chunks):
        part = _read_part(parts, chunk)
        frequency_V += np.bincount(part.term_N, minlength=vocabulary)
        tokens += int(part.length_D.sum())
    return frequency_V, tokens


def _write_columns(
    parts: Path,
    folder: Path,
    chunks: int,
    frequency_V: NDArray[np.int64],
    mean_length: float,
    k1_b: tuple[float, float],
    documents: int,
    progress: Callable[[int, int], None],
) -> None:
    k1, b = k1_b
    start_V = np.concatenate([np.zeros(1, np.int64), np.cumsum(frequency_V)])
    entries = int(start_V[-1])
    idf_V = np.array([math.log(1 + (documents - n + 0.5) / (n + 0.5)) for n in frequency_V.tolist()], np.float32)
    data = np.lib.format.open_memmap(folder / "data.csc.index.npy", "w+", np.float32, (entries,))  # type: ignore[no-untyped-call]
    rows = np.lib.format.open_memmap(folder / "indices.csc.index.npy", "w+", np.int32, (entries,))  # type: ignore[no-untyped-call]
    next_V = start_V[:-1].copy()
    for chunk in range(chunks):
        part = _read_part(parts, chunk)
        length_N = part.length_D[part.doc_N - chunk * CHUNK_DOCS].astype(np.float64)
        count_N = part.count_N.astype(np.float64)
        score_N = idf_V[part.term_N] * (count_N / (k1 * ((1 - b) + b * length_N / mean_length) + count_N))
        order = np.argsort(part.term_N, kind="stable")
        term_N = part.term_N[order]
        term_U, first_U, size_U = np.unique(term_N, return_index=True, return_counts=True)
        place_N = np.repeat(next_V[term_U] - first_U, size_U) + np.arange(len(term_N))
        data[place_N] = score_N[order].astype(np.float32)
        rows[place_N] = part.doc_N[order]
        next_V[term_U] += size_U
        progress(documents + min((chunk + 1) * CHUNK_DOCS, documents), 2 * documents)
    data.flush()
    rows.flush()
    # One more column, empty: bm25s keeps an empty term for queries without any known one.
    np.save(folder / "indptr.csc.index.npy", np.append(start_V, start_V[-1]), allow_pickle=False)
