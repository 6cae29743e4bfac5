"""The service over real sockets: Search-R1's contract, hostile requests, overload, a worker process that dies."""

import asyncio
import functools
import io
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from async_search_rl.config import Config
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import DataError, SearchFailedError
from async_search_rl.http import listening
from async_search_rl.metrics import unknown_names
from search.backends import open_backend
from search.client import SearchClient
from search.engine import Retriever
from search.index import Answer, Hit
from search.service import build_app
from tests.search_data import documents, questions, write_corpus

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(tmp_path: Path) -> RetrievalSection:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(300))
    return RetrievalSection(corpus=str(corpus), backend="tantivy", threads=2)


@asynccontextmanager
async def running(
    settings: RetrievalSection, open_index: Callable[[], Any] | None = None, token: str | None = None
) -> AsyncIterator[tuple[str, Retriever]]:
    retriever = Retriever(settings, open_index or functools.partial(open_backend, settings))
    app = build_app(Config(retrieval=settings), retriever, token)
    async with listening(app, "127.0.0.1", 0, token, stop_timeout_s=0.2) as url:
        try:
            await retriever.start()
            yield url, retriever
        finally:
            await retriever.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())


async def post(url: str, body: Any, path: str = "/retrieve") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(url + path, data=io.BytesIO(data)) as reply:
        return reply.status, await reply.json()


async def get(url: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url + path) as reply:
        return reply.status, await reply.text()


def spawned_children() -> set[psutil.Process]:
    """Living processes that multiprocessing started here; dead ones of other tests, waited for by nobody, do not count."""
    living = (child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE)
    return {child for child in living if "spawn_main" in " ".join(child.cmdline())}


SEARCH_R1_SCRIPT = """
import json, sys, urllib.request
payload = {"queries": ["red stone", "a castle by the water"], "topk": 3, "return_scores": True}
request = urllib.request.Request(sys.argv[1] + "/retrieve", json.dumps(payload).encode(), {"Content-Type": "application/json"})
for found in json.load(urllib.request.urlopen(request))["result"]:
    for i, item in enumerate(found):
        content = item["document"]["contents"]
        title, text = content.split("\\n")[0], "\\n".join(content.split("\\n")[1:])
        print(f"Doc {i + 1}(Title: {title}) {text} [{item['score']:.3f}]")
"""


def test_a_search_r1_script_works_unchanged(settings: RetrievalSection) -> None:
    async def scenario() -> None:
        async with running(settings) as (url, _):
            command = [sys.executable, "-c", SEARCH_R1_SCRIPT, url]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        lines = done.stdout.splitlines()
        assert done.returncode == 0, done.stderr
        assert len(lines) == 6
        assert all(line.startswith("Doc ") and '(Title: "' in line for line in lines)

    run(scenario)


def test_replies_with_and_without_scores(settings: RetrievalSection) -> None:
    async def scenario() -> None:
        async with running(settings) as (url, _):
            _, scored = await post(url, {"queries": ["silver river", "", "zzzz"], "topk": 4, "return_scores": True})
            _, bare = await post(url, {"queries": ["silver river", "", "zzzz"], "topk": 4})
            _, one = await post(url, {"query": "silver river", "top_k": 4})
        assert [len(found) for found in scored["result"]] == [4, 0, 0]
        assert set(scored) == set(bare) == {"result"}
        assert [[hit["document"] for hit in found] for found in scored["result"]] == bare["result"]
        assert one["result"] == bare["result"][:1]
        assert [hit["score"] for hit in scored["result"][0]] == sorted((hit["score"] for hit in scored["result"][0]), reverse=True)

    run(scenario)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        ({"queries": ["a"], "topk": 0}, 400),
        ({"queries": ["a"], "topk": -1}, 400),
        ({"queries": ["a"], "topk": 10**9}, 400),
        ({"queries": "a"}, 400),
        ({"queries": [None]}, 400),
        ({"queries": []}, 200),
        ({"queries": ["ünïcödé 河 🙂 \u0000 \u202e"]}, 200),
        ({"queries": ["river " * 20_000]}, 200),
        ({"queries": ['+-&&||!(){}[]^"~*?:\\/ AND OR NOT field:river']}, 200),
        ({"queries": ["x" * 9_000_000]}, 413),
        ({"queries": ["river"] * 5000}, 413),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_requests_get_an_answer_or_a_clear_refusal(settings: RetrievalSection, body: Any, status: int) -> None:
    async def scenario() -> None:
        async with running(settings) as (url, _):
            got, reply = await post(url, body)
            assert got == status
            assert reply["message"] if status >= 400 else "result" in reply
            assert (await post(url, {"queries": ["river"]}))[0] == 200

    run(scenario)


