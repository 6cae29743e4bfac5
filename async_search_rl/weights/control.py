"""The sender's HTTP side: long polls for offers, confirmations, and a status page.

Runs its own event loop on a side thread, for the learner's main thread has none. Polls wait here; the broadcast thread answers them
through the registry.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from async_search_rl.codec import decode_message, encode_message
from async_search_rl.errors import DeadlineError, SearchRLError
from async_search_rl.http import MSGPACK, listening, make_app
from async_search_rl.weights.registry import Poll, Registry
from async_search_rl.weights.schema import Ack, OfferReply, OfferRequest, ReceivedRequest

MAX_REQUEST_BYTES = 1 << 16
MAX_POLL_S = 60.0
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 1.0


class ControlServer:
    """The control server on its thread.

    ``admit`` raises for a receiver that can never be served, ``status`` gives what ``GET /status`` answers. Both are called on the
    event loop and must not block.
    """

    def __init__(
        self, registry: Registry, admit: Callable[[OfferRequest], None], status: Callable[[], dict[str, Any]], token: str | None
    ) -> None:
        self._registry = registry
        self._admit = admit
        self._status = status
        self._token = token
        self._ready = threading.Event()
        self._error: SearchRLError | None = None
        self._url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> str:
        """Bind and serve; the address.

        Raises:
            ConfigError: the bind is unsafe without a token, or the port is busy.
        """
        self._thread = threading.Thread(target=self._run, args=(host, port), name="weights-control", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            raise DeadlineError(f"the weight control server must start within {_START_TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error
        return self._url

    def stop(self, timeout_s: float) -> None:
        """Answer the running polls and stop serving."""
        loop, stop, thread = self._loop, self._stop, self._thread
        if loop is None or stop is None or thread is None or not thread.is_alive():
            return
        self._registry.release()
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout_s)

    def _run(self, host: str, port: int) -> None:
        asyncio.run(self._serve(host, port))

    async def _serve(self, host: str, port: int) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = make_app(self._token, MAX_REQUEST_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/status", self._get_status),
                web.post("/offer", self._post_offer),
                web.post("/received", self._post_received),
            ]
        )
        try:
            async with listening(app, host, port, self._token, stop_timeout_s=_STOP_TIMEOUT_S) as url:
                self._url = url
                self._ready.set()
                await self._stop.wait()
        except SearchRLError as error:
            self._error = error
        finally:
            self._ready.set()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def _post_offer(self, request: web.Request) -> web.Response:
        message = decode_message(await request.read(), OfferRequest, MAX_REQUEST_BYTES)
        self._admit(message)
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(answered.set)

        def connected() -> bool:
            return request.transport is not None and not request.transport.is_closing()

        poll = Poll(message, wake, connected)
        self._registry.arrive(poll, time.monotonic())
        no_news = loop.call_later(min(max(message.wait_s, 0.0), MAX_POLL_S), answered.set)
        try:
            await answered.wait()
        finally:
            no_news.cancel()
            offer = self._registry.leave(poll, time.monotonic())
        return web.Response(body=encode_message(OfferReply(offer=offer)), content_type=MSGPACK)

    async def _post_received(self, request: web.Request) -> web.Response:
        message = decode_message(await request.read(), ReceivedRequest, MAX_REQUEST_BYTES)
        self._registry.confirm(message, time.monotonic())
        return web.Response(body=encode_message(Ack()), content_type=MSGPACK)
