"""The learner's half of the service: starts, batches, publications, checkpoints, the end. Decides, without clock or network."""

from __future__ import annotations

from async_search_rl.errors import SchemaError
from async_search_rl.replay.buffer import Batch
from async_search_rl.replay.core import Core
from async_search_rl.replay.records import Acknowledged, Cut, Finished, Published, Stale, Started
from async_search_rl.replay.rounds import Rounds
from async_search_rl.replay.schema import (
    AcknowledgeRequest,
    CutRequest,
    EvaluationResult,
    FinishRequest,
    PublishRequest,
    StartRequest,
)
from async_search_rl.version import PolicyVersion


class LearnerSide:
    """Answers the learner."""

    def __init__(self, core: Core, rounds: Rounds) -> None:
        self._core = core
        self._rounds = rounds
        self._reported = 0

    def start(self, request: StartRequest) -> int:
        """A learner starts from a checkpoint; the new incarnation.

        Raises:
            SchemaError: another run's learner, or a checkpoint whose batches the log does not hold (any more).
        """
        state, buffer = self._core.state, self._core.state.buffer
        if request.run != state.identity.run:
            raise SchemaError(f"StartRequest.run must be {state.identity.run!r}, got {request.run!r}")
        if not buffer.oldest_cut <= request.cut <= buffer.next_cut:
            raise SchemaError(
                f"StartRequest.cut must be in [{buffer.oldest_cut}, {buffer.next_cut}], the batches of this trajectory log, "
                f"got {request.cut}: checkpoint and log are not of the same run"
            )
        incarnation = state.incarnation + 1
        started = Started(incarnation=incarnation, step=request.step, cut=request.cut, weights_url=request.weights_url)
        for ticket in [t.ticket for t in state.ledger.open.values() if t.round is not None]:
            self._core.leases.forget(ticket)
        self._core.commit(started)
        self._core.learner_seen = True
        self._reported = 0
        return incarnation

    def cut(self, request: CutRequest) -> Batch | None:
        """Batch ``request.cut``, the same whenever asked; ``None`` while there are too few groups.

        Raises:
            SchemaError: a learner that was superseded, a batch that is gone, one ahead of the next, or a recorded one asked for
                a later step than it was cut for, which would break the staleness bound.
        """
        self._require_current(request.incarnation)
        buffer, replay = self._core.state.buffer, self._core.config.replay
        recorded = buffer.batches.get(request.cut)
        if recorded is not None:
            if request.step > recorded.step:
                raise SchemaError(f"CutRequest.step must be <= {recorded.step}, of which cut {request.cut} is, got {request.step}")
            return recorded
        if request.cut != buffer.next_cut:
            raise SchemaError(f"CutRequest.cut must be in [{buffer.oldest_cut}, {buffer.next_cut}], got {request.cut}")
        stale = buffer.stale_at(request.step, replay.max_staleness)
        if stale:
            self._core.commit(Stale(step=request.step, tickets=stale))
        tickets = buffer.next_batch(replay.batch_groups, request.step, replay.max_staleness)
        if tickets is None:
            return None
        self._core.commit(Cut(cut=request.cut, step=request.step, tickets=tickets))
        return buffer.batches[request.cut]

    def publish(self, request: PublishRequest, now: float) -> None:
        """New weights are offered; the same announcement twice is one.

        Raises:
            SchemaError: a learner that was superseded, a step or cut that goes back, or a cut that was never made.
        """
        self._require_current(request.incarnation)
        state = self._core.state
        version = PolicyVersion(request.incarnation, request.step).pack()
        if state.policy is not None and state.policy.version == version and state.buffer.position == request.cut:
            return
        if request.step < state.step:
            raise SchemaError(f"PublishRequest.step must be >= {state.step}, got {request.step}")
        if not state.buffer.position <= request.cut <= state.buffer.next_cut:
            bounds = f"[{state.buffer.position}, {state.buffer.next_cut}]"
            raise SchemaError(f"PublishRequest.cut must be in {bounds}, got {request.cut}")
        evaluate = self._rounds.falls_due(request.step)
        self._core.commit(Published(incarnation=request.incarnation, step=request.step, cut=request.cut, evaluate=evaluate))
        self._rounds.open_if_due(now)

    def acknowledge(self, request: AcknowledgeRequest) -> None:
        """A checkpoint was written; batches before the oldest kept one may be forgotten.

        Raises:
            SchemaError: a learner that was superseded, or a checkpoint of batches that were never cut.
        """
        self._require_current(request.incarnation)
        next_cut = self._core.state.buffer.next_cut
        if not 0 <= request.oldest_cut <= request.cut <= next_cut:
            must = f"0 <= AcknowledgeRequest.oldest_cut <= cut <= {next_cut} must hold"
            raise SchemaError(f"{must}, got oldest_cut {request.oldest_cut} and cut {request.cut}")
        if request.oldest_cut > self._core.state.buffer.oldest_cut:
            self._core.commit(Acknowledged(oldest_cut=request.oldest_cut))

    def finish(self, request: FinishRequest) -> bool:
        """Whether nothing is left to evaluate after the last step; actors are told to stop from then on."""
        self._require_current(request.incarnation)
        state = self._core.state
        if state.end is not None:
            return True
        announced = state.policy is not None and state.policy.version >= PolicyVersion(request.incarnation, request.step).pack()
        if not announced or self._rounds.busy:
            return False
        self._core.commit(Finished())
        return True

    def new_evaluations(self) -> list[EvaluationResult]:
        """Rounds that finished since this was last asked; all of this history after a start of the learner or of this process.

        For a learner that died with a reply in hand never noted it.
        """
        results = self._core.state.evaluations.results
        fresh = results[self._reported :]
        self._reported = len(results)
        return fresh

    def waiting_for(self) -> str:
        """Why there is no batch yet, in words."""
        state, replay, load = self._core.state, self._core.config.replay, self._core.load
        if self._core.over():
            return ""
        if state.incarnation == 0 or state.end is not None:
            return "a learner to start"
        if state.policy is None:
            return "the first weights to be announced"
        missing = replay.batch_groups - load.buffered
        if missing <= 0:
            return ""
        actors = len(self._core.registry.versions())
        who = f"{actors} live actors run {load.running} groups" if actors else "no actor is alive"
        waiting = len(self._core.leases.waiting)
        again = f", {waiting} tickets wait for another attempt" if waiting else ""
        room = "" if load.running or self._core.room else ", pacing has no room until newer weights are announced"
        return f"{missing} of {replay.batch_groups} groups for batch {state.buffer.next_cut}: {who}{again}{room}"

    def _require_current(self, incarnation: int) -> None:
        current = self._core.state.incarnation
        if incarnation != current:
            raise SchemaError(f"incarnation must be {current}, got {incarnation}: another learner has started")
        self._core.learner_seen = True
