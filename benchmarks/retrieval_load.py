"""Load for the retrieval benchmark: clients in closed and open loops, and a reference server that answers one query at a time.

In: an address and queries. Out: throughput and latencies, as plain maps.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from async_search_rl.http import listening
from search.client import SearchClient
from search.index import Hit, Index
from search.requests import RequestLimits, parse_request
from search.schema import encode_request
from search.service import encode_reply

TOPK = 3
TIMEOUT_S = 300.0
WARM_CLIENTS = 8
Ask = Callable[[str], Awaitable[object]]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The ``share`` quantile of an ascending sequence."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def closed_loop(ask: Ask, queries: Iterator[str], clients: int, seconds: float) -> dict[str, float]:
    """``clients`` that each ask the next query as soon as the last one is answered, for ``seconds``, or until there is none.

    Every client asks at least one query.
    """
    latencies_s: list[float] = []
    started, started_cpu = time.perf_counter(), time.process_time()

    async def client() -> None:
        for query in queries:
            asked = time.perf_counter()
            await ask(query)
            now = time.perf_counter()
            latencies_s.append(now - asked)
            if now - started >= seconds:
                return

    await asyncio.gather(*(client() for _ in range(clients)))
    wall_s = time.perf_counter() - started
    ordered = sorted(latencies_s)
    return {
        "queries_per_s": len(ordered) / wall_s,
        "p50_ms": 1000 * quantile(ordered, 0.5),
        "p99_ms": 1000 * quantile(ordered, 0.99),
        "queries": len(ordered),
        "client_cpu_us": 1e6 * (time.process_time() - started_cpu) / len(ordered),
    }


async def folding_clients(
    url: str, queries: Sequence[str], clients: int, seconds: float, *, cycled: bool = True
) -> dict[str, float]:
    """The clients of one process through this project's client, as an actor's episodes ask; each query once unless ``cycled``."""
    stream = itertools.cycle(queries) if cycled else iter(queries)
    async with SearchClient([url], topk=TOPK, timeout_s=TIMEOUT_S, retries=0) as client:
        warm = await closed_loop(client.search, stream, min(clients, WARM_CLIENTS), seconds / 4 if cycled else 0.0)
        measured = await closed_loop(client.search, stream, clients, seconds)
        return {**measured, "all_queries": warm["queries"] + measured["queries"]}


async def separate_clients(url: str, queries: Sequence[str], clients: int, seconds: float) -> dict[str, float]:
    """Clients that know nothing of one another: a connection and a request for each query, as other trainers ask."""
    stream = itertools.cycle(queries)
    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:

        async def ask(query: str) -> None:
            async with session.post(url + "/retrieve", data=encode_request([query], TOPK)) as reply:
                found = msgspec.json.decode(await reply.read())
                assert reply.status == 200, found
                assert len(found["result"]) == 1

        await closed_loop(ask, stream, min(clients, WARM_CLIENTS), seconds / 4)
        return await closed_loop(ask, stream, clients, seconds)


@contextlib.asynccontextmanager
async def one_at_a_time(index: Index) -> AsyncIterator[str]:
    """A reference server over ``index``: each query of each request is a search of its own, one after another, without cache."""
    worker = ThreadPoolExecutor(1)
    limits = RequestLimits(TOPK, 100, 2000)

    def search_singly(queries: Sequence[str]) -> list[list[Hit]]:
        answers = [index.search([query], TOPK)[0] for query in queries]
        return [answer for answer in answers if not isinstance(answer, Exception)]

    async def retrieve(request: web.Request) -> web.Response:
        parsed = parse_request(await request.read(), limits)
        answers = await asyncio.get_running_loop().run_in_executor(worker, search_singly, parsed.queries)
        return web.Response(body=encode_reply(parsed, answers), content_type="application/json")

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    async with listening(app, "127.0.0.1", 0, None) as url:
        yield url
    worker.shutdown()


async def overload(url: str, queries: Sequence[str], queries_per_s: float, seconds: float, fold: int = 16) -> dict[str, Any]:
    """An open loop: requests of ``fold`` queries at a fixed rate, whatever becomes of them, for ``seconds``."""
    stream = itertools.cycle(queries)
    statuses: Counter[str] = Counter()
    accepted_s: list[float] = []
    running: set[asyncio.Task[None]] = set()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:

        async def ask() -> None:
            asked = time.perf_counter()
            body = encode_request(list(itertools.islice(stream, fold)), TOPK)
            try:
                async with session.post(url + "/retrieve", data=body) as reply:
                    await reply.read()
                    statuses[str(reply.status)] += 1
                    if reply.status == 200:
                        accepted_s.append(time.perf_counter() - asked)
            except aiohttp.ClientError as error:
                statuses[type(error).__name__] += 1

        started = time.perf_counter()
        for i in itertools.count():
            due = started + i * fold / queries_per_s
            if due > started + seconds:
                break
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(ask())
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
        wall_s = time.perf_counter() - started
    ordered = sorted(accepted_s)
    return {
        "offered_queries_per_s": queries_per_s,
        "accepted_queries_per_s": fold * len(ordered) / wall_s,
        "statuses": dict(statuses),
        "accepted_p50_ms": 1000 * quantile(ordered, 0.5),
        "accepted_p99_ms": 1000 * quantile(ordered, 0.99),
        "seconds": wall_s,
    }
