"""Accepted groups, and the batches cut from them.

Durable state without bytes: a group is a location in the log and what the staleness bound needs. A batch stays recorded until no
checkpoint that is kept needs it, so that a learner that resumes gets the same groups again. ``position`` batches are inside the
newest announced weights; those behind it are ``training``; a learner's start moves it back to its checkpoint.
"""

from __future__ import annotations

import msgspec

from async_search_rl.replay.records import GroupFacts, Location


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted group: where its bytes are, its question, the oldest step and the mean length (tokens) of its members."""

    ticket: int
    question: int
    location: Location
    oldest_step: int
    length: float

    def lag(self, step: int) -> int:
        """Staleness at the start of ``step``, in trained batches."""
        return max(0, step - self.oldest_step)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded cut."""

    step: int
    entries: list[Entry]


class Buffer(msgspec.Struct, kw_only=True):
    """Groups that wait, and recorded batches."""

    groups: dict[int, Entry] = {}
    batches: dict[int, Batch] = {}
    next_cut: int = 0
    position: int = 0
    oldest_cut: int = 0
    forgotten: int = 0
    """Groups of batches that are no longer recorded."""
    staleness: dict[str, int] = {}
    """Groups cut, by lag."""
    max_lag: int = 0

    @property
    def buffered(self) -> int:
        """Groups that wait for a batch."""
        return len(self.groups)

    @property
    def training(self) -> int:
        """Groups of batches that no announced weights hold yet."""
        return sum(len(self.batches[cut].entries) for cut in range(self.position, self.next_cut))

    @property
    def trained(self) -> int:
        """Groups inside the newest announced weights."""
        return self.forgotten + sum(len(batch.entries) for cut, batch in self.batches.items() if cut < self.position)

    def add(self, ticket: int, question: int, facts: GroupFacts, location: Location) -> None:
        """A group was accepted."""
        oldest = 0 if facts.oldest_step is None else facts.oldest_step
        self.groups[ticket] = Entry(ticket=ticket, question=question, location=location, oldest_step=oldest, length=facts.length)

    def stale_at(self, step: int, max_staleness: int) -> list[int]:
        """Tickets of waiting groups that the batch of ``step`` must not hold; nor can any later batch."""
        return [ticket for ticket, entry in self.groups.items() if entry.lag(step) > max_staleness]

    def next_batch(self, groups: int, step: int, max_staleness: int) -> list[int] | None:
        """Tickets of ``groups`` groups for the batch of ``step``: those that the next one must not hold, then log order.

        ``None`` while fewer wait. Log order alone would let a group go stale behind fresher ones that can wait.
        """
        if len(self.groups) < groups:
            return None
        return sorted(self.groups, key=lambda ticket: self.groups[ticket].lag(step + 1) <= max_staleness)[:groups]

    def drop(self, ticket: int) -> Entry:
        """A waiting group ends stale."""
        return self.groups.pop(ticket)

    def cut(self, cut: int, step: int, tickets: list[int]) -> None:
        """Record batch ``cut``."""
        entries = [self.groups.pop(ticket) for ticket in tickets]
        self.batches[cut] = Batch(step=step, entries=entries)
        self.next_cut = cut + 1
        for entry in entries:
            lag = entry.lag(step)
            self.staleness[str(lag)] = self.staleness.get(str(lag), 0) + 1
            self.max_lag = max(self.max_lag, lag)

    def move_to(self, position: int) -> None:
        """The first ``position`` batches are inside the weights: forward at a publication, back at a learner's start."""
        self.position = position
        self._forget()

    def acknowledge(self, oldest_cut: int) -> None:
        """No kept checkpoint needs a batch before ``oldest_cut``."""
        self.oldest_cut = max(self.oldest_cut, oldest_cut)
        self._forget()

    def locations(self) -> list[Location]:
        """Every record a later cut may have to read."""
        recorded = [entry.location for batch in self.batches.values() for entry in batch.entries]
        return recorded + [entry.location for entry in self.groups.values()]

    def _forget(self) -> None:
        bound = min(self.oldest_cut, self.position)
        for cut in [cut for cut in self.batches if cut < bound]:
            self.forgotten += len(self.batches.pop(cut).entries)
