"""The retrieval service: one aiohttp process with Search-R1's `/retrieve` in front of one index.

In: the configuration, then requests. Out: replies; `<run folder>/search.url` once the service is ready. Endpoints:
`POST /retrieve`, `GET /health` (alive), `/ready` (has answered a real query), `/metrics` (Prometheus text), `/info` (manifest).
SIGTERM and Ctrl-C stop it; SIGHUP opens the index again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from async_search_rl.config import Config
from async_search_rl.errors import SchemaError, ServiceError
from async_search_rl.http import OverloadedError, announce, listening, make_app, port_is_free, read_token, stop_signal
from async_search_rl.metrics import prometheus_text
from search.backends import open_backend
from search.engine import Hits, Retriever
from search.index import Hit
from search.requests import RequestLimits, RetrieveRequest, parse_request
from search.schema import TIMEOUT_HEADER

_log = logging.getLogger(__name__)


def serve(config: Config) -> None:
    """Serve until SIGTERM or Ctrl-C. Blocks; to be called in the main thread of a process of its own.

    Raises:
        ConfigError, DataError: the port is busy, the corpus or index is missing or not what it must be.
    """
    ended = asyncio.run(_serve(config))
    if not ended:
        # The thread that opens or builds the index cannot be interrupted, and the interpreter would wait for it. A build resumes.
        sys.stdout.flush()
        os._exit(0)


def url_file(config: Config) -> Path:
    """Where the service announces its address."""
    return config.run.folder / "search.url"


def build_app(config: Config, retriever: Retriever, token: str | None) -> web.Application:
    """The application around a started or starting ``retriever``."""
    settings = config.retrieval
    limits = RequestLimits(settings.topk, settings.max_topk, settings.max_query_chars)

    async def retrieve(request: web.Request) -> web.Response:
        if not retriever.ready:
            raise OverloadedError("the index is being opened")
        parsed = parse_request(await request.read(), limits)
        answers = await retriever.retrieve(parsed, _timeout_s(request, settings.timeout_s))
        return web.Response(body=encode_reply(parsed, answers), content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def ready(_: web.Request) -> web.Response:
        if not retriever.ready:
            raise OverloadedError("the index is being opened")
        return web.json_response({"status": "ready"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=prometheus_text("search", retriever.metrics()), content_type="text/plain")

    async def info(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(retriever.info()), content_type="application/json")

    app = make_app(token, max_body_bytes=int(settings.max_body_mib * 2**20))
    app.router.add_post("/retrieve", retrieve)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/info", info)
    return app


def encode_reply(request: RetrieveRequest, answers: Sequence[Hits]) -> bytes:
    """Search-R1's reply; documents go out as they stand in the corpus. ``cut`` names the queries that were too long."""
    hit = _scored_hit if request.return_scores else _bare_hit
    result = b",".join([b"[%b]" % b",".join(map(hit, hits)) for hits in answers])
    cut = b',"cut":' + msgspec.json.encode(request.cut) if request.cut else b""
    return b'{"result":[%b]%b}' % (result, cut)


def _scored_hit(hit: Hit) -> bytes:
    return b'{"document":%b,"score":%b}' % (hit[0], repr(hit[1]).encode())


def _bare_hit(hit: Hit) -> bytes:
    return hit[0]


async def _serve(config: Config) -> bool:
    """Serve until told to stop; whether no thread was still opening an index by then."""
    settings = config.retrieval
    token = read_token(config.security)
    retriever = Retriever(settings, functools.partial(open_backend, settings))
    stop = stop_signal()
    reloads: set[asyncio.Task[None]] = set()
    app = build_app(config, retriever, token)
    announced = url_file(config)
    last_port = _withdraw(announced, settings.host)
    async with listening(app, settings.host, settings.port or last_port, token) as url:
        starting = asyncio.create_task(retriever.start())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                starting.result()
                _reload_on_hangup(retriever, reloads)
                announce(announced, url)
                print(f"search: {retriever.info().get('backend')} ready at {url}", flush=True)
                await stopping
        finally:
            reloading = bool(reloads)
            for task in (starting, stopping, *reloads):
                task.cancel()
            await asyncio.gather(starting, stopping, *reloads, return_exceptions=True)
            await retriever.stop()
    return retriever.opened and not reloading


def _withdraw(announced: Path, host: str) -> int:
    """Put the last announcement aside: until the next one, nobody shall think that the service is ready.

    Its port if that is free, else 0; a service that takes it again is found by the clients of the one before.
    """
    aside = announced.with_name(f".{announced.name}.last")
    with contextlib.suppress(FileNotFoundError):
        announced.replace(aside)
    try:
        port = urllib.parse.urlsplit(aside.read_text(encoding="ascii").strip()).port or 0
    except (OSError, ValueError):
        return 0
    return port if port_is_free(host, port) else 0


def _reload_on_hangup(retriever: Retriever, running: set[asyncio.Task[None]]) -> None:
    """Open the index again at SIGHUP; ``running`` holds the one reload under way, and a signal meanwhile is not another one."""

    async def reload() -> None:
        try:
            await retriever.reload()
        except (OSError, ValueError, ServiceError) as error:
            _log.error("the index could not be opened again; the old one goes on: %s", error)

    def start() -> None:
        if running:
            return
        task = asyncio.get_running_loop().create_task(reload())
        running.add(task)
        task.add_done_callback(running.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, start)


def _timeout_s(request: web.Request, default_s: float) -> float:
    value = request.headers.get(TIMEOUT_HEADER)
    if value is None:
        return default_s
    try:
        timeout_s = float(value)
    except ValueError:
        timeout_s = -1.0
    if not 0 < timeout_s < float("inf"):
        raise SchemaError(f"{TIMEOUT_HEADER} must be a number of seconds > 0, got {value!r}")
    return timeout_s
