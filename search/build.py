"""`bin/search build CONFIG`: builds the configured index, and says beforehand how large it will be and how long it will take.

The estimate comes from building the same index of the corpus's first documents in a temporary folder. An interrupted build goes
on where it stopped. Out: the index folder with its manifest, and one line.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from async_search_rl.config import Config
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import ConfigError
from search.backends import ROW_BACKENDS, corpus_folder, no_progress, open_rows, resolve_backend
from search.corpus import Corpus, open_corpus

_SAMPLE_DOCS = 2000
_DENSE_SAMPLE_DOCS = 128
Report = Callable[[int, int], None]


class Estimate(msgspec.Struct, frozen=True):
    """What a build will cost, by proportion to a sample."""

    seconds: float
    bytes: int


def build(config: Config) -> None:
    """Build the index of ``config.retrieval``.

    Raises:
        ConfigError, DataError: as :func:`search.backends.open_backend`.
    """
    settings = config.retrieval
    if settings.backend not in (*ROW_BACKENDS, "auto"):
        raise ConfigError(f"retrieval.backend must be an index over a corpus to be built, got {settings.backend!r}")
    console = Console(stderr=True)
    with _bar(console, "reading the corpus", "bytes") as report:
        corpus = open_corpus(settings.corpus, corpus_folder(settings), report)
    backend = resolve_backend(settings, corpus)
    guess = estimate(settings, corpus, backend)
    console.print(f"{backend} index of {len(corpus):,} documents: about {_bytes(guess.bytes)}, {_seconds(guess.seconds)}")
    started = time.monotonic()
    with _bar(console, f"building {backend}", "documents") as report:
        open_rows(settings, corpus, backend, report).close()
    corpus.close()
    folder = corpus_folder(settings)
    size, seconds = _bytes(folder_bytes(folder)), _seconds(time.monotonic() - started)
    print(f"search: {backend} index of {settings.corpus} is in {folder}: {size}, {seconds}")


def estimate(settings: RetrievalSection, corpus: Corpus, backend: str) -> Estimate:
    """Time and size by proportion to an index of the first documents; model loading is counted once."""
    sample = min(len(corpus), _DENSE_SAMPLE_DOCS if backend in ("dense", "hybrid") else _SAMPLE_DOCS)
    with tempfile.TemporaryDirectory(prefix="search-estimate-") as name:
        folder = Path(name)
        with (folder / "sample.jsonl").open("wb") as lines:
            for row in range(sample):
                lines.write(corpus.line(row).rstrip() + b"\n")
        small = msgspec.structs.replace(settings, corpus=str(folder / "sample.jsonl"), index=str(folder / "index"), faiss="Flat")
        small_corpus = open_corpus(small.corpus, folder / "index")
        build_s = _timed_open(small, small_corpus, backend)
        open_s = _timed_open(small, small_corpus, backend)
        small_corpus.close()
        size = folder_bytes(folder / "index")
    share = len(corpus) / sample
    return Estimate(open_s + max(0.0, build_s - open_s) * share, int(size * share))


def _timed_open(settings: RetrievalSection, corpus: Corpus, backend: str) -> float:
    """Seconds to open the index, and to build it where it is missing."""
    started = time.monotonic()
    open_rows(settings, corpus, backend, no_progress).close()
    return time.monotonic() - started


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in ``folder``."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@contextmanager
def _bar(console: Console, what: str, unit: str) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        tasks: list[TaskID] = []

        def report(done: int, total: int) -> None:
            if not tasks:
                tasks.append(progress.add_task(what))
            progress.update(tasks[0], completed=done, total=total)

        yield report


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
