"""One publication on its way to one group: everyone joins, the buckets go out, and whatever fails is noticed and broken off.

In: a sealed staged copy, the members with their offers already answered, and the group of an earlier publication if it may be
reused. Out: ``Outcome``. The calling thread supervises (it polls the store and the registry and never blocks for long); the sending
itself runs on a thread of its own, which is left behind if it does not come back, so a silent member costs at most the deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from async_search_rl.errors import WeightSyncError
from async_search_rl.weights.device import use_side_stream
from async_search_rl.weights.groups import SENDER_RANK, BroadcastGroup, Transfer, open_group
from async_search_rl.weights.registry import Registry
from async_search_rl.weights.rendezvous import Beat, Rendezvous
from async_search_rl.weights.schema import Offer
from async_search_rl.weights.staging import StagedWeights

_log = logging.getLogger(__name__)

JOIN_S = 30.0
"""Joining takes no longer than a step of the engine; who has not joined by then, or by the deadline, is gone."""
SILENCE_S = 10.0
"""A member that has joined and does not beat for so long is gone."""
_POLL_S = 0.005
_BEAT_CHECK_S = 0.5
_JOIN_THREAD_S = 2.0
_AT_DEADLINE_S = 0.5
"""A failure in the last while before the deadline is the deadline's: transport or receiver gave up just before the watch did."""


@dataclass
class Outcome:
    """How a delivery ended. ``error`` is empty when every bucket went out (for ``ipc``: was confirmed)."""

    error: str = ""
    blamed: tuple[str, ...] = ()
    seconds: float = 0.0
    group: BroadcastGroup | None = None


@dataclass
class _Sending:
    """What the sending thread shares with its supervisor."""

    done: threading.Event = field(default_factory=threading.Event)
    group: BroadcastGroup | None = None
    error: str = ""


