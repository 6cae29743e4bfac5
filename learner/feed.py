"""The learner's side of the replay service: batches, fetched ahead of their use, the same on every rank.

In: a :class:`CutSource` on rank 0 (the replay service, or recorded groups). Out: one :class:`Delivery` a step. A side thread of
rank 0 waits for the next batch while the current one is trained, so the learner waits only while too few groups are buffered;
the other ranks wait for rank 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Protocol

from async_search_rl.codec import decode, decode_group, encode
from async_search_rl.errors import DeadlineError
from async_search_rl.replay.schema import (
    Ack,
    AcknowledgeRequest,
    CutReply,
    CutRequest,
    EvaluationResult,
    FinishReply,
    FinishRequest,
    PublishRequest,
    StartReply,
    StartRequest,
)
from learner.batch import Batch, batch_from_groups
from learner.ranks import Ranks

_PAUSE_S = 0.02
"""Seconds between two polls, so that a service that answers at once is not asked without end."""
_LOOK_S = 0.2
"""Seconds between two looks at the stop flag while waiting."""
LONGEST_POLL_S = 2.0
"""A poll under way delays the end of the process by this much."""
_END_S = 5.0
_MAX_BYTES = 1 << 40


class CutSource(Protocol):
    """Where batches come from; the calls of :class:`async_search_rl.replay.client.BlockingReplayClient`."""

    def start(self, request: StartRequest) -> StartReply:
        """A learner starts."""

    def cut(self, request: CutRequest) -> CutReply:
        """Batch ``request.cut``."""

    def publish(self, request: PublishRequest) -> Ack:
        """Weights are offered."""

    def acknowledge(self, request: AcknowledgeRequest) -> Ack:
        """A checkpoint was written."""

    def finish(self, request: FinishRequest) -> FinishReply:
        """The last batch was trained."""

    def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True, eq=False)
class Delivery:
    """One batch, or why there is none."""

    batch: Batch | None
    stop: str = ""
    """Why the run must stop; empty for a batch, and for a stop that was asked of this process."""
    wait_s: float = 0.0
    """Seconds the step stood still for it."""
    evaluations: tuple[EvaluationResult, ...] = ()
    """Rounds that finished since the last delivery; on rank 0."""
    buffered: float | None = None
    """Groups that waited for a batch when it was cut, as far as the service says; on rank 0."""


class Prefetch:
    """Fetches one batch ahead, in a thread of its own."""

    def __init__(self, source: CutSource, incarnation: int, poll_s: float) -> None:
        self._source, self._incarnation, self._poll_s = source, incarnation, min(poll_s, LONGEST_POLL_S)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._next: tuple[int, Future[CutReply]] | None = None
        self._waiting_for = "the replay service"
        self._evaluations: list[EvaluationResult] = []

    def expect(self, cut: int) -> None:
        """Begin to fetch batch ``cut``, for the step that starts after as many trained batches."""
        future: Future[CutReply] = Future()
        self._next = (cut, future)
        self._thread = threading.Thread(target=self._fetch_into, args=(future, cut), name="cuts", daemon=True)
        self._thread.start()

    def take(self, cut: int, timeout_s: float, stopping: Callable[[], bool]) -> CutReply | None:
        """Batch ``cut``; ``None`` once ``stopping()``. What the fetch met with is raised here.

        Raises:
            DeadlineError: after ``timeout_s``, with what the service was waiting for.
        """
        if self._next is None or self._next[0] != cut:
            self.expect(cut)
        assert self._next is not None
        future = self._next[1]
        ends_at = time.monotonic() + timeout_s
        while not stopping():
            # Not by the timeout of `result()`: a deadline that the fetch itself missed would look the same.
            wait_for([future], _LOOK_S)
            if future.done():
                return future.result()
            if time.monotonic() > ends_at:
                raise DeadlineError(f"no batch came within {timeout_s:g} s: waiting for {self._waiting_for}")
        return None

    def new_evaluations(self) -> tuple[EvaluationResult, ...]:
        """Rounds that finished since this was last asked."""
        fresh, self._evaluations = self._evaluations, []
        return tuple(fresh)

    def close(self) -> None:
        """Stop fetching, and give a poll under way the time to end."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(self._poll_s + _END_S)

    def _fetch_into(self, future: Future[CutReply], cut: int) -> None:
        try:
            future.set_result(self._fetch(cut))
        except Exception as error:  # Raised again where the batch is taken.
            future.set_exception(error)

    def _fetch(self, cut: int) -> CutReply:
        while True:
            reply = self._source.cut(CutRequest(incarnation=self._incarnation, cut=cut, step=cut, wait_s=self._poll_s))
            self._evaluations += reply.evaluations
            self._waiting_for = reply.waiting_for or self._waiting_for
            if reply.groups is not None or reply.stop or self._closing.wait(_PAUSE_S):
                return reply


class Feed:
    """Batches for all ranks. ``prefetch`` is given on rank 0 alone."""

    def __init__(self, ranks: Ranks, prefetch: Prefetch | None, last_cut: int, timeout_s: float) -> None:
        self._ranks, self._prefetch = ranks, prefetch
        self._last_cut, self._timeout_s = last_cut, timeout_s

    def next(self, cut: int, stopping: Callable[[], bool]) -> Delivery:
        """Batch ``cut``; collective. ``stopping`` on any rank ends the wait on all.

        Raises:
            DeadlineError: when none comes within `learner.batch_timeout_s`.
        """
        began = time.monotonic()
        if self._ranks.any(stopping()):
            return Delivery(None)
        reply = self._prefetch.take(cut, self._timeout_s, stopping) if self._prefetch is not None else None
        message = None
        if self._ranks.first:
            message = encode({"groups": reply.groups if reply else None, "stop": (reply.stop or "") if reply else ""})
        shared = decode(self._ranks.broadcast(message), _MAX_BYTES)
        wait_s = time.monotonic() - began
        batch = None if shared["groups"] is None else batch_from_groups([decode_group(g, _MAX_BYTES) for g in shared["groups"]])
        if self._prefetch is None:
            return Delivery(batch, shared["stop"], wait_s)
        evaluations = self._prefetch.new_evaluations()
        if batch is not None and cut < self._last_cut:
            self._prefetch.expect(cut + 1)
        buffered = reply.counters.get("buffered") if reply else None
        return Delivery(batch, shared["stop"], wait_s, evaluations, buffered)
