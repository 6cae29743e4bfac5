"""Section of the retrieval service and its client."""

from __future__ import annotations

from typing import Literal

from async_search_rl.config.types import NonNegative, NonNegativeFloat, Port, Positive, PositiveFloat, Section


class RetrievalSection(Section, frozen=True):
    """Retrieval: one section for the service (`bin/search`) and its clients."""

    url: str = ""
    """Address(es) of running services, comma separated; empty: the one that `bin/launch` starts."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: Port = 0
    """Port to bind; 0: a free one, announced in the run's folder."""
    backend: Literal["auto", "bm25", "tantivy", "rank_bm25", "dense", "hybrid", "remote", "online"] = "auto"
    """Index kind; `auto` chooses the lexical one that is fastest at the corpus's size."""
    corpus: str = ""
    """Corpus: JSON lines of {"id", "contents"}, plain or .gz."""
    index: str = ""
    """Index folder, or a FAISS file; empty: beside the corpus, built at the first start."""
    topk: Positive = 3
    """Passages a query when the request names none."""
    max_topk: Positive = 100
    """Largest topk that is served."""
    max_query_chars: Positive = 2000
    """Longer queries are cut and flagged."""
    max_body_mib: PositiveFloat = 8.0
    """Size cap of a request body."""
    max_batch: Positive = 256
    """Most queries one search call takes."""
    max_wait_ms: NonNegativeFloat = 5.0
    """Most milliseconds a busy worker lets a batch gather."""
    max_queue: Positive = 8192
    """Queries waiting before the service answers 503."""
    threads: NonNegative = 0
    """Search threads; 0: one a core."""
    cache_entries: NonNegative = 100_000
    """Entries of the result cache; 0: off."""
    timeout_s: PositiveFloat = 30.0
    """Deadline of one search, retries and hedges included."""
    retries: NonNegative = 3
    """Retries after connection errors and 503."""
    k1: PositiveFloat = 0.9
    """BM25 k1."""
    b: NonNegativeFloat = 0.4
    """BM25 b."""
