"""BM25 by tantivy: an inverted index on disk whose top-k skips what cannot win, for corpora too large to score whole.

Its parameters are tantivy's own (k1 = 1.2, b = 0.75, lengths rounded to a byte), and so is its analysis: words, lower case,
English stop words, Snowball stemmer. Documents are added in row order by one writer, so that the index is the same at every build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tantivy

from search.corpus import Corpus
from search.index import NO_ROW, Ranking

ANALYZER = "tantivy-simple+lowercase+en-stopwords+snowball-english"
_TOKENIZER = "passage"
_TEXT, _ROW = "text", "row"
_MAX_WORD_BYTES = 64
_HEAP_BYTES = 256_000_000
_COMMIT_DOCS = 250_000


def build_tantivy(corpus: Corpus, folder: Path, progress: Callable[[int, int], None], commit_docs: int = _COMMIT_DOCS) -> None:
    """Write a tantivy index of ``corpus`` into ``folder``; goes on after the last commit of an interrupted build.

    ``progress(done, all)`` counts documents. Memory: the writer's 256 MB.
    """
    folder.mkdir(parents=True, exist_ok=True)
    schema = tantivy.SchemaBuilder()
    schema.add_text_field(_TEXT, stored=False, tokenizer_name=_TOKENIZER, index_option="freq")
    schema.add_integer_field(_ROW, fast=True)
    index = tantivy.Index(schema.build(), path=str(folder), sort_by_field=_ROW)
    index.register_tokenizer(_TOKENIZER, _analyzer())
    writer = index.writer(heap_size=_HEAP_BYTES, num_threads=1)
    for row in range(index.searcher().num_docs, len(corpus)):
        writer.add_document(tantivy.Document(**{_TEXT: corpus.contents(row), _ROW: row}))
        if (row + 1) % commit_docs == 0:
            writer.commit()
        if (row + 1) % 1000 == 0:
            progress(row + 1, len(corpus))
    writer.commit()
    writer.wait_merging_threads()
    progress(len(corpus), len(corpus))


class TantivyIndex:
    """A :class:`search.index.RowIndex`. Equal scores are ordered by row; several threads search a batch."""

    releases_gil = True

    def __init__(self, folder: Path, threads: int) -> None:
        self._index = tantivy.Index.open(str(folder))
        self._analyzer = _analyzer()
        self._index.register_tokenizer(_TOKENIZER, self._analyzer)
        self._schema = self._index.schema
        self._searcher = self._index.searcher()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tantivy") if threads > 1 else None

    def rank(self, queries: Sequence[str], topk: int) -> Ranking:
        """See :class:`search.index.RowIndex`. Documents that share no term with the query are not ranked."""
        topk = min(topk, max(1, self._searcher.num_docs))
        rows_QK = np.full((len(queries), topk), NO_ROW, np.int64)
        scores_QK = np.zeros((len(queries), topk), np.float32)
        answers = (self._pool.map if self._pool and len(queries) > 1 else map)(lambda query: self._rank_one(query, topk), queries)
        for i, (rows, scores) in enumerate(answers):
            rows_QK[i, : len(rows)] = rows
            scores_QK[i, : len(scores)] = scores
        return Ranking(rows_QK, scores_QK)

    def info(self) -> dict[str, Any]:
        """Analysis, segments and threads."""
        return {"backend": "tantivy", "analyzer": ANALYZER, "segments": self._searcher.num_segments, "threads": self._threads}

    def close(self) -> None:
        """End the threads."""
        if self._pool:
            self._pool.shutdown()

    def _rank_one(self, query: str, topk: int) -> tuple[list[int], list[float]]:
        words = dict.fromkeys(self._analyzer.analyze(query))  # Each term once, as tantivy's own query parser has it.
        if not words:
            return [], []
        should = [
            (tantivy.Occur.Should, tantivy.Query.term_query(self._schema, _TEXT, word, index_option="freq")) for word in words
        ]
        # Without a count the collector may skip blocks that cannot reach the top k.
        hits = self._searcher.search(tantivy.Query.boolean_query(should), limit=topk, count=False).hits
        rows = self._searcher.fast_field_values(_ROW, [address for _, address in hits])
        ordered = sorted(zip((-score for score, _ in hits), rows, strict=True))
        return [int(row) for _, row in ordered], [-score for score, _ in ordered]


def _analyzer() -> Any:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for step in (
        tantivy.Filter.remove_long(_MAX_WORD_BYTES),
        tantivy.Filter.lowercase(),
        tantivy.Filter.stopword("english"),
        tantivy.Filter.stemmer("english"),
    ):
        builder = builder.filter(step)
    return builder.build()
