"""Who rolls out which open ticket, and until when. Time is given by the caller; nothing here survives a restart.

After a restart every open ticket has a fresh lease, so that living actors renew theirs and dead ones lose theirs a lease later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from async_search_rl.replay.ledger import OpenTicket


class Lease(NamedTuple):
    """``deadline`` is on the caller's clock, in seconds."""

    actor: str
    deadline: float


class Leases:
    """Leases of open tickets; a ticket without one waits for its next attempt."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._held: dict[int, Lease] = {}
        self._waiting: dict[int, None] = {}

    @property
    def waiting(self) -> list[int]:
        """Tickets to be issued again, in the order they lost their lease."""
        return list(self._waiting)

    def restore(self, tickets: Iterable[OpenTicket], now: float) -> None:
        """Begin after a restart."""
        for ticket in tickets:
            if ticket.waiting:
                self.release(ticket.ticket)
            else:
                self.grant(ticket.ticket, "", now)

    def grant(self, ticket: int, actor: str, now: float) -> None:
        """Give or renew a lease."""
        self._waiting.pop(ticket, None)
        self._held[ticket] = Lease(actor, now + self._lease_s)

    def release(self, ticket: int) -> None:
        """The attempt is over, the ticket is not."""
        self._held.pop(ticket, None)
        self._waiting[ticket] = None

    def forget(self, ticket: int) -> None:
        """The ticket ended."""
        self._held.pop(ticket, None)
        self._waiting.pop(ticket, None)

    def expired(self, now: float) -> list[int]:
        """Tickets whose lease ran out."""
        return [ticket for ticket, lease in self._held.items() if lease.deadline <= now]

    def holder(self, ticket: int) -> str | None:
        """The actor that holds the lease, if any does."""
        lease = self._held.get(ticket)
        return None if lease is None else lease.actor

    def is_held(self, ticket: int) -> bool:
        """Whether an actor is believed to work at it."""
        return ticket in self._held
