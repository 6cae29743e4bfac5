"""The durable state of the replay service, and the one function that changes it.

Live and in recovery alike the state is what :meth:`State.apply` makes of the log's records, one after another; so the state after a
restart is the state before it. Nothing here reads the configuration, a clock or a file.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from async_search_rl.replay.buffer import Buffer
from async_search_rl.replay.evaluation import Evaluated, Evaluations
from async_search_rl.replay.ledger import Answer, Ledger
from async_search_rl.replay.records import (
    Acknowledged,
    Cancelled,
    Change,
    Cut,
    Expired,
    Finished,
    Issued,
    Location,
    Published,
    Put,
    RoundClosed,
    RoundOpened,
    Stale,
    Started,
    Stopped,
)
from async_search_rl.replay.schema import Policy
from async_search_rl.version import PolicyVersion


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What must not change while a run goes on: its name, the question order, and the questions themselves (digests)."""

    run: str
    seed: int
    shuffle: bool
    train: str
    evaluation: str


class Totals(msgspec.Struct, kw_only=True):
    """Counts since the run's beginning, over restarts."""

    groups_accepted: int = 0
    groups_filtered: int = 0
    groups_failed: int = 0
    groups_duplicate: int = 0
    groups_cancelled: int = 0
    stale_at_put: int = 0
    stale_at_cut: int = 0
    stale_tokens: int = 0
    """Summed mean lengths (tokens, prompt included) of stale groups' trajectories; nothing for groups that were cancelled."""
    trajectories: int = 0
    sampled_tokens: int = 0
    attempts_reissued: int = 0
    attempts_failed: int = 0
    evaluations_done: int = 0
    publications: int = 0
    bytes_logged: int = 0


