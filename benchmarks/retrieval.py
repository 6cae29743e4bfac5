"""Measures retrieval: libraries alone, the service, and a one-query-at-a-time server, for every installed back end and two sizes.

    python benchmarks/retrieval.py --json runs/retrieval.json

In: the prepared corpus, questions and encoder (`bin/prepare corpus`, `bin/prepare minilm`). Out: a table, and JSON with all
figures. Everything compared is measured in one run with equal threads and top-k; the figures of one back end are taken one after
another, so a drift of the machine hits them alike. Indexes are made once and kept in the work folder.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_search_rl.config import Config, to_toml
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.config.run import RunSection
from benchmarks.common import ROOT, machine, write_json
from benchmarks.retrieval_data import distinct_queries, make_large_corpus, make_large_vectors, with_repeats
from benchmarks.retrieval_load import TOPK, folding_clients, one_at_a_time, overload, separate_clients
from search.backends import corpus_folder, encoder_spec, no_progress, open_backend
from search.build import folder_bytes
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
            row = {"size": size, "backend": name, **measure(settings, queries, args.seconds, args.work)}
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
    if args.json:
        write_json(args.json, result)


def measure(settings: RetrievalSection, queries: Sequence[str], seconds: float, work: Path) -> dict[str, Any]:
    """All figures of one back end over one corpus."""
    index = open_backend(settings)
    assert isinstance(index, CorpusIndex)
    documents = len(index.corpus)
    single_s, single = raw_single(index.rows, queries, seconds)
    batches = {str(size): raw_batch(index.rows, queries, size, seconds) for size in BATCHES}
    raw = {"single_queries_per_s": single, "batch_queries_per_s": max(batches.values()), "by_batch_size": batches}
    answers = index.rows.rank(queries[: _affordable(single_s, seconds, len(queries), 256)], TOPK).rows_QK.tolist()
    seconds = max(seconds, 70 * single_s)

    async def against_reference() -> dict[str, dict[str, float]]:
        async with one_at_a_time(index) as url:
            return {str(clients): await separate_clients(url, queries, clients, seconds) for clients in (1, 64)}

    reference = asyncio.run(against_reference())
    index.close()
    with service(settings, work) as (url, process):
        opened = _memory_bytes(process.pid)
        served = {str(n): asyncio.run(folding_clients(url, queries, n, seconds)) for n in CLIENTS}
        separate = {str(n): asyncio.run(separate_clients(url, queries, n, seconds)) for n in CLIENTS}
        used = _memory_bytes(process.pid)
    with service(msgspec.structs.replace(settings, cache_entries=100_000), work) as (url, _):
        repeated = with_repeats(list(queries), REPEATED)
        cached = asyncio.run(folding_clients(url, repeated, 64, seconds))
    files = _files_bytes(settings)
    best = max(served["64"]["queries_per_s"], separate["64"]["queries_per_s"])
    return {
        "documents": documents,
        "raw": raw,
        "reference": reference,
        "service": served,
        "service_separate": separate,
        "service_cached": cached,
        "memory": {"opened_bytes": opened, "used_bytes": used, "files_bytes": files, "ratio": used / files},
        "ratios": {
            "service_over_raw_batch": best / raw["batch_queries_per_s"],
            "service_over_reference": served["64"]["queries_per_s"] / reference["64"]["queries_per_s"],
            "separate_over_reference": separate["64"]["queries_per_s"] / reference["64"]["queries_per_s"],
            "raw_batch_over_raw_single": raw["batch_queries_per_s"] / raw["single_queries_per_s"],
        },
        "answers": answers,
    }


def raw_single(rows: RowIndex, queries: Sequence[str], seconds: float) -> tuple[float, float]:
    """Seconds a query and queries a second of the library asked one by one."""
    rows.rank(queries[:2], TOPK)
    started, done = time.perf_counter(), 0
    while done < len(queries) and (time.perf_counter() - started < seconds or done < 3):
        rows.rank([queries[done]], TOPK)
        done += 1
    each_s = (time.perf_counter() - started) / done
    return each_s, 1 / each_s


def raw_batch(rows: RowIndex, queries: Sequence[str], size: int, seconds: float) -> float:
    """Queries a second of the library asked ``size`` at a time."""
    rows.rank(queries[:2], TOPK)
    started, done = time.perf_counter(), 0
    while done == 0 or (time.perf_counter() - started < seconds and done + size <= len(queries)):
        rows.rank(queries[done : done + size], TOPK)
        done += size
    return done / (time.perf_counter() - started)


def soak(settings: RetrievalSection, queries: Sequence[str], seconds: float, work: Path) -> dict[str, Any]:
    """Twice its capacity for ``seconds``: what is answered, how late, and how memory moves."""
    with service(msgspec.structs.replace(settings, max_queue=512), work) as (url, process):
        capacity = asyncio.run(folding_clients(url, queries, 64, 5.0))["queries_per_s"]
        asyncio.run(overload(url, queries, 2 * capacity, 5.0))
        before = _memory_bytes(process.pid)
        result = asyncio.run(overload(url, queries, 2 * capacity, seconds))
        after = _memory_bytes(process.pid)
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


@contextmanager
def service(settings: RetrievalSection, work: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`bin/search` with ``settings``; yields its address and process."""
    run = RunSection(name="service", dir=str(work))
    file, announced = work / "service.toml", run.folder / "search.url"
    file.write_text(to_toml(Config(run=run, retrieval=settings)), encoding="utf-8")
    announced.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, str(ROOT / "bin" / "search"), str(file)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not announced.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"bin/search {file} did not become ready")
            time.sleep(0.05)
        yield announced.read_text(encoding="ascii").strip(), process
    finally:
        process.terminate()
        process.wait(timeout=60)


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


def _affordable(each_s: float, seconds: float, most: int, least: int) -> int:
    return int(min(most, max(least, seconds / each_s), 2000))


def _files_bytes(settings: RetrievalSection) -> int:
    """Bytes of the index, the corpus's offsets and its text."""
    index = Path(settings.index)
    own = index.stat().st_size if index.is_file() else folder_bytes(index / settings.backend)
    corpus = open_corpus(settings.corpus, corpus_folder(settings))
    return own + 8 * (len(corpus) + 1) + corpus.stamp.bytes


def _memory_bytes(pid: int) -> int:
    """Resident memory of a process and its children, mapped files included."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())]
    pages = sum(int(Path(f"/proc/{one}/statm").read_text(encoding="ascii").split()[1]) for one in pids)
    return pages * 4096


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
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of one measurement")
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of overload at the end; 0: none")
    parser.add_argument("--soak-backend", default="bm25/numpy", help="back end that is overloaded")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
