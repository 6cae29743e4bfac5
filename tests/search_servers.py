"""Fake Search-R1 servers on real sockets, and a client in front of them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from async_search_rl.http import listening
from search.client import SearchClient

Reply = Callable[["Server", list[str]], Awaitable[web.Response]]


async def passages(server: "Server", queries: list[str]) -> web.Response:
    """As Search-R1's server replies with scores."""
    found = [[{"document": {"id": "1", "contents": f'"{query}"\nfrom {server.name}'}, "score": 1.5}] for query in queries]
    return web.json_response({"result": found})


class Server:
    """A fake Search-R1 server whose replies follow ``script`` (its last item again and again)."""

    def __init__(self, name: str, *script: Reply) -> None:
        self.name = name
        self.script = list(script) or [passages]
        self.requests: list[list[str]] = []
        self.headers: list[Any] = []
        self.running = self.most_at_once = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        assert body["return_scores"] is True
        self.requests.append(body["queries"])
        self.headers.append(request.headers)
        reply = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        await asyncio.sleep(0)
        answer = await reply(self, body["queries"])
        self.running -= 1
        return answer

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/retrieve", self.answer)
        return app


def status(code: int, **headers: str) -> Reply:
    """Always this status, with the service's error body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def reply(server: Server, queries: list[str]) -> web.Response:
        return web.json_response({"error": "E", "message": "told so"}, status=code, headers=named)

    return reply


def run(servers: list[Server], scenario: Callable[[SearchClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), AsyncExitStack() as stack:
            urls = [
                await stack.enter_async_context(listening(server.app(), "127.0.0.1", 0, None, stop_timeout_s=0.1))
                for server in servers
            ]
            await scenario(await stack.enter_async_context(SearchClient(urls, **options)))

    asyncio.run(main())
