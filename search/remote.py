"""Any Search-R1-compatible server as a back end: this service then adds its batching, cache and deadlines to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from async_search_rl.errors import ConfigError, SearchFailedError
from search.client import SearchClient
from search.index import Answer, Hit
from search.schema import Passage, join_contents


class RemoteIndex:
    """An :class:`search.index.Index` whose searches are requests. Used by one thread, which gets an event loop of its own.

    Raises:
        ConfigError: no address is given.
    """

    releases_gil = True

    def __init__(self, urls: Sequence[str], timeout_s: float, retries: int) -> None:
        if not urls:
            raise ConfigError("retrieval.remote_url must name a server with retrieval.backend 'remote', got ''")
        self._urls = list(urls)
        self._timeout_s = timeout_s
        self._retries = retries
        self._runner = asyncio.Runner()
        self._client: SearchClient | None = None

    def search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        """See :class:`search.index.Index`. The batch goes out folded, a large one as two requests."""
        return self._runner.run(self._search(queries, topk))

    def info(self) -> dict[str, Any]:
        """Addresses."""
        return {"backend": "remote", "urls": self._urls}

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._runner.run(self._client.__aexit__(None, None, None))
        self._runner.close()

    async def _search(self, queries: Sequence[str], topk: int) -> list[Answer]:
        if self._client is None:
            self._client = await SearchClient(self._urls, topk, self._timeout_s, self._retries).__aenter__()
        asked = [self._client.search(query, topk) for query in queries]
        return [_answer(found) for found in await asyncio.gather(*asked, return_exceptions=True)]


def _answer(found: list[Passage] | BaseException) -> Answer:
    if isinstance(found, list):
        return [Hit(encode_document(passage.id, passage.title, passage.text), passage.score) for passage in found]
    if isinstance(found, Exception):
        return found
    raise SearchFailedError("the remote search was cancelled") from found


def encode_document(key: str, title: str, text: str) -> bytes:
    """A document as JSON."""
    return msgspec.json.encode({"id": key, "contents": join_contents(title, text)})