def test_a_cut_query_is_flagged(settings: RetrievalSection) -> None:
    async def scenario() -> None:
        async with running(settings) as (url, _):
            _, reply = await post(url, {"queries": ["river", "river " * 20_000]})
        assert reply["cut"] == [1]

    run(scenario)


def test_side_endpoints(settings: RetrievalSection) -> None:
    async def scenario() -> None:
        async with running(settings) as (url, retriever):
            for _ in range(2):
                await post(url, {"queries": ["river", "castle"]})
            assert (await get(url, "/health"))[0] == (await get(url, "/ready"))[0] == 200
            info = json.loads((await get(url, "/info"))[1])
            assert info["backend"] == "tantivy"
            assert info["corpus"]["rows"] == 300
            text = (await get(url, "/metrics"))[1]
            assert "async_search_rl_search_cache_hits 2" in text
            assert "async_search_rl_search_queries 4" in text
            assert unknown_names("search", retriever.metrics()) == []

    run(scenario)


def test_not_ready_before_the_first_answer(settings: RetrievalSection) -> None:
    async def scenario() -> None:
        retriever = Retriever(settings, functools.partial(open_backend, settings))
        async with listening(build_app(Config(retrieval=settings), retriever, None), "127.0.0.1", 0, None) as url:
            assert (await get(url, "/ready"))[0] == 503
            assert (await get(url, "/health"))[0] == 200
            assert (await post(url, {"queries": ["river"]}))[0] == 503

    run(scenario)


def test_a_token_is_demanded(settings: RetrievalSection) -> None:
    async def scenario() -> None:
        async with running(settings, token="secret") as (url, _):
            assert (await post(url, {"queries": ["river"]}))[0] == 401
            async with SearchClient([url], token="secret") as client:
                assert await client.search("river")

    run(scenario)


class Gate:
    """An index that answers when it is let; it counts what it is asked."""

    releases_gil = True

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        self.opened = False

    def search(self, queries: list[str], topk: int) -> list[Answer]:
        self.asked.append(list(queries))
        if self.error is not None and "capital city" not in queries:
            raise self.error
        return [[Hit(msgspec.json.encode({"id": query, "contents": query}), 1.0)] for query in queries]

    def info(self) -> dict[str, Any]:
        return {"backend": "gate"}

    def close(self) -> None: ...


async def until(happened: Callable[[], bool]) -> None:
    """Poll for something that tells nobody; the test's own deadline ends it."""
    while not happened():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_failures_are_errors_and_are_not_cached(settings: RetrievalSection) -> None:
    gate = Gate()

    async def scenario() -> None:
        async with running(settings, lambda: gate) as (url, retriever):
            gate.error = DataError("a damaged index")
            status, reply = await post(url, {"queries": ["a"]})
            assert (status, "damaged" in reply["message"]) == (502, True)
            gate.error = None
            assert (await post(url, {"queries": ["a"]}))[0] == 200
            assert retriever.metrics()["failed"] == 1

    run(scenario)


def test_a_reload_clears_the_cache(settings: RetrievalSection) -> None:
    gates: list[Gate] = []

    def open_gate() -> Gate:
        gates.append(Gate())
        return gates[-1]

    async def scenario() -> None:
        async with running(settings, open_gate) as (url, retriever):
            for _ in range(2):
                await post(url, {"queries": ["a"]})
            await retriever.reload()
            await post(url, {"queries": ["a"]})
        assert [gate.asked for gate in gates] == [[["capital city"], ["a"]], [["a"]]]

    run(scenario)


