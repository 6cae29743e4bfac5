"""The service over real sockets: Search-R1's contract, hostile requests, overload, a worker process that dies."""

import asyncio
import functools
import json
import subprocess
import sys
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from async_search_rl.config import Config
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import SearchFailedError
from async_search_rl.http import listening
from async_search_rl.metrics import unknown_names
from search.backends import open_backend
from search.client import SearchClient
from search.engine import Retriever
from search.service import build_app
from tests.search_data import questions
from tests.search_service import post, run, running

pytestmark = pytest.mark.integration


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
