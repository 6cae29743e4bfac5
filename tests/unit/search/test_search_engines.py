"""The web search back ends against local fakes of the APIs' documented replies."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from async_search_rl.errors import ConfigError, SearchFailedError
from async_search_rl.http import listening
from search.engines import ENGINES, engine_keys
from search.index import Answer
from search.online import OnlineIndex

KEYS = {name: f"key-of-{name}" for engine in ENGINES.values() for name in engine.keys}
FOUND = {
    "serper": {
        "searchParameters": {"q": "apple inc", "type": "search"},
        "organic": [{"title": "Apple", "link": "https://apple.example", "snippet": "Maker of phones", "position": 1}],
    },
    "serpapi": {
        "search_metadata": {"status": "Success"},
        "organic_results": [{"position": 1, "title": "Apple", "link": "https://apple.example", "snippet": "Maker of phones"}],
    },
    "google": {
        "kind": "customsearch#search",
        "items": [{"kind": "customsearch#result", "title": "Apple", "link": "https://apple.example", "snippet": "Maker of phones"}],
    },
    "brave": {
        "type": "search",
        "web": {
            "type": "search",
            "results": [{"title": "Apple", "url": "https://apple.example", "description": "Maker of phones"}],
        },
    },
}
NOTHING = {
    "serper": {"searchParameters": {"q": "x"}, "organic": []},
    "serpapi": {"search_metadata": {"status": "Success"}, "error": "Google hasn't returned any results for this query."},
    "google": {"kind": "customsearch#search", "searchInformation": {"totalResults": "0"}},
    "brave": {"type": "search", "query": {"original": "x"}},
}
Script = Callable[[web.Request], web.Response]


@contextmanager
def fake(reply: Script) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A fake API on a socket, in a thread of its own; yields its address and the requests it got."""
    seen: list[dict[str, Any]] = []
    ready, address = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        seen.append({"method": request.method, "query": dict(request.query), "headers": request.headers, "body": body})
        return reply(request)

    async def serve() -> None:
        app = web.Application()
        app.router.add_route("*", "/api", answer)
        async with listening(app, "127.0.0.1", 0, None, stop_timeout_s=0.1) as url:
            address.append(url + "/api")
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield address[0], seen
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def ask(engine: str, url: str, queries: list[str], topk: int = 3, retries: int = 0) -> list[Answer]:
    index = OnlineIndex(ENGINES[engine], KEYS, url, timeout_s=10, retries=retries)
    try:
        return index.search(queries, topk)
    finally:
        index.close()


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_documented_reply_becomes_passages(engine: str) -> None:
    with fake(lambda _: web.json_response(FOUND[engine])) as (url, seen):
        [hits] = ask(engine, url, ["apple inc"])
    assert isinstance(hits, list)
    document = json.loads(hits[0].document)
    assert document == {"id": "https://apple.example", "contents": '"Apple"\nMaker of phones'}
    assert hits[0].score == 1.0
    sent = json.dumps([seen[0]["query"], seen[0]["body"].decode(), dict(seen[0]["headers"])])
    assert "apple inc" in sent
    assert all(KEYS[key] in sent for key in ENGINES[engine].keys)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_nothing_found_is_an_empty_list(engine: str) -> None:
    with fake(lambda _: web.json_response(NOTHING[engine])) as (url, _):
        assert ask(engine, url, ["x"]) == [[]]


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("reply", [{}, [], {"error": "Invalid API key."}, {"organic": 1, "items": 1, "type": "search", "web": {}}])
def test_any_other_reply_is_a_failure(engine: str, reply: Any) -> None:
    with fake(lambda _: web.json_response(reply)) as (url, _):
        [answer] = ask(engine, url, ["x"])
    assert isinstance(answer, SearchFailedError)


def test_a_query_fails_alone() -> None:
    def reply(request: web.Request) -> web.Response:
        return web.json_response(FOUND["brave"]) if request.query["q"] == "good" else web.Response(status=403)

    with fake(reply) as (url, _):
        answers = ask("brave", url, ["bad", "good"])
    assert isinstance(answers[0], SearchFailedError)
    assert "403" in str(answers[0])
    assert isinstance(answers[1], list)
    assert len(answers[1]) == 1


def test_too_many_requests_are_retried() -> None:
    replies = [web.Response(status=429), web.json_response(FOUND["brave"])]
    with fake(lambda _: replies.pop(0)) as (url, seen):
        [hits] = ask("brave", url, ["x"], retries=1)
    assert isinstance(hits, list)
    assert len(seen) == 2


def test_a_missing_key_is_named_and_no_key_is_shown() -> None:
    with pytest.raises(ConfigError, match="GOOGLE_CSE_ID") as caught:
        engine_keys(ENGINES["google"], {"GOOGLE_API_KEY": "secret"})
    assert "secret" not in str(caught.value)
    index = OnlineIndex(ENGINES["google"], KEYS, "", 1, 0)
    assert not any(key in json.dumps(index.info()) for key in KEYS.values())
    index.close()
