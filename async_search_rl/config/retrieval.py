"""Section of the retrieval service and its client."""

from __future__ import annotations

from typing import Literal

from async_search_rl.config.types import Fraction, NonNegative, NonNegativeFloat, Port, Positive, PositiveFloat, Section


class RetrievalSection(Section, frozen=True):
    """Retrieval: one section for the service (`bin/search`) and its clients."""

    url: str = ""
    """Address(es) of running services, comma separated; empty: the one that `bin/launch` starts."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: Port = 0
    """Port to bind; 0: a free one, announced in the run's folder (the announced one again after a restart, if it is free)."""
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
    cache_mib: PositiveFloat = 256.0
    """Most MiB of passages in the result cache."""
    timeout_s: PositiveFloat = 30.0
    """Deadline of one search, retries and hedges included."""
    retries: NonNegative = 6
    """Retries after connection errors, 502, 503 and 504, with doubling, jittered waits from 0.25 s on."""
    connections: Positive = 4
    """Requests a client keeps in flight to one replica; further queries gather into the next."""
    hedge: bool = True
    """Send a second request to another replica when the first is slower than the 95th percentile."""
    breaker_failures: Positive = 5
    """Failures in a row after which a client leaves a replica alone for a while."""
    breaker_cooldown_s: PositiveFloat = 1.0
    """Seconds it is left alone, doubling up to 30."""
    k1: PositiveFloat = 0.9
    """BM25 k1 (tantivy has its own, 1.2)."""
    b: Fraction = 0.4
    """BM25 b (tantivy has its own, 0.75)."""
    bm25_kernel: Literal["auto", "numpy", "numba"] = "auto"
    """How bm25s sums scores; `auto` takes numba where it is installed."""
    encoder: str = ""
    """Folder of the sentence-transformers or transformers encoder of `dense` and `hybrid`."""
    encoder_pooling: Literal["auto", "mean", "cls"] = "auto"
    """Pooling of token vectors; `auto` follows a sentence-transformers folder, else means."""
    query_prefix: str = ""
    """Text before every query that is encoded ("query: " for e5)."""
    passage_prefix: str = ""
    """Text before every passage that is encoded ("passage: " for e5)."""
    encoder_max_tokens: Positive = 256
    """Tokens after which a text is cut for encoding."""
    encoder_batch: Positive = 64
    """Texts encoded at a time."""
    encoder_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where texts are encoded; half precision on cuda."""
    faiss: str = "Flat"
    """FAISS index_factory string of a dense index: Flat, HNSW64, IVF4096,Flat, ..."""
    faiss_nprobe: Positive = 64
    """Cells an IVF index visits a query."""
    faiss_ef_search: Positive = 128
    """Candidates an HNSW index keeps while it searches."""
    faiss_gpu: Literal["off", "one", "shard"] = "off"
    """Search on one GPU, or on all of them with the index in shards (half precision; needs faiss-gpu)."""
    hybrid_candidates: Positive = 100
    """Passages each half of a hybrid index contributes before fusion."""
    rrf_k: Positive = 60
    """Constant of reciprocal rank fusion."""
    remote_url: str = ""
    """Address of the Search-R1-compatible server behind `remote`."""
    online_engine: Literal["serper", "serpapi", "google", "brave"] = "serper"
    """Web search behind `online`; its key comes from the environment."""
    online_url: str = ""
    """Address that replaces the engine's own one (a proxy, a test)."""
    rerank: str = ""
    """Folder of a cross-encoder that reorders the passages of any back end; empty: off."""
    rerank_candidates: Positive = 50
    """Passages the cross-encoder scores a query."""