def test_an_answer_of_the_old_index_is_not_cached_after_a_reload(settings: RetrievalSection) -> None:
    entered, release = threading.Event(), threading.Event()

    class Held(Gate):
        def search(self, queries: list[str], topk: int) -> list[Answer]:
            if "capital city" not in queries:
                entered.set()
                assert release.wait(20)
            return super().search(queries, topk)

    gates: list[Gate] = [Held(), Gate()]

    async def scenario() -> None:
        async with running(settings, open_gate) as (url, retriever):
            first = asyncio.create_task(post(url, {"queries": ["a"]}))
            await asyncio.to_thread(entered.wait, 20)
            reload = asyncio.create_task(retriever.reload())
            await until(lambda: gates[1].opened)
            joined = asyncio.create_task(post(url, {"queries": ["a"]}))
            await until(lambda: retriever.metrics()["coalesced"] == 1)
            release.set()
            await asyncio.gather(first, joined, reload)
            await post(url, {"queries": ["a"]})
        assert gates[1].asked == [["a"]]

    waiting = list(gates)

    def open_gate() -> Gate:
        waiting[0].opened = True
        return waiting.pop(0)

    run(scenario)


def test_what_was_found_beside_a_failure_is_cached(settings: RetrievalSection) -> None:
    class Partly(Gate):
        def search(self, queries: list[str], topk: int) -> list[Answer]:
            found = super().search(queries, topk)
            return [SearchFailedError("bad") if query == "bad" else hits for query, hits in zip(queries, found, strict=True)]

    gate = Partly()

    async def scenario() -> None:
        async with running(settings, lambda: gate) as (url, retriever):
            assert (await post(url, {"queries": ["a", "bad"]}))[0] == 502
            assert (await post(url, {"queries": ["a"]}))[0] == 200
            assert retriever.metrics()["cache_hits"] == 1

    run(scenario)


def test_an_overloaded_service_says_when_to_come_back(settings: RetrievalSection) -> None:
    small = msgspec.structs.replace(settings, max_queue=4)

    async def scenario() -> None:
        async with running(small) as (url, _), aiohttp.ClientSession() as session:
            async with session.post(url + "/retrieve", json={"queries": [f"river {i}" for i in range(5)]}) as reply:
                assert reply.status == 503
                assert int(reply.headers["Retry-After"]) >= 1
            assert (await post(url, {"queries": ["river"]}))[0] == 200

    run(scenario)


def test_an_index_that_keeps_the_interpreter_gets_a_process_which_may_die(settings: RetrievalSection) -> None:
    apart = msgspec.structs.replace(settings, backend="rank_bm25")
    before = spawned_children()

    async def scenario() -> None:
        async with running(apart) as (url, retriever):
            assert retriever.info()["worker"] == "process"
            expected = await post(url, {"queries": ["silver river"], "return_scores": True})
            (worker,) = spawned_children() - before
            worker.kill()
            assert (await post(url, {"queries": ["golden gate"]}))[0] == 502
            await retriever.reload()
            assert await post(url, {"queries": ["silver river"], "return_scores": True}) == expected
        assert spawned_children() <= before

    run(scenario)


def test_the_remote_back_end_answers_as_the_server_behind_it(settings: RetrievalSection) -> None:
    async def scenario() -> None:
        async with running(settings) as (url, _):
            front = RetrievalSection(backend="remote", remote_url=url, timeout_s=10, retries=0)
            async with running(front) as (front_url, _):
                for query in questions(30):
                    body = {"queries": [query], "return_scores": True}
                    assert await post(front_url, body) == await post(url, body)
        async with asyncio.timeout(30):
            with pytest.raises(SearchFailedError):
                async with running(front):
                    pass

    run(scenario)