class Delivery:
    """One publication to the members of one offer. ``names`` are the receivers in the order of their ranks."""

    def __init__(
        self,
        staged: StagedWeights,
        offers: dict[str, tuple[Offer, int]],
        group: BroadcastGroup | None,
        store: Store,
        registry: Registry,
        device: torch.device,
        should_stop: Callable[[], str],
    ) -> None:
        """``offers``: each receiver's offer and number of workers. ``should_stop``: a reason to break off, or nothing."""
        self._staged = staged
        self._offers = offers
        self._group = group
        self._registry = registry
        self._device = device
        self._should_stop = should_stop
        self._offer = next(iter(offers.values()))[0]
        self._rendezvous = Rendezvous(store, self._offer.epoch, self._offer.version)
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._beats_checked = 0.0
        self._began = 0.0
        self._late = False

    @property
    def epoch(self) -> int:
        """The group's epoch."""
        return self._offer.epoch

    @property
    def world(self) -> int:
        """Members of the group, the sender included."""
        return self._offer.world

    def run(self) -> Outcome:
        """Carry it out; returns by the deadline, give or take a moment."""
        self._began = time.monotonic()
        sending = _Sending(group=self._group)
        try:
            self._carry_out(sending)
            outcome = Outcome(group=sending.group)
        except WeightSyncError as error:
            outcome = Outcome(error=str(error), blamed=self._receivers_to_blame())
            self._break_off(sending, outcome)
        outcome.seconds = time.monotonic() - self._began
        return outcome

    def _carry_out(self, sending: _Sending) -> None:
        if self._offer.transport == "ipc":
            self._watch(self._all_confirmed, "confirm", self._offer.deadline_s)
            return
        self._watch(self._all_joined, "join", min(self._offer.deadline_s, JOIN_S))
        threading.Thread(target=self._send, args=(sending,), name="weights-send", daemon=True).start()
        self._rendezvous.go()
        self._watch(sending.done.is_set, "take the buckets", self._offer.deadline_s, sending.done)
        if sending.error:
            raise self._failure(sending.error)

    def _watch(self, finished: Callable[[], bool], what: str, within_s: float, done: threading.Event | None = None) -> None:
        """Poll until ``finished``, which must be ``within_s`` seconds from the beginning of the delivery.

        Raises:
            WeightSyncError: the deadline passed, a member failed or fell silent, or the delivery is to stop.
        """
        wakes = done or threading.Event()
        while not finished():
            if reason := self._should_stop():
                raise WeightSyncError(reason)
            if time.monotonic() > self._began + within_s:
                self._late = True
                raise WeightSyncError(f"all members must {what} within {within_s:g} s")
            self._require_no_failure()
            wakes.wait(_POLL_S)

    def _all_joined(self) -> bool:
        return not self._rendezvous.missing(self._offer.world)

    def _all_confirmed(self) -> bool:
        return all(self._result(name) == "" for name in self._offers)

    def _result(self, name: str) -> str | None:
        return self._registry.outcome(name, self._offer.version, self._offer.epoch)

    def _require_no_failure(self) -> None:
        for name in self._offers:
            if error := self._result(name):
                raise self._failure(f"receiver {name} failed: {error}")
        now = time.monotonic()
        if now - self._beats_checked >= _BEAT_CHECK_S:
            self._read_beats(now)
            if silent := [rank for rank in self._stale_ranks(now) if self._result(self._name_of(rank)) is None]:
                raise WeightSyncError(f"members must give a sign of life every {SILENCE_S:g} s, ranks {silent} gave none")

    def _failure(self, reason: str) -> WeightSyncError:
        self._late = self._left_s() <= _AT_DEADLINE_S
        return WeightSyncError(reason)

    def _read_beats(self, now: float) -> None:
        self._beats_checked = now
        for rank, beat in self._rendezvous.beats(self._offer.world).items():
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = (beat, now)

    def _send(self, sending: _Sending) -> None:
        """The sending thread: meet in the group if it is new, then one bucket after the other."""
        offer = self._offer
        try:
            use_side_stream(self._device)
            if sending.group is None:
                sending.group = open_group(
                    offer.transport,
                    offer.store_host,
                    offer.store_port,
                    offer.epoch,
                    SENDER_RANK,
                    offer.world,
                    self._device,
                    self._left_s(),
                )
            previous: Transfer | None = None
            for flat in self._staged.flats:
                on_host = offer.transport == "gloo" and flat.device.type != "cpu"
                transfer = sending.group.start(flat.cpu() if on_host else flat, self._left_s())
                if previous is not None:
                    previous.wait()
                previous = transfer
            if previous is not None:
                previous.wait()
        except Exception as error:
            sending.error = f"{type(error).__name__}: {error}"
            _log.debug("sending to epoch %d failed", offer.epoch, exc_info=True)
        finally:
            sending.done.set()

    def _left_s(self) -> float:
        return max(0.05, self._began + self._offer.deadline_s - time.monotonic())

    def _name_of(self, rank: int) -> str:
        for name, (offer, workers) in self._offers.items():
            if offer.first_rank <= rank < offer.first_rank + workers:
                return name
        raise WeightSyncError(f"rank must be one of 1 to {self._offer.world - 1}, got {rank}")

    def _stale_ranks(self, now: float) -> set[int]:
        return {rank for rank, (_, at) in self._beats.items() if now - at > SILENCE_S}

    def _receivers_to_blame(self) -> tuple[str, ...]:
        """Receivers with a worker that beats no more or, after a missed deadline, never joined, or else is furthest behind.

        Whoever reported an error has spoken and is not among them.
        """
        now = time.monotonic()
        ranks = self._stale_ranks(now)
        if self._late:
            self._read_beats(now)
            ranks |= set(self._rendezvous.missing(self._offer.world)) or self._last_ranks()
        return tuple(sorted({name for name in map(self._name_of, ranks) if self._result(name) is None}))

    def _last_ranks(self) -> set[int]:
        least = min((beat.landed for beat, _ in self._beats.values()), default=0)
        return {rank for rank, (beat, _) in self._beats.items() if beat.landed == least}

    def _break_off(self, sending: _Sending, outcome: Outcome) -> None:
        """Tell the members, abort the group, and leave the offers behind."""
        self._rendezvous.abort(outcome.error)
        now = time.monotonic()
        for name in self._offers:
            blame = f"silent: {outcome.error}" if name in outcome.blamed else ""
            self._registry.withdraw(name, self._offer.version, self._offer.epoch, blame, now)
        if sending.group is not None:
            discard(sending.group)


def discard(group: BroadcastGroup) -> None:
    """Abort a group on a thread of its own, waiting only a moment: tearing a group down may block as long as its operations."""
    thread = threading.Thread(target=group.abort, name="weights-abort", daemon=True)
    thread.start()
    thread.join(_JOIN_THREAD_S)
