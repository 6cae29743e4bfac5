"""Measures retrieval: libraries alone, the service, and a one-query-at-a-time server, for every installed back end and two sizes.

    python benchmarks/retrieval.py --json runs/retrieval.json

In: the prepared corpus, questions and encoder (`bin/prepare corpus`, `bin/prepare minilm`). Out: a table, and JSON with all
figures. Everything compared is measured in one run with equal threads and top-k, in rounds that take every figure of a back end
once, so that a drift of the machine hits them alike; the medians are reported. Indexes are made once and kept in the work folder.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_search_rl.config.retrieval import RetrievalSection
from benchmarks.common import ROOT, machine, medians, write_json
from benchmarks.retrieval_data import distinct_queries, make_large_corpus, make_large_vectors, with_repeats
from benchmarks.retrieval_load import TOPK, folding_clients, one_at_a_time, overload, separate_clients
from benchmarks.retrieval_service import cpu_s, files_bytes, memory_bytes, service
from search.backends import encoder_spec, no_progress, open_backend
from search.corpus import open_corpus
from search.index import CorpusIndex, RowIndex

LEXICAL = ("bm25/numba", "bm25/numpy", "tantivy")
BACKENDS = {
    "small": (*LEXICAL, "rank_bm25", "dense/Flat", "dense/HNSW32", "dense/IVF128,Flat"),
    "large": (*LEXICAL, "dense/Flat", "dense/IVF1024,Flat"),
}
"""What is measured by default. HNSW is left out at a million: one core builds it for the better part of an hour."""
BATCHES = (64, 256)
CLIENTS = (1, 8, 64)
REPEATED = 0.5
RECALL_QUERIES = 500


def main(argv: list[str]) -> None:
    """Measure, print and write."""
    args = _arguments().parse_args(argv)
    queries = distinct_queries(args.questions)
    result: dict[str, Any] = {"machine": machine(), "threads": args.threads, "topk": TOPK, "queries": len(queries), "rows": []}
    for size in args.sizes:
        corpus = args.corpus if size == "small" else args.work / "large.jsonl"
        if size == "large":
            make_large_corpus(args.corpus, corpus, args.large)
        for name in args.backends or BACKENDS[size]:
            settings = _settings(name, corpus, args.work / size, args)
            _ensure_dense(name, size, settings, args)
            row = {"size": size, "backend": name, **measure(settings, queries, args)}
            result["rows"].append(row)
            print(_line(row), flush=True)
            if args.json:
                write_json(args.json, result)
    if args.soak:
        settings = _settings(args.soak_backend, args.corpus, args.work / "small", args)
        result["soak"] = soak(settings, queries, args.soak, args.work)
        print(result["soak"])
    result["recall_at_3"] = recalls(result["rows"])
    for row in result["rows"]:
        row.pop("answers")
    print(markdown(result))
    if args.json:
        write_json(args.json, result)


def measure(settings: RetrievalSection, queries: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one back end over one corpus: medians over rounds that each take every figure once."""
    index = open_backend(settings)
    assert isinstance(index, CorpusIndex)
    with service(settings, args.work) as (url, process):
        opened = memory_bytes(process.pid)
        figures = medians([one_round(index, url, process.pid, queries, args.seconds) for _ in range(args.repeats)])
        used = memory_bytes(process.pid)
    with service(msgspec.structs.replace(settings, cache_entries=100_000), args.work) as (url, _):
        seconds = _long_enough(args.seconds, 64, figures["raw"]["batch_queries_per_s"])
        repeated = with_repeats(list(queries), REPEATED)
        figures["service_cached"] = asyncio.run(folding_clients(url, repeated, 64, seconds, cycled=False))
    answers = index.rows.rank(queries[:RECALL_QUERIES], TOPK).rows_QK.tolist() if settings.backend == "dense" else []
    files = files_bytes(settings)
    index.close()
    raw, served, separate = figures["raw"], figures["service"]["64"], figures["service_separate"]["64"]
    best, reference = max(served["queries_per_s"], separate["queries_per_s"]), figures["reference"]["64"]["queries_per_s"]
    return {
        "documents": len(index.corpus),
        **figures,
        "memory": {"opened_bytes": opened, "used_bytes": used, "files_bytes": files, "ratio": used / files},
        "ratios": {
            "service_over_raw_batch": best / raw["batch_queries_per_s"],
            "service_over_reference": served["queries_per_s"] / reference,
            "separate_over_reference": separate["queries_per_s"] / reference,
            "raw_batch_over_raw_single": raw["batch_queries_per_s"] / raw["single_queries_per_s"],
        },
        "answers": answers,
    }