class State(msgspec.Struct, kw_only=True):
    """Everything a restart needs. ``policy`` is the newest announced version; ``step`` the learner's announced step."""

    identity: Identity
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    buffer: Buffer = msgspec.field(default_factory=Buffer)
    evaluations: Evaluations = msgspec.field(default_factory=Evaluations)
    totals: Totals = msgspec.field(default_factory=Totals)
    incarnation: int = 0
    step: int = 0
    weights_url: str = ""
    policy: Policy | None = None
    filtered_in_row: int = 0
    stop: str | None = None
    finished: bool = False

    def apply(self, record: Change, location: Location) -> None:
        """Change the state by one record that lies at ``location``.

        Raises:
            KeyError: the record does not fit the state (a ticket that is not open): the log is not this state's.
        """
        self.totals.bytes_logged += location.length
        match record:
            case Issued():
                self._issued(record)
            case Put():
                self._put(record, location)
            case Expired():
                self._fail(record.ticket)
            case Cancelled():
                self.ledger.end(record.ticket, "stale")
                self.totals.groups_cancelled += 1
            case Stale():
                self._stale(record)
            case Cut():
                self.buffer.cut(record.cut, record.step, record.tickets)
            case Started():
                self._started(record)
            case Published():
                self._published(record)
            case Acknowledged():
                self.buffer.acknowledge(record.oldest_cut)
            case RoundOpened():
                self.evaluations.opened(record.round, record.version, self.ledger.next_ticket, record.asked)
                self.ledger.next_ticket += record.asked
            case RoundClosed():
                self._end_round()
                self.evaluations.closed(record.result)
                self.totals.evaluations_done += record.result is not None
            case Stopped():
                self.stop = record.reason
            case Finished():
                self.finished = True
            case _:
                assert_never(record)

    @property
    def next_step(self) -> int:
        """Learner step that the next new batch will train: behind the announced step by the batches still in training."""
        return self.step + self.buffer.next_cut - self.buffer.position

    @property
    def end(self) -> str | None:
        """Why nothing is left to do: the reason of a stop, or `finished`. ``None`` while there is; a learner's start lifts it."""
        return self.stop or ("finished" if self.finished else None)

    def counters(self) -> dict[str, float]:
        """Totals, and groups by place; ``groups_dropped`` is what was accepted and is nowhere now, which must be 0."""
        totals, buffer = self.totals, self.buffer
        kept = buffer.buffered + buffer.training + buffer.trained + totals.stale_at_cut
        counts = {
            "tickets_issued": self.ledger.issued,
            "groups_accepted": totals.groups_accepted,
            "groups_trained": buffer.trained,
            "groups_stale": totals.stale_at_put + totals.stale_at_cut + totals.groups_cancelled,
            "groups_filtered": totals.groups_filtered,
            "groups_failed": totals.groups_failed,
            "groups_duplicate": totals.groups_duplicate,
            "groups_cancelled": totals.groups_cancelled,
            "groups_dropped": totals.groups_accepted - kept,
            "stale_tokens": totals.stale_tokens,
            "trajectories": totals.trajectories,
            "sampled_tokens": totals.sampled_tokens,
            "evaluations_done": totals.evaluations_done,
            "publications": totals.publications,
            "questions_parked": len(self.ledger.parked),
            "max_lag": buffer.max_lag,
            "attempts_reissued": totals.attempts_reissued,
            "attempts_failed": totals.attempts_failed,
            "bytes_logged": totals.bytes_logged,
            "running": self.ledger.running,
            "buffered": buffer.buffered,
            "training": buffer.training,
        }
        return {name: float(count) for name, count in counts.items()}

    def locations(self) -> list[Location]:
        """Every record of the log that may still be read."""
        answers = self.evaluations.open.answers if self.evaluations.open else []
        return self.buffer.locations() + [answer.location for answer in answers]

    def _issued(self, record: Issued) -> None:
        self.ledger.issue(record)
        self.totals.attempts_reissued += record.attempt > 1
        current = self.evaluations.open
        if current is not None and record.round == current.round and record.attempt == 1:
            current.issued += 1

    def _put(self, record: Put, location: Location) -> None:
        ledger, totals = self.ledger, self.totals
        answer = Answer(attempt=record.attempt, digest=record.digest, result=record.result, reason=record.reason)
        ledger.remember(record.ticket, answer)
        if record.result == "duplicate":
            totals.groups_duplicate += 1
            return
        ticket = ledger.open[record.ticket]
        if ticket.round is None:
            totals.trajectories += record.facts.members
            totals.sampled_tokens += record.facts.sampled
        match record.result:
            case "accepted":
                ledger.end(record.ticket, "accepted", record.actor)
                self.buffer.add(record.ticket, ticket.question, record.facts, location)
                totals.groups_accepted += 1
                self.filtered_in_row = 0
            case "filtered":
                ledger.end(record.ticket, "filtered", record.actor)
                totals.groups_filtered += 1
                self.filtered_in_row += 1
            case "stale":
                ledger.end(record.ticket, "stale", record.actor)
                totals.stale_at_put += 1
                totals.stale_tokens += round(record.facts.length)
            case "evaluated":
                ledger.end(record.ticket, "evaluated", record.actor)
                if self.evaluations.open is not None:
                    answered = Evaluated(question=ticket.question, facts=record.facts, location=location)
                    self.evaluations.open.answers.append(answered)
            case _:
                totals.attempts_failed += 1
                if record.final:
                    self._fail(record.ticket, record.actor)
                elif record.attempt == ticket.attempt:
                    ticket.waiting = True

    def _fail(self, ticket: int, actor: str = "") -> None:
        if self.ledger.open[ticket].round is None:
            self.ledger.end(ticket, "failed", actor)
            self.totals.groups_failed += 1
            return
        closed = self.ledger.end(ticket, "missing", actor)
        if self.evaluations.open is not None:
            self.evaluations.open.missing.append(closed.question)

    def _stale(self, record: Stale) -> None:
        for ticket in record.tickets:
            entry = self.buffer.drop(ticket)
            self.ledger.returned.append(entry.question)
            self.totals.stale_at_cut += 1
            self.totals.stale_tokens += round(entry.length)

    def _started(self, record: Started) -> None:
        self.incarnation, self.step, self.weights_url = record.incarnation, record.step, record.weights_url
        self.buffer.move_to(record.cut)
        self._end_round()
        self.evaluations.restarted(record.step)
        self.ledger.forgiven.clear()
        self.ledger.forgive()
        self.stop, self.finished, self.filtered_in_row = None, False, 0

    def _published(self, record: Published) -> None:
        version = PolicyVersion(record.incarnation, record.step).pack()
        self.policy = Policy(version=version, weights_url=self.weights_url)
        self.step = record.step
        self.buffer.move_to(record.cut)
        self.evaluations.published(record.step, record.evaluate)
        self.totals.publications += 1

    def _end_round(self) -> None:
        for ticket in [t.ticket for t in self.ledger.open.values() if t.round is not None]:
            self.ledger.end(ticket, "missing")
