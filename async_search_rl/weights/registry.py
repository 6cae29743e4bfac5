"""Who wants weights: the receivers that poll, what they have, and what they said about the last offer.

Shared between the control server (which adds and answers polls on its event loop) and the broadcast thread (which hands out
offers). Everything happens under one condition, ``changed``, notified whenever something here changes. No clock of its own: times
are seconds of any monotonic clock, given by the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from async_search_rl.errors import SchemaError
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.schema import Offer, OfferRequest, ReceivedRequest
from async_search_rl.weights.transport import Member

RECENT_S = 5.0
"""A receiver that polled so lately is about to poll again; a publication waits ``join_grace_s`` for it."""
FORGET_S = 120.0
"""A receiver silent for so long, while it is not receiving, is forgotten."""
_SUSPECT_FAILURES = 2
_MOST_FAILURES = 16
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 30.0


@dataclass(eq=False)
class Poll:
    """One waiting request. ``wake`` may be called from any thread; ``connected`` says whether its caller still listens."""

    request: OfferRequest
    wake: Callable[[], None]
    connected: Callable[[], bool]
    offer: Offer | None = None


@dataclass
class _Receiver:
    seen: float
    poll: Poll | None = None
    assigned: Offer | None = None
    held: int = -1
    error: str = ""
    failures: int = 0
    retry_at: float = 0.0
    due: float = float("-inf")
    """Deadline of its last offer: until then it has nothing to say."""


class Registry:
    """Receivers by name."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._receivers: dict[str, _Receiver] = {}

    def arrive(self, poll: Poll, now: float) -> None:
        """A receiver polls; an older poll of the same name is answered with nothing."""
        request = poll.request
        worker_devices(request)
        with self._changed:
            receiver = self._receivers.setdefault(request.receiver, _Receiver(seen=now))
            if receiver.poll is not None:
                self._answer(receiver.poll, None)
            receiver.seen = now
            receiver.poll = poll
            receiver.assigned = None
            receiver.held = -1 if request.have is None else request.have
            self._changed.notify_all()

    def leave(self, poll: Poll, now: float) -> Offer | None:
        """The poll ends; what it was offered, if anything. An offer is never lost between a time-out and an answer."""
        with self._changed:
            receiver = self._receivers.get(poll.request.receiver)
            if receiver is not None and receiver.poll is poll:
                receiver.poll = None
                receiver.seen = now
            self._changed.notify_all()
            return poll.offer

    def waiting(self, version: int, now: float) -> list[Member]:
        """Receivers that poll now, are behind ``version`` (packed, so a higher incarnation is always newer) and may be served."""
        with self._changed:
            return [
                Member(name, worker_devices(r.poll.request), r.poll.request.epoch, suspect=r.failures >= _SUSPECT_FAILURES)
                for name, r in self._receivers.items()
                if r.poll is not None and r.poll.connected() and _behind(r.poll.request.have, version) and r.retry_at <= now
            ]

    def next_retry(self, version: int, now: float) -> float | None:
        """Seconds until a polling receiver that is behind may be served again; ``None`` if none waits for that."""
        with self._changed:
            times = [
                r.retry_at
                for r in self._receivers.values()
                if r.poll is not None and _behind(r.poll.request.have, version) and r.retry_at > now
            ]
        return min(times) - now if times else None

    def about_to_poll(self, now: float) -> list[str]:
        """Receivers that do not poll now but did a moment ago."""
        with self._changed:
            return [name for name, r in self._receivers.items() if r.poll is None and now - r.seen <= RECENT_S]

    def assign(self, name: str, offer: Offer, now: float) -> bool:
        """Answer the receiver's poll with ``offer``; false if it polls no more."""
        with self._changed:
            receiver = self._receivers.get(name)
            if receiver is None or receiver.poll is None or not receiver.poll.connected():
                return False
            receiver.assigned = offer
            receiver.due = now + offer.deadline_s
            receiver.error = ""
            poll, receiver.poll = receiver.poll, None
            self._answer(poll, offer)
            return True

    def confirm(self, message: ReceivedRequest, now: float) -> None:
        """A receiver has the whole publication, or says why not; an error about an offer that is over changes nothing.

        Raises:
            SchemaError: it never polled.
        """
        with self._changed:
            receiver = self._receivers.get(message.receiver)
            if receiver is None:
                raise SchemaError(f"receiver must have polled before it reports, got {message.receiver!r}")
            receiver.seen = now
            running = _is_offer(receiver.assigned, message.version, message.epoch)
            if running:
                receiver.assigned, receiver.due = None, float("-inf")
            if message.error and running:
                _fail(receiver, message.error, receiver.failures + 1, now)
            elif not message.error:
                receiver.held = max(receiver.held, message.version)
                receiver.failures, receiver.retry_at = 0, 0.0
            self._changed.notify_all()

    def outcome(self, name: str, version: int, epoch: int) -> str | None:
        """How the receiver's offer stands: ``None`` while it runs, empty when received, else the error."""
        with self._changed:
            receiver = self._receivers.get(name)
            if receiver is None:
                return "the receiver is gone"
            if _is_offer(receiver.assigned, version, epoch):
                return None
            if receiver.held >= version:
                return ""
            return receiver.error or "the receiver polled again without it"

    def withdraw(self, name: str, version: int, epoch: int, blame: str, now: float) -> None:
        """The sender gave the offer up.

        With ``blame``, a reason, the receiver was silent: it is served alone, later each time, until it receives something. Else
        nothing is held against it.
        """
        with self._changed:
            receiver = self._receivers.get(name)
            if receiver is None:
                return
            if _is_offer(receiver.assigned, version, epoch):
                receiver.assigned = None
            if blame:
                _fail(receiver, blame, max(_SUSPECT_FAILURES, receiver.failures + 1), now)
            self._changed.notify_all()

    def forget_silent(self, now: float) -> list[str]:
        """Drop receivers that have not been heard of for long, counted from the deadline of their last offer; their names."""
        with self._changed:
            gone = [name for name, r in self._receivers.items() if r.poll is None and now - max(r.seen, r.due) > FORGET_S]
            for name in gone:
                del self._receivers[name]
            return gone

    def release(self) -> None:
        """Answer every poll with nothing."""
        with self._changed:
            for receiver in self._receivers.values():
                if receiver.poll is not None:
                    self._answer(receiver.poll, None)

    def describe(self, now: float) -> dict[str, dict[str, str]]:
        """Each receiver for the status page."""
        with self._changed:
            return {
                name: {
                    "state": "polling" if r.poll is not None else "receiving" if r.assigned is not None else "busy",
                    "version": str(PolicyVersion.unpack(r.held)) if r.held >= 0 else "none",
                    "seen_s_ago": f"{now - r.seen:.1f}",
                    "error": r.error,
                }
                for name, r in sorted(self._receivers.items())
            }

    @staticmethod
    def _answer(poll: Poll, offer: Offer | None) -> None:
        poll.offer = offer
        poll.wake()


def worker_devices(request: OfferRequest) -> tuple[str, ...]:
    """The device of each of the receiver's workers.

    Raises:
        SchemaError: there is neither one device nor one for each worker.
    """
    if request.workers < 1:
        raise SchemaError(f"workers must be >= 1, got {request.workers}")
    names = tuple(request.device.split(","))
    if len(names) == request.workers and all(names):
        return names
    if len(names) == 1 and names[0]:
        return names * request.workers
    raise SchemaError(f"device must name one device or one for each of {request.workers} workers, got {request.device!r}")


def _behind(have: int | None, version: int) -> bool:
    return have is None or have < version


def _is_offer(offer: Offer | None, version: int, epoch: int) -> bool:
    return offer is not None and (offer.version, offer.epoch) == (version, epoch)


def _fail(receiver: _Receiver, reason: str, failures: int, now: float) -> None:
    receiver.error = reason
    receiver.failures = min(failures, _MOST_FAILURES)
    repeated = receiver.failures - _SUSPECT_FAILURES
    receiver.retry_at = now + (0.0 if repeated < 0 else min(_LAST_RETRY_S, _FIRST_RETRY_S * 2**repeated))
