"""Which tickets an actor has, which of them may run, and how many more it should ask for. Pure bookkeeping: no I/O, no clock.

A ticket *runs* or is *held*: held are training tickets whose ``min_step`` is above the engine's version, and evaluation tickets
of a version that the engine does not have yet. Held ones keep their leases. Two kinds have capacities of their own, so an
evaluation never takes training's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from async_search_rl.replay.schema import Ticket, TicketKind
from async_search_rl.version import PolicyVersion


class Roster:
    """Tickets by id, with the capacity of each kind."""

    def __init__(self, groups: int, evaluations: int) -> None:
        self._capacity: dict[TicketKind, int] = {"train": groups, "evaluation": evaluations}
        self._asked: dict[TicketKind, int] = {"train": 0, "evaluation": 0}
        self._held: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}

    @property
    def tickets(self) -> list[Ticket]:
        """Everything that is held or running."""
        return [*self._held.values(), *self._running.values()]

    def room(self, kind: TicketKind) -> int:
        """Tickets of ``kind`` that should be asked for now; what has been asked for and not answered is taken off."""
        have = sum(ticket.kind == kind for ticket in self.tickets)
        return max(0, self._capacity[kind] - have - self._asked[kind])

    @contextmanager
    def asking(self, kind: TicketKind, want: int) -> Iterator[None]:
        """Reserve room for ``want`` tickets while a request for them is on its way."""
        self._asked[kind] += want
        try:
            yield
        finally:
            self._asked[kind] -= want

    def hold(self, ticket: Ticket) -> None:
        """A ticket came. A newer attempt replaces the older one."""
        self._running.pop(ticket.ticket, None)
        self._held[ticket.ticket] = ticket

    def take_runnable(self, version: int | None) -> list[Ticket]:
        """The held tickets that an engine of ``version`` (packed) can run now, or never will; from here on they run."""
        found = [ticket for ticket in self._held.values() if version is not None and not waits(ticket, version)]
        for ticket in found:
            self._running[ticket.ticket] = self._held.pop(ticket.ticket)
        return found

    def drop(self, ticket: int) -> None:
        """The ticket is over here."""
        self._held.pop(ticket, None)
        self._running.pop(ticket, None)


def waits(ticket: Ticket, version: int) -> bool:
    """Whether ``ticket`` waits for weights newer than ``version``."""
    if ticket.version is not None:
        return version < ticket.version
    return PolicyVersion.unpack(version).step < ticket.min_step


def missed(ticket: Ticket, version: int | None) -> bool:
    """Whether the engine has gone past the one version that ``ticket`` is for."""
    return ticket.version is not None and version is not None and version > ticket.version
