"""The generator process's half of the receiver: asks the learner for news, lets the engine's workers receive, reports the result.

In: the sender's address, which may change with every start of the learner. Out: offers, newest only, in the order of versions. A
learner that is gone is asked again until it or its successor answers; the engine goes on with what it has.

    async for offer in receiver.offers():
        if await receiver.receive(offer, workers):
            ...  # pause, swap, resume
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import aiohttp

from async_search_rl.codec import decode_message, encode_message
from async_search_rl.errors import DeadlineError, SchemaError, SearchRLError, ServiceError
from async_search_rl.http import MSGPACK, UnauthorizedError, client_session, reply_error
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.schema import Ack, Offer, OfferReply, OfferRequest, ReceivedRequest, WeightMessage

_log = logging.getLogger(__name__)

_POLL_S = 30.0
_CALL_TIMEOUT_S = 10.0
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 3.0
_FIRST_STATE_POLL_S = 0.01
_LAST_STATE_POLL_S = 0.05
_DEADLINE_SLACK_S = 5.0


class Workers(Protocol):
    """The engine's workers, each with a :class:`async_search_rl.weights.member.WeightMember`; every call reaches all of them."""

    async def begin(self, offer: bytes) -> None:
        """``member.begin(offer, tensor-parallel rank)``."""

    async def states(self) -> Sequence[str]:
        """``member.state()`` of each."""

    async def abort(self) -> None:
        """``member.abort()``."""


class WeightReceiver:
    """Asks one sender after the other for weights newer than ``have``. Use inside one event loop; ``close`` it there.

    ``url``: the sender's address, or a function that gives the present one (``None``: not known yet). ``device``: the name of the
    workers' device (:func:`async_search_rl.weights.device.device_name`), or one for each with commas.
    """

    def __init__(
        self,
        url: str | Callable[[], str | None] | None,
        receiver: str,
        workers: int,
        device: str,
        token: str | None,
        have: int | None = None,
    ) -> None:
        self._url = url
        self._receiver = receiver
        self._workers = workers
        self._device = device
        self._token = token
        self._epoch: int | None = None
        self._session: aiohttp.ClientSession | None = None
        self._moved = asyncio.Event()
        self.have = have
        """Packed version that the workers hold."""
        self.error = ""
        """Why the last offer was not received; empty if it was."""

    def update_url(self, url: str) -> None:
        """The learner was started again at another address; a running poll of the old one is given up."""
        if url != self._url:
            self._url = url
            self._moved.set()

    async def offers(self) -> AsyncIterator[Offer]:
        """Offers for ever, each newer than what the workers hold."""
        while True:
            yield await self.next_offer()

    async def next_offer(self) -> Offer:
        """Wait for an offer newer than ``have``, however long that takes and whatever becomes of the sender meanwhile.

        Raises:
            UnauthorizedError: the sender does not take the token.
            SchemaError: the sender does not take the request, for instance because it runs another release.
        """
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                offer = await self._poll()
                retry_s = _FIRST_RETRY_S
                if offer is not None and (self.have is None or offer.version > self.have):
                    return offer
            except UnauthorizedError:
                raise
            except (ServiceError, DeadlineError) as error:
                _log.log(logging.INFO if retry_s == _FIRST_RETRY_S else logging.DEBUG, "no weights for now: %s", error)
                await self._pause(retry_s * random.uniform(0.75, 1.25))
                retry_s = min(_LAST_RETRY_S, 2 * retry_s)

    async def receive(self, offer: Offer, workers: Workers) -> bool:
        """Let every worker receive the offer and report how it went; true if all hold it, digests checked.

        Returns by the offer's deadline and a few seconds.
        """
        error = await self._receive(offer, workers)
        await self.received(offer, error)
        if error:
            _log.warning("weights %s were not received: %s", PolicyVersion.unpack(offer.version), error)
        return not error

    async def received(self, offer: Offer, error: str = "") -> None:
        """Report the result of an offer. A sender that is gone, or does not know this receiver (a successor), needs no report."""
        self._epoch = offer.epoch if not error and offer.transport != "ipc" else None
        self.error = error
        if not error:
            self.have = offer.version
        message = ReceivedRequest(receiver=self._receiver, version=offer.version, epoch=offer.epoch, error=error[:1000])
        try:
            decode_message(await self._call("/received", message, _CALL_TIMEOUT_S), Ack)
        except (ServiceError, DeadlineError, SchemaError) as failure:
            _log.info("the report of weights %s was not taken: %s", PolicyVersion.unpack(offer.version), failure)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _receive(self, offer: Offer, workers: Workers) -> str:
        """Why the offer was not received; empty if it was."""
        pause_s = _FIRST_STATE_POLL_S
        try:
            async with asyncio.timeout(offer.deadline_s + _DEADLINE_SLACK_S):
                await workers.begin(encode_message(offer))
                while True:
                    states = await workers.states()
                    if all(state == "ready" for state in states):
                        return ""
                    if failed := [state for state in states if state not in ("ready", "receiving")]:
                        await workers.abort()
                        return failed[0].removeprefix("failed: ")
                    await asyncio.sleep(pause_s)
                    pause_s = min(_LAST_STATE_POLL_S, 1.2 * pause_s)
        except TimeoutError:
            return f"the workers must receive the publication within {offer.deadline_s:g} s, they did not"

    async def _poll(self) -> Offer | None:
        """One long poll; ``None`` without news or when the address changed."""
        self._moved.clear()
        message = OfferRequest(
            receiver=self._receiver, have=self.have, workers=self._workers, device=self._device, wait_s=_POLL_S, epoch=self._epoch
        )
        call = asyncio.ensure_future(self._call("/offer", message, _POLL_S + _CALL_TIMEOUT_S))
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            await asyncio.wait({call, moved}, return_when=asyncio.FIRST_COMPLETED)
            return decode_message(call.result(), OfferReply).offer if call.done() else None
        finally:
            for task in (call, moved):
                task.cancel()
            await asyncio.gather(call, moved, return_exceptions=True)

    async def _call(self, path: str, message: WeightMessage, timeout_s: float) -> bytes:
        url = self._url() if callable(self._url) else self._url
        if url is None:
            raise ServiceError("the weight sender's address is not known yet")
        if self._session is None:
            self._session = client_session(self._token, timeout_s)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CALL_TIMEOUT_S)
        headers = {"Content-Type": MSGPACK}
        try:
            async with self._session.post(url + path, data=encode_message(message), headers=headers, timeout=timeout) as reply:
                if reply.status >= 400:
                    raise await reply_error(reply)
                return await reply.read()
        except SearchRLError:
            raise
        except TimeoutError as error:
            raise DeadlineError(f"{url}{path} must answer within {timeout_s:g} s, it did not") from error
        except aiohttp.ClientError as error:
            raise ServiceError(f"{url}{path} cannot be reached: {error}") from error

    async def _pause(self, seconds: float) -> None:
        """Wait, but not past a change of address."""
        waiter = asyncio.ensure_future(self._moved.wait())
        await asyncio.wait({waiter}, timeout=seconds)
        waiter.cancel()
