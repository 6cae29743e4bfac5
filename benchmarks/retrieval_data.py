"""Corpora and vectors for the retrieval benchmark: a million passages, made from a small real corpus.

In: JSON lines of real passages. Out: files in a work folder, made once and kept. Everything is seeded.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_search_rl.questions import read_questions

_SEED = 11
_NOISE = 0.6
_ROWS_AT_ONCE = 20_000


def make_large_corpus(small: Path, path: Path, count: int) -> None:
    """``count`` passages: the small corpus first, then mixtures, each of a title, two thirds of its text's sentences and a third of
    another's. Words keep their real frequencies, so posting lists are as long as in a real corpus of that size.
    """
    if path.exists():
        return
    documents = [json.loads(line)["contents"].partition("\n") for line in small.read_text(encoding="utf-8").splitlines()]
    sentences = [re.split(r"(?<=[.!?]) ", text) for _, _, text in documents]
    rng = random.Random(_SEED)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    with aside.open("w", encoding="utf-8") as lines:
        for i in range(count):
            own = i % len(documents)
            title, _, text = documents[own]
            if i >= len(documents):
                other = sentences[rng.randrange(len(documents))]
                mine = rng.sample(sentences[own], max(1, 2 * len(sentences[own]) // 3))
                text = " ".join(mine + rng.sample(other, max(1, len(other) // 3)))
            lines.write(json.dumps({"id": str(i), "contents": f"{title}\n{text}"}, ensure_ascii=False) + "\n")
    aside.replace(path)


def make_large_vectors(vectors_ND: NDArray[np.float32], path: Path, count: int) -> NDArray[np.float32]:
    """``count`` unit vectors: the real ones first, then real ones with Gaussian noise of 0.6 times their length."""
    dimension = vectors_ND.shape[1]
    if path.exists():
        return np.memmap(path, np.float32, "r", shape=(count, dimension))
    rng = np.random.default_rng(_SEED)
    aside = path.with_suffix(".part")
    large = np.memmap(aside, np.float32, "w+", shape=(count, dimension))
    for start in range(0, count, _ROWS_AT_ONCE):
        rows = np.arange(start, min(start + _ROWS_AT_ONCE, count))
        noise = rng.standard_normal((len(rows), dimension), dtype=np.float32) * np.float32(_NOISE / np.sqrt(dimension))
        noise[rows < len(vectors_ND)] = 0
        moved = vectors_ND[rows % len(vectors_ND)] + noise
        large[rows] = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    large.flush()
    aside.replace(path)
    return np.memmap(path, np.float32, "r", shape=(count, dimension))


def distinct_queries(files: list[Path]) -> list[str]:
    """All different questions of ``files``, in a seeded order."""
    found = sorted({question.question for file in files for question in read_questions(file)})
    random.Random(_SEED).shuffle(found)
    return found


def with_repeats(queries: list[str], share: float) -> list[str]:
    """As many queries, of which ``share`` are repeats of one asked lately, as the members of a group ask alike."""
    rng = random.Random(_SEED)
    asked: list[str] = []
    fresh = iter(queries)
    while len(asked) < len(queries):
        asked.append(rng.choice(asked[-200:]) if asked and rng.random() < share else next(fresh))
    return asked