def one_round(index: CorpusIndex, url: str, pid: int, queries: Sequence[str], seconds: float) -> dict[str, Any]:
    """Each figure once, of the library in this process, of the reference server, and of the service at ``url``."""
    batches = {str(size): raw_batch(index.rows, queries, size, seconds) for size in BATCHES}
    best_batch = max(batches.values(), key=lambda one: one["queries_per_s"])
    raw = {
        "single_queries_per_s": raw_batch(index.rows, queries, 1, seconds)["queries_per_s"],
        "batch_queries_per_s": best_batch["queries_per_s"],
        "batch_cpu_us": best_batch["cpu_us"],
        "by_batch_size": batches,
    }

    async def against_reference() -> dict[str, dict[str, float]]:
        async with one_at_a_time(index) as reference_url:
            return {str(clients): await separate_clients(reference_url, queries, clients, seconds) for clients in (1, 64)}

    reference = asyncio.run(against_reference())
    served, separate = {}, {}
    for clients in CLIENTS:
        enough = _long_enough(seconds, clients, best_batch["queries_per_s"])
        before_s = cpu_s(pid)
        one = served[str(clients)] = asyncio.run(folding_clients(url, queries, clients, enough))
        one["service_cpu_us"] = 1e6 * (cpu_s(pid) - before_s) / one.pop("all_queries")
        separate[str(clients)] = asyncio.run(separate_clients(url, queries, clients, enough))
    return {"raw": raw, "reference": reference, "service": served, "service_separate": separate}


def _long_enough(seconds: float, clients: int, queries_per_s: float) -> float:
    """A few rounds of all clients, however slow the index."""
    return max(seconds, 3 * clients / queries_per_s)


def raw_batch(rows: RowIndex, queries: Sequence[str], size: int, seconds: float) -> dict[str, float]:
    """The library asked ``size`` queries at a time: queries a second, processor time a query."""
    rows.rank(queries[:2], TOPK)
    started, started_cpu, done = time.perf_counter(), time.process_time(), 0
    while done == 0 or (time.perf_counter() - started < seconds and done + size <= len(queries)):
        done += len(rows.rank(queries[done : done + size], TOPK).rows_QK)
    return {
        "queries_per_s": done / (time.perf_counter() - started),
        "cpu_us": 1e6 * (time.process_time() - started_cpu) / done,
    }


def soak(settings: RetrievalSection, queries: Sequence[str], seconds: float, work: Path) -> dict[str, Any]:
    """Twice its capacity for ``seconds``: what is answered, how late, and how memory moves."""
    with service(msgspec.structs.replace(settings, max_queue=512), work) as (url, process):
        capacity = asyncio.run(folding_clients(url, queries, 64, 5.0))["queries_per_s"]
        asyncio.run(overload(url, queries, 2 * capacity, 5.0))
        before = memory_bytes(process.pid)
        result = asyncio.run(overload(url, queries, 2 * capacity, seconds))
        after = memory_bytes(process.pid)
    return {"capacity_queries_per_s": capacity, **result, "memory_before_bytes": before, "memory_after_bytes": after}


