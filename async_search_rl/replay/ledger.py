"""Tickets from issue to end. Every training ticket ends exactly once: trained, stale, filtered or failed.

This is durable state: it changes only by records, knows no clock and no configuration. Leases, which are time, are in
:mod:`async_search_rl.replay.leases`. A ticket is *open* until a group is accepted or filtered, it is cancelled, or its last
attempt fails; what is accepted goes on in :mod:`async_search_rl.replay.buffer`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from async_search_rl.replay.records import Issued
from async_search_rl.replay.schema import PutResult

REMEMBERED = 16384
"""Ended tickets whose answers are kept, so that a repeated put gets the same answer."""
_ANSWERS_A_TICKET = 8
OUTAGE = 8
"""Tickets that fail one after another, with no group between them that came through, show an outage and not bad questions."""

TicketEnd = Literal["accepted", "stale", "filtered", "failed", "evaluated", "missing"]
"""How a ticket left the ledger; `accepted` ones end later, as trained or stale. `missing`: an evaluation without an answer."""


class Answer(msgspec.Struct, kw_only=True):
    """What was said to one put."""

    attempt: int
    digest: bytes
    result: PutResult
    reason: str


class OpenTicket(msgspec.Struct, kw_only=True):
    """A ticket without an end. ``waiting``: its attempt failed, the next one is not issued yet."""

    ticket: int
    question: int
    attempt: int
    round: int | None = None
    waiting: bool = False
    answers: list[Answer] = []


class EndedTicket(msgspec.Struct, kw_only=True):
    """A ticket that ended, by a put of ``actor`` (empty: by none)."""

    end: TicketEnd
    actor: str
    answers: list[Answer] = []


class Ledger(msgspec.Struct, kw_only=True):
    """All tickets.

    ``cursor`` is the place in the question order; ``returned`` are questions whose ticket ended stale and that come again before
    the order goes on; ``parked`` those that failed ``max_attempts`` times and are left out from then on; ``failed_in_row`` those
    of them that were parked since the last group that came through; ``forgiven`` those that came back once since a learner started.
    """

    next_ticket: int = 0
    cursor: int = 0
    returned: list[int] = []
    parked: list[int] = []
    failed_in_row: list[int] = []
    forgiven: set[int] = set()
    open: dict[int, OpenTicket] = {}
    ended: dict[int, EndedTicket] = {}
    running: int = 0
    """Open training tickets."""
    issued: int = 0
    """Training tickets issued ever, attempts not counted."""

    def issue(self, record: Issued) -> None:
        """A first attempt opens the ticket, a later one continues it."""
        if record.attempt > 1:
            ticket = self.open[record.ticket]
            ticket.attempt, ticket.waiting = record.attempt, False
            return
        self.open[record.ticket] = OpenTicket(ticket=record.ticket, question=record.question, attempt=1, round=record.round)
        if record.round is not None:
            return
        self.next_ticket = max(self.next_ticket, record.ticket + 1)
        self.running += 1
        self.issued += 1
        if record.cursor is None:
            self.returned.remove(record.question)
        else:
            self.cursor = record.cursor

    def end(self, ticket: int, end: TicketEnd, actor: str = "") -> OpenTicket:
        """Close an open ticket and return it. The question of a stale one comes back, that of a failed one is parked.

        A group that came through after an outage brings back the questions that failed in it.
        """
        closed = self.open.pop(ticket)
        self.ended[ticket] = EndedTicket(end=end, actor=actor, answers=closed.answers)
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]
        if closed.round is None:
            self.running -= 1
            if end == "stale":
                self.returned.append(closed.question)
            elif end == "failed":
                self.parked.append(closed.question)
                self.failed_in_row.append(closed.question)
        if actor and end not in ("failed", "missing"):
            if len(self.failed_in_row) >= OUTAGE:
                self.forgive()
            self.failed_in_row = []
        return closed

    def forgive(self) -> None:
        """The questions that failed since the last group that came through are asked again, each but once."""
        back = [question for question in dict.fromkeys(self.failed_in_row) if question not in self.forgiven]
        self.forgiven.update(back)
        self.returned += [question for question in back if question not in self.returned]
        self.parked = [question for question in self.parked if question not in back]
        self.failed_in_row = []

    def remember(self, ticket: int, answer: Answer) -> None:
        """Keep the answer to a put, of an open or an ended ticket."""
        entry = self.open.get(ticket) or self.ended.get(ticket)
        if entry is not None:
            entry.answers = [*entry.answers, answer][-_ANSWERS_A_TICKET:]

    def answer_to(self, ticket: int, attempt: int, digest: bytes) -> Answer | None:
        """What was said to this very put before."""
        entry = self.open.get(ticket) or self.ended.get(ticket)
        answers = entry.answers if entry else []
        return next((a for a in answers if a.attempt == attempt and a.digest == digest), None)

    def ended_by_put(self, ticket: int) -> bool:
        """Whether the ticket is known to have ended by a group that came, so that a further one is a duplicate."""
        entry = self.ended.get(ticket)
        return entry is not None and entry.actor != "" and entry.end != "failed"

    def ended_by(self, ticket: int, actor: str) -> bool:
        """Whether a put of this very actor ended the ticket."""
        entry = self.ended.get(ticket)
        return entry is not None and entry.actor == actor
