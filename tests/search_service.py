"""A running retrieval service, and requests to it."""

import asyncio
import functools
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from async_search_rl.config import Config
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.http import listening
from search.backends import open_backend
from search.engine import Retriever
from search.service import build_app


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
