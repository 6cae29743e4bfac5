"""The asynchronous client of the retrieval service (or of any Search-R1-compatible server).

In: single queries from many coroutines of one event loop. They are folded: whatever is asked while requests are in flight goes
into the next request. Out: passages, or SearchFailedError; a failure is never an empty list. Requests go to the replica with the
fewest outstanding; they are retried with jitter on connection errors, 502, 503 and 504, hedged to a second replica when slow, and
kept from replicas that fail again and again. Where an index fails at a folded request, its halves are asked, so that one bad query
fails alone. Everything ends by one deadline.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from types import TracebackType

import aiohttp

from async_search_rl.config import Config
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import ConfigError, SearchFailedError
from async_search_rl.http import OverloadedError, announced_url, client_session, read_token
from search.exchange import RETRIED, IndexFailedError, Request, exchange
from search.folding import FoldingQueue, Question
from search.replica import Replica
from search.schema import Passage, decode_reply, encode_request

_MIN_SPLIT = 24
_FIRST_WAIT_S = 0.25
_MAX_WAIT_S = 8.0
_MIN_HEDGE_S = 0.02
_GRACE_S = 0.05
"""By this much a search outlasts its deadline, so that the reason of its request's failure is the one that is told."""


class SearchClient:
    """``async with SearchClient(urls) as client: passages = await client.search("...")``; one instance an event loop.

    Args:
        urls: addresses of replicas (``http://host:port``, with or without ``/retrieve``).
        topk: passages a query unless a call names another number.
        timeout_s: deadline of one ``search``, waits, retries and hedges included.
        retries: further attempts after connection errors, 502, 503 and 504.
        token: bearer token, if the service has one.
        connections: requests in flight to one replica.
        hedge: whether a slow request is sent to a second replica too.
        breaker_failures, breaker_cooldown_s: see :class:`search.replica.Replica`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        topk: int = 3,
        timeout_s: float = 30.0,
        retries: int = 6,
        token: str | None = None,
        *,
        connections: int = 4,
        hedge: bool = True,
        breaker_failures: int = 5,
        breaker_cooldown_s: float = 1.0,
    ) -> None:
        if not urls:
            raise ConfigError("retrieval.url must name at least one server, got none")
        self.replicas = [Replica(url.removesuffix("/retrieve"), breaker_failures, breaker_cooldown_s) for url in urls]
        self.topk = topk
        self._timeout_s = timeout_s
        self._retries = retries
        self._token = token
        self._connections = connections * len(self.replicas)
        self._slots = asyncio.Semaphore(self._connections)
        self._hedge = hedge
        self._pending = FoldingQueue()
        self._requests: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._session: aiohttp.ClientSession | None = None
        self._random = random.Random()

    @classmethod
    def from_config(cls, config: Config) -> SearchClient:
        """The client that ``config`` describes: ``retrieval.url``, or the service that this run started.

        Raises:
            ConfigError: no address is configured and none is announced.
        """
        settings = config.retrieval
        urls = [url.strip() for url in settings.url.split(",") if url.strip()]
        if not urls:
            announced = config.run.folder / "search.url"
            if (url := announced_url(announced)) is None:
                raise ConfigError(
                    f"retrieval.url must be set, or bin/search have announced its address in {announced}, got neither"
                )
            urls = [url]
        return cls.from_section(settings, urls, read_token(config.security))

    @classmethod
    def from_section(cls, settings: RetrievalSection, urls: Sequence[str], token: str | None) -> SearchClient:
        """The client of the replicas at ``urls`` with the limits of ``settings``."""
        return cls(
            urls,
            topk=settings.topk,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            token=token,
            connections=settings.connections,
            hedge=settings.hedge,
            breaker_failures=settings.breaker_failures,
            breaker_cooldown_s=settings.breaker_cooldown_s,
        )

    async def __aenter__(self) -> SearchClient:
        self._session = client_session(self._token, self._timeout_s, max_connections=0)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        self._pending.fail_all(SearchFailedError("the search client was closed"))
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def search(self, query: str, topk: int | None = None) -> list[Passage]:
        """The passages of ``query``, best first; empty only if the service found nothing.

        Raises:
            SearchFailedError: no replica answered within the deadline and the permitted retries.
        """
        if self._session is None:
            raise SearchFailedError("the search client must be used inside `async with`")
        now_s = time.monotonic()
        done: asyncio.Future[list[Passage]] = asyncio.get_running_loop().create_future()
        self._pending.add(Question(query, topk or self.topk, now_s + self._timeout_s, done))
        self._schedule()
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                return await done
        except TimeoutError:
            raise self._too_late() from None

    def _schedule(self) -> None:
        """Send at the end of this turn of the loop, so that everything asked in it travels together."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send what waits, many questions in two requests: one is answered while the other is searched."""
        self._scheduled = False
        most = max(_MIN_SPLIT, math.ceil(len(self._pending) / 2))
        while self._pending and len(self._requests) < self._connections:
            folded = self._pending.fold(time.monotonic(), most)
            if folded:
                request = asyncio.create_task(self._answer(folded), name="search-request")
                self._requests.add(request)
                request.add_done_callback(self._finished)

    def _finished(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if self._pending:
            self._schedule()

    async def _answer(self, questions: list[Question]) -> None:
        deadline_s = max(question.deadline_s for question in questions)
        try:
            answers = await self._ask([question.query for question in questions], questions[0].topk, deadline_s)
        except IndexFailedError:
            half = len(questions) // 2
            await asyncio.gather(self._answer(questions[:half]), self._answer(questions[half:]))
            return
        except (Exception, asyncio.CancelledError) as error:
            for question in questions:
                question.fail(error)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        for question, passages in zip(questions, answers, strict=True):
            question.answer(passages)

    async def _ask(self, queries: list[str], topk: int, deadline_s: float) -> list[list[Passage]]:
        """Attempts until one succeeds, retries or time run out, or the server says that the request itself is wrong.

        Raises:
            SearchFailedError: there is no answer.
            IndexFailedError: the index failed at some of several queries.
        """
        body = encode_request(queries, topk)
        last: Exception = self._too_late()
        for attempt in range(self._retries + 1):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            request = Request(body, len(queries), deadline_s, first=attempt == 0)
            try:
                async with asyncio.timeout(left_s), self._slots:
                    return decode_reply(await self._attempt(request), len(queries))
            except SearchFailedError:
                raise
            except IndexFailedError as error:
                if len(queries) > 1:
                    raise
                last = error
            except RETRIED as error:
                if time.monotonic() < deadline_s:
                    last = error
            except ValueError as error:
                raise SearchFailedError(f"{self._names()} must answer as Search-R1 does: {error}") from error
            if attempt < self._retries:
                await asyncio.sleep(min(self._wait_s(attempt, last), max(0.0, deadline_s - time.monotonic())))
        raise SearchFailedError(f"{self._names()} gave no answer: {type(last).__name__}: {last}") from last

    def _wait_s(self, attempt: int, error: Exception) -> float:
        """Doubling and jittered; at least what a full server asked for."""
        base_s: float = min(_FIRST_WAIT_S * 2**attempt, _MAX_WAIT_S)
        asked_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
        return asked_s + base_s * self._random.uniform(0.5, 1.0)

    async def _attempt(self, request: Request) -> bytes:
        """One request to the replica with the fewest outstanding, and a hedge to another when it is slow."""
        first = await self._choose()
        hedge_s = self._hedge_after_s(first)
        primary = asyncio.create_task(self._exchange(first, request))
        tasks = {primary}
        try:
            done, _ = await asyncio.wait(tasks, timeout=hedge_s)
            if not done and (second := self._other(first)) is not None:
                tasks.add(asyncio.create_task(self._exchange(second, request)))
            while True:
                done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None or not running:
                        return task.result()
                tasks = running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _exchange(self, replica: Replica, request: Request) -> bytes:
        assert self._session is not None
        return await exchange(self._session, replica, request)

    async def _choose(self) -> Replica:
        """The available replica with the fewest outstanding requests; waits while every breaker is open."""
        while True:
            now_s = time.monotonic()
            available = [replica for replica in self.replicas if replica.available_in(now_s) == 0]
            if available:
                return min(available, key=lambda replica: (replica.outstanding, self._random.random()))
            wait_s = min(replica.available_in(now_s) for replica in self.replicas)
            await asyncio.sleep(min(wait_s, _FIRST_WAIT_S) if math.isfinite(wait_s) else _FIRST_WAIT_S)

    def _other(self, first: Replica) -> Replica | None:
        now_s = time.monotonic()
        others = [replica for replica in self.replicas if replica is not first and replica.available_in(now_s) == 0]
        return min(others, key=lambda replica: replica.outstanding) if others else None

    def _hedge_after_s(self, first: Replica) -> float | None:
        """Seconds after which a second request is sent; None: never."""
        if not self._hedge or len(self.replicas) < 2:
            return None
        p95_s = first.p95_s()
        return None if p95_s is None else max(p95_s, _MIN_HEDGE_S)

    def _too_late(self) -> SearchFailedError:
        return SearchFailedError(f"{self._names()} must answer within {self._timeout_s:g} s, got no answer")

    def _names(self) -> str:
        return ", ".join(replica.url for replica in self.replicas)