def recalls(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Share of the exact top 3 that each approximate dense index finds, by size."""
    found = {}
    for row in rows:
        exact = [other for other in rows if other["size"] == row["size"] and other["backend"] == "dense/Flat"]
        if exact and row["backend"].startswith("dense/") and row is not exact[0]:
            pairs = list(zip(exact[0]["answers"], row["answers"], strict=False))
            found[f"{row['size']} {row['backend']}"] = sum(len(set(a) & set(b)) for a, b in pairs) / (TOPK * len(pairs))
    return found


def _settings(name: str, corpus: Path, folder: Path, args: argparse.Namespace) -> RetrievalSection:
    kind, _, variant = name.partition("/")
    common = {"corpus": str(corpus), "index": str(folder), "threads": args.threads, "cache_entries": 0, "timeout_s": 300.0}
    if kind == "bm25":
        return RetrievalSection(backend="bm25", bm25_kernel=variant, **common)
    if kind == "dense":
        common["index"] = str(folder / f"{variant.replace(',', '-')}.faiss")
        encoder = {"encoder": str(args.encoder), "encoder_max_tokens": args.encoder_tokens, "encoder_device": "cpu"}
        return RetrievalSection(backend="dense", faiss=variant, **encoder, **common)
    return RetrievalSection(backend=kind, **common)


def _ensure_dense(name: str, size: str, settings: RetrievalSection, args: argparse.Namespace) -> None:
    """Write the FAISS file of a dense back end: real vectors for the small corpus, perturbed ones for the large."""
    path = Path(settings.index)
    if not name.startswith("dense/") or path.is_file():
        return
    from search.encoder import Encoder
    from search.faiss_build import encode_corpus, write_faiss

    folder = args.work / "vectors"
    folder.mkdir(parents=True, exist_ok=True)
    corpus = open_corpus(args.corpus, args.work / "small")
    vectors_ND = encode_corpus(corpus, Encoder(encoder_spec(settings), args.threads), folder, no_progress)
    if size == "large":
        vectors_ND = make_large_vectors(np.asarray(vectors_ND), args.work / "large.f32", args.large)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_faiss(vectors_ND, settings.faiss, path)


def markdown(result: dict[str, Any]) -> str:
    """The rows as the table of benchmarks/README.md."""
    heads = (
        "documents",
        "back end",
        "raw one",
        "raw batch",
        "one-at-a-time server",
        "service, 1",
        "8",
        "64",
        "64 separate",
        "64 cached",
    )
    heads += ("p50 / p99 at 8, ms", "over raw batch", "over server", "recall@3", "memory / files")
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for row in result["rows"]:
        served, ratios = row["service"], row["ratios"]
        rates = [row["raw"]["single_queries_per_s"], row["raw"]["batch_queries_per_s"], row["reference"]["64"]["queries_per_s"]]
        rates += [served[clients]["queries_per_s"] for clients in ("1", "8", "64")]
        rates += [row["service_separate"]["64"]["queries_per_s"], row["service_cached"]["queries_per_s"]]
        recall = result["recall_at_3"].get(f"{row['size']} {row['backend']}")
        cells = [f"{row['documents']:,}", row["backend"], *(f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" for rate in rates)]
        cells += [f"{served['8']['p50_ms']:.1f} / {served['8']['p99_ms']:.1f}", f"{ratios['service_over_raw_batch']:.2f}"]
        cells += [f"{ratios['service_over_reference']:.1f}", "" if recall is None else f"{recall:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{row['memory']['ratio']:.2f}"]) + " |")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    eight, many = row["service"]["8"], row["service"]["64"]
    return (
        f"{row['size']:5} {row['backend']:20} raw single {row['raw']['single_queries_per_s']:8.1f} batch "
        f"{row['raw']['batch_queries_per_s']:8.1f} | reference {row['reference']['64']['queries_per_s']:7.1f} | service 64 "
        f"{many['queries_per_s']:8.1f} (separate {row['service_separate']['64']['queries_per_s']:7.1f}, cached "
        f"{row['service_cached']['queries_per_s']:8.1f}) p50 at 8 {eight['p50_ms']:6.1f} ms | over raw "
        f"{row['ratios']['service_over_raw_batch']:.2f} memory/files {row['memory']['ratio']:.2f}"
    )


def _arguments() -> argparse.ArgumentParser:
    cache = ROOT / ".cache"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=cache / "corpus" / "corpus.jsonl", help="small corpus")
    questions = [cache / "corpus" / "train.jsonl", cache / "corpus" / "eval.jsonl"]
    parser.add_argument("--questions", type=Path, nargs="+", default=questions, help="files of questions")
    parser.add_argument("--encoder", type=Path, default=cache / "minilm", help="encoder of the dense back ends")
    parser.add_argument("--encoder-tokens", type=int, default=128, help="tokens after which a text is cut for encoding")
    parser.add_argument("--work", type=Path, default=cache / "benchmark" / "retrieval", help="folder of indexes")
    parser.add_argument("--large", type=int, default=1_000_000, help="passages of the large corpus")
    parser.add_argument("--sizes", nargs="+", choices=("small", "large"), default=["small", "large"], help="corpora")
    parser.add_argument("--backends", nargs="+", help="back ends, as NAME or NAME/VARIANT (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="search threads, of the libraries and of the service")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of whose figures the median is taken")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of overload at the end; 0: none")
    parser.add_argument("--soak-backend", default="bm25/numpy", help="back end that is overloaded")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
