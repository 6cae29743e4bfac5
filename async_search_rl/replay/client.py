"""Client of the replay service: for actors inside their event loop, and a thread-safe blocking form for the learner.

A request is repeated with growing, jittered pauses while the service cannot be reached (it may be restarting) or is overloaded,
until ``retry_s`` seconds have passed. Repeating is safe: a put is idempotent, a cut is always the same groups, and a lease whose
answer was lost only leaves tickets whose lease runs out. An error the service answers with is raised at once.
"""

from __future__ import annotations

import asyncio
import io
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from async_search_rl.codec import decode_message, encode_message
from async_search_rl.errors import DeadlineError, ServiceError
from async_search_rl.http import MSGPACK, OverloadedError, client_session, reply_error
from async_search_rl.replay.schema import (
    Ack,
    AcknowledgeRequest,
    CutReply,
    CutRequest,
    FinishReply,
    FinishRequest,
    LeaseReply,
    LeaseRequest,
    Message,
    PublishRequest,
    PutReply,
    PutRequest,
    StartReply,
    StartRequest,
    Status,
)

ANSWER_S = 60.0
"""Seconds an answer may take beyond the wait a request asks for."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MAX_REPLY_BYTES = 16 << 30
_TRANSIENT = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OverloadedError, TimeoutError)

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class ReplayClient:
    """For use in one event loop, as an asynchronous context manager.

    Args:
        url: address of the service, ``http://host:port``.
        token: bearer token, if the service wants one.
        retry_s: seconds to go on trying while the service is unreachable.
        put_retry_s: the same for puts, which carry work that must not be lost.
        answer_s: seconds an answer may take beyond the wait a request asks for.
    """

    def __init__(
        self, url: str, token: str | None = None, *, retry_s: float = 300.0, put_retry_s: float = 3600.0, answer_s: float = ANSWER_S
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._retry_s, self._put_retry_s, self._answer_s = retry_s, put_retry_s, answer_s
        self._session: aiohttp.ClientSession | None = None
        self._random = random.Random()

    async def __aenter__(self) -> ReplayClient:
        self._session = client_session(self._token, self._answer_s)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Ask for tickets, news and cancellations; waits up to ``request.wait_s`` at the service."""
        return await self._post("/lease", request, LeaseReply, request.wait_s)

    async def put(self, request: PutRequest) -> PutReply:
        """Hand over a finished group; returns once the service has it on disk or has refused it."""
        return await self._post("/put", request, PutReply, retry_s=self._put_retry_s)

    async def start(self, request: StartRequest) -> StartReply:
        """The learner starts."""
        return await self._post("/start", request, StartReply)

    async def cut(self, request: CutRequest) -> CutReply:
        """Batch ``request.cut``; waits up to ``request.wait_s`` at the service."""
        return await self._post("/cut", request, CutReply, request.wait_s)

    async def publish(self, request: PublishRequest) -> Ack:
        """Weights are offered."""
        return await self._post("/publish", request, Ack)

    async def acknowledge(self, request: AcknowledgeRequest) -> Ack:
        """A checkpoint was written."""
        return await self._post("/acknowledge", request, Ack)

    async def finish(self, request: FinishRequest) -> FinishReply:
        """Wait up to ``request.wait_s`` for the last evaluation."""
        return await self._post("/finish", request, FinishReply, request.wait_s)

    async def status(self) -> Status:
        """Everything about the run."""
        return await self._until(lambda: self._exchange("GET", "/status", b"", Status, 0.0), "GET /status", self._retry_s)

    async def _post(self, path: str, message: Message, kind: type[M], wait_s: float = 0.0, retry_s: float | None = None) -> M:
        body = encode_message(message)
        patience_s = self._retry_s if retry_s is None else retry_s
        return await self._until(lambda: self._exchange("POST", path, body, kind, wait_s), f"POST {path}", patience_s)

    async def _until(self, send: Callable[[], Awaitable[T]], what: str, patience_s: float) -> T:
        deadline = time.monotonic() + patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await send()
            except _TRANSIENT as error:
                wait_s = error.retry_after_s if isinstance(error, OverloadedError) else pause_s
                if time.monotonic() + wait_s >= deadline:
                    raise DeadlineError(f"{what} to {self._url} was not answered within {patience_s:g} s: {error!r}") from error
            await asyncio.sleep(wait_s * self._random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _exchange(self, method: str, path: str, body: bytes, kind: type[M], wait_s: float) -> M:
        if self._session is None:
            raise ServiceError("the replay client must be used inside its 'async with' block")
        timeout = aiohttp.ClientTimeout(total=wait_s + self._answer_s)
        headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
        data = io.BytesIO(body)  # large plain bytes would be written in one go, holding up the event loop
        async with self._session.request(method, self._url + path, data=data, headers=headers, timeout=timeout) as reply:
            if reply.status >= 400:
                raise await reply_error(reply)
            return decode_message(await reply.read(), kind, _MAX_REPLY_BYTES)


class BlockingReplayClient:
    """The same calls for code without an event loop; usable from several threads at once. Close it, or use it as a context."""

    def __init__(self, url: str, token: str | None = None, *, retry_s: float = 300.0, answer_s: float = ANSWER_S) -> None:
        self._longest_s = retry_s + answer_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replay-client", daemon=True)
        self._thread.start()
        self._client = ReplayClient(url, token, retry_s=retry_s, put_retry_s=retry_s, answer_s=answer_s)
        self._run(self._client.__aenter__())

    def __enter__(self) -> BlockingReplayClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self, request: StartRequest) -> StartReply:
        """See :meth:`ReplayClient.start`."""
        return self._run(self._client.start(request))

    def cut(self, request: CutRequest) -> CutReply:
        """See :meth:`ReplayClient.cut`."""
        return self._run(self._client.cut(request), request.wait_s)

    def publish(self, request: PublishRequest) -> Ack:
        """See :meth:`ReplayClient.publish`."""
        return self._run(self._client.publish(request))

    def acknowledge(self, request: AcknowledgeRequest) -> Ack:
        """See :meth:`ReplayClient.acknowledge`."""
        return self._run(self._client.acknowledge(request))

    def finish(self, request: FinishRequest) -> FinishReply:
        """See :meth:`ReplayClient.finish`."""
        return self._run(self._client.finish(request), request.wait_s)

    def status(self) -> Status:
        """See :meth:`ReplayClient.status`."""
        return self._run(self._client.status())

    def close(self) -> None:
        """End the connections and the thread."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, T], wait_s: float = 0.0) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(2 * self._longest_s + wait_s)
        finally:
            future.cancel()
