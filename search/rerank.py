"""A cross-encoder stage after any back end: candidates are scored together with their own query and put in that order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_search_rl.errors import DataError
from search.index import Answer, Hit, Index
from search.schema import WireDocument

PairScorer = Callable[[list[tuple[str, str]]], Sequence[float]]
"""Scores (query, contents) pairs; higher is better."""


class RerankIndex:
    """An :class:`search.index.Index` around another one. Scores are the cross-encoder's; equal ones keep the order they had."""

    def __init__(self, inner: Index, score: PairScorer, name: str, candidates: int) -> None:
        self._inner = inner
        self._score = score
        self._name = name
        self._candidates = candidates
        self.releases_gil = inner.releases_gil

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """See :class:`search.index.Index`."""
        answers = self._inner.search(queries, max(topk, self._candidates))
        pairs = [
            (query, msgspec.json.decode(hit.document, type=WireDocument).contents)
            for query, hits in zip(queries, answers, strict=True)
            if not isinstance(hits, Exception)
            for hit in hits
        ]
        scores = iter([float(score) for score in self._score(pairs)] if pairs else [])
        return [hits if isinstance(hits, Exception) else _reorder(hits, scores, topk) for hits in answers]

    def info(self) -> dict[str, Any]:
        """The inner index's, with the reranker's name."""
        return {**self._inner.info(), "rerank": self._name, "rerank_candidates": self._candidates}

    def close(self) -> None:
        """Close the inner index."""
        self._inner.close()


def load_cross_encoder(path: str, max_tokens: int, batch: int) -> PairScorer:
    """The scorer of a sentence-transformers cross-encoder in a folder.

    Raises:
        DataError: there is no model.
    """
    if not (Path(path) / "config.json").is_file():
        raise DataError(f"retrieval.rerank must be a model folder with config.json, got {path!r}")
    from sentence_transformers import CrossEncoder
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = CrossEncoder(path, max_length=max_tokens, local_files_only=True)

    def score(pairs: list[tuple[str, str]]) -> Sequence[float]:
        scores: Sequence[float] = model.predict(pairs, batch_size=batch, show_progress_bar=False).tolist()
        return scores

    return score


def _reorder(hits: list[Hit], scores: Any, topk: int) -> list[Hit]:
    """``hits`` by the next ``len(hits)`` of ``scores``."""
    scored = [Hit(hit.document, next(scores)) for hit in hits]
    return sorted(scored, key=lambda hit: -hit.score)[:topk]
