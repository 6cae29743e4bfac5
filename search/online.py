"""The web as a back end, through one of the APIs in :mod:`search.engines`. Title and extract of a page make a passage.

A query whose request fails after its retries fails alone; it never comes back as "nothing found".
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from async_search_rl.errors import SearchFailedError
from async_search_rl.http import client_session
from search.engines import Engine, WebResult
from search.index import Answer, Hit
from search.remote import encode_document

_AT_ONCE = 16
_FIRST_WAIT_S = 0.5
_RETRIED = (429, 500, 502, 503, 504)
_MAX_REPLY_BYTES = 8 * 2**20


class OnlineIndex:
    """An :class:`search.index.Index` over a web search API. Used by one thread, which gets an event loop of its own.

    Args:
        engine: which API.
        keys: its keys.
        url: address that replaces the API's own one; empty: its own.
        timeout_s: deadline of one query, retries included.
        retries: further attempts after connection errors, 429 and errors of the server.
    """

    releases_gil = True

    def __init__(self, engine: Engine, keys: Mapping[str, str], url: str, timeout_s: float, retries: int) -> None:
        self._engine = engine
        self._keys = dict(keys)
        self._url = url or engine.url
        self._timeout_s = timeout_s
        self._retries = retries
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """See :class:`search.index.Index`. The score of a result is one over its rank."""
        return self._runner.run(self._search(queries, topk))

    def info(self) -> dict[str, Any]:
        """Engine and address, never a key."""
        return {"backend": "online", "engine": self._engine.name, "url": self._url}

    def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            self._runner.run(self._session.close())
        self._runner.close()

    async def _search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        if self._session is None:
            self._session = client_session(None, self._timeout_s, _AT_ONCE)
        return list(await asyncio.gather(*(self._answer(query, topk) for query in queries)))

    async def _answer(self, query: str, topk: int) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                results = await self._ask(query, min(topk, self._engine.max_results))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, SearchFailedError):
                return error
            return SearchFailedError(f"{self._engine.name} gave no usable answer: {type(error).__name__}: {error}")
        return [
            Hit(encode_document(result.url, result.title, result.text), 1.0 / rank)
            for rank, result in enumerate(results[:topk], start=1)
        ]

    async def _ask(self, query: str, results: int) -> list[WebResult]:
        assert self._session is not None
        asked = self._engine.request(self._url, self._keys, query, results)
        last = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            try:
                async with self._session.request(
                    asked.method, asked.url, headers=asked.headers, params=asked.params, json=asked.json
                ) as reply:
                    if reply.status == 200:
                        return self._engine.parse(json.loads(await _read_capped(reply)))
                    last = f"answered {reply.status}"
                    if reply.status not in _RETRIED:
                        break
            except aiohttp.ClientConnectionError as error:
                last = f"{type(error).__name__}: {error}"
        raise SearchFailedError(f"{self._engine.name}: {last}")


async def _read_capped(reply: aiohttp.ClientResponse) -> bytes:
    body = await reply.content.read(_MAX_REPLY_BYTES + 1)
    while not reply.content.at_eof() and len(body) <= _MAX_REPLY_BYTES:
        body += await reply.content.read(_MAX_REPLY_BYTES + 1 - len(body))
    if len(body) > _MAX_REPLY_BYTES:
        raise SearchFailedError(f"a reply must be at most {_MAX_REPLY_BYTES} bytes, got more")
    return body
