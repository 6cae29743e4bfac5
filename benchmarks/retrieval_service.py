"""A running `bin/search` for the benchmark, and what it costs: memory, processor time, files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_search_rl.config import Config, to_toml
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.config.run import RunSection
from benchmarks.common import ROOT
from search.backends import corpus_folder
from search.build import folder_bytes
from search.corpus import open_corpus


@contextmanager
def service(settings: RetrievalSection, work: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`bin/search` with ``settings``; yields its address and process."""
    run = RunSection(name="service", dir=str(work))
    file = work / "service.toml"
    file.write_text(to_toml(Config(run=run, retrieval=settings)), encoding="utf-8")
    process = subprocess.Popen([sys.executable, str(ROOT / "bin" / "search"), str(file)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()  # "search: BACKEND ready at URL", or nothing if it ended.
        if not ready:
            raise SystemExit(f"bin/search {file} did not become ready")
        yield ready.split()[-1], process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def files_bytes(settings: RetrievalSection) -> int:
    """Bytes of the index, the corpus's offsets and its text."""
    index = Path(settings.index)
    own = index.stat().st_size if index.is_file() else folder_bytes(index / settings.backend)
    corpus = open_corpus(settings.corpus, corpus_folder(settings))
    return own + 8 * (len(corpus) + 1) + corpus.stamp.bytes


def memory_bytes(pid: int) -> int:
    """Resident memory of a process and its children, mapped files included."""
    pages = sum(int(Path(f"/proc/{one}/statm").read_text(encoding="ascii").split()[1]) for one in _with_children(pid))
    return pages * 4096


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and its children so far."""
    fields = [Path(f"/proc/{one}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split() for one in _with_children(pid)]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def _with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [pid, *map(int, children.split())]
