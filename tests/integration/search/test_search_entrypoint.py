"""`bin/search` as a process: ready, stopped, killed and started again, and refused with one clear line."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from search.client import SearchClient
from tests.search_data import documents, questions, write_corpus

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 90.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(300))
    file = tmp_path / "search.toml"
    retrieval = f'corpus = "{corpus}"\nbackend = "tantivy"\nthreads = 1\n'
    file.write_text(f'[run]\nname = "r"\ndir = "{tmp_path}/runs"\n[retrieval]\n{retrieval}', encoding="utf-8")
    return file


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "bin" / "search"), *map(str, arguments)]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def started(config: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running service and its announced address."""
    file = config.parent / "runs" / "r" / "search.url"
    file.unlink(missing_ok=True)
    sets = [part for override in overrides for part in ("--set", override)]
    process = start(config, *sets)
    try:
        yield process, _announced(process, file)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def _announced(process: subprocess.Popen[str], file: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if file.exists():
            return file.read_text(encoding="ascii").strip()
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("the service was not ready in time")


def search(url: str, query: str) -> int:
    async def ask() -> int:
        async with SearchClient([url], timeout_s=30, retries=0) as client:
            return len(await client.search(query))

    return asyncio.run(ask())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_then_stopped_politely(config: Path, number: signal.Signals) -> None:
    with started(config) as (process, url):
        assert search(url, "silver river") == 3
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
        assert out == f"search: tantivy ready at {url}\n"


def test_stopped_while_it_builds(config: Path) -> None:
    """A build that takes many seconds is given up at once, and goes on at the next start."""
    write_corpus(config.parent / "corpus.jsonl", documents(120_000))
    process = start(config, "--set", "retrieval.backend=bm25", "--set", "retrieval.bm25_kernel=numpy")
    parts = config.parent / "corpus.jsonl.index" / "bm25" / "parts"
    deadline = time.monotonic() + DEADLINE_S
    while not list(parts.glob("*.npz")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")
    assert not (parts.parent / "manifest.json").exists()


def test_killed_and_started_again_the_client_goes_on(config: Path) -> None:
    async def keep_searching(client: SearchClient, stop: asyncio.Event) -> int:
        answered = 0
        while not stop.is_set():
            for query in questions(20):
                assert len(await client.search(query)) == 3
                answered += 1
        return answered

    async def scenario() -> None:
        with started(config) as (process, url):
            file = config.parent / "runs" / "r" / "search.url"
            async with SearchClient([url], timeout_s=60, retries=20) as client, asyncio.timeout(120):
                stop = asyncio.Event()
                searching = asyncio.create_task(keep_searching(client, stop))
                await client.search("before")
                process.kill()
                process.wait(timeout=30)
                again = await asyncio.to_thread(start, config)
                try:
                    await client.search("after")
                    stop.set()
                    assert await searching > 0
                    assert await asyncio.to_thread(_announced, again, file) == url
                finally:
                    again.terminate()
                    await asyncio.to_thread(again.communicate, timeout=30)
                assert again.returncode == 0

    asyncio.run(scenario())


def test_a_killed_service_leaves_no_worker_process(config: Path) -> None:
    with started(config, "retrieval.backend=rank_bm25") as (process, url):
        assert search(url, "silver river") == 3
        workers = _children(process.pid)
        assert workers
        process.kill()
        process.wait(timeout=30)
        deadline = time.monotonic() + DEADLINE_S
        while any(_alive(worker) for worker in workers):
            assert time.monotonic() < deadline, "a worker outlived its service"
            time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("retrieval.corpus=/nowhere/corpus.jsonl", "retrieval.corpus must be a file"),
        ("retrieval.backend=online", "SERPER_API_KEY"),
        ("retrieval.backend=remote", "retrieval.remote_url"),
        ("retrieval.backend=dense", "retrieval.encoder"),
        ("retrieval.rerank=/nowhere", "retrieval.rerank"),
        ("retrieval.host=0.0.0.0", "needs a token"),
        ("retrieval.colour=red", "retrieval.colour"),
        ("retrieval.topk=0", "retrieval.topk"),
    ],
)
def test_what_cannot_work_is_one_clear_line(config: Path, override: str, said: str) -> None:
    environment = {name: value for name, value in os.environ.items() if "API_KEY" not in name and "TOKEN" not in name}
    done = subprocess.run(
        command(config, "--set", override), capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_busy_port_is_one_clear_line(config: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = subprocess.run(
            command(config, "--set", f"retrieval.port={port}"), capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    assert (done.returncode, done.stderr) == (1, f"search: cannot bind 127.0.0.1:{port}: Address already in use\n")


def test_build_writes_an_index_with_its_manifest(config: Path) -> None:
    done = subprocess.run(command("build", config), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "tantivy index of 300 documents: about" in done.stderr
    assert (config.parent / "corpus.jsonl.index" / "tantivy" / "manifest.json").is_file()
