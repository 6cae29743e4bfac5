"""For how long something was in use. In: changes of the number of users, with the time of each. Out: busy and idle seconds."""

from __future__ import annotations


class BusyClock:
    """Counts seconds with and without users; the clock is the caller's."""

    def __init__(self, now: float) -> None:
        self._users = 0
        self._since = now
        self._busy_s = self._idle_s = 0.0

    def change(self, by: int, now: float) -> None:
        """``by`` users came (or went, if negative) at time ``now``."""
        self._advance(now)
        self._users += by

    def read(self, now: float) -> tuple[float, float]:
        """Busy and idle seconds up to ``now``."""
        self._advance(now)
        return self._busy_s, self._idle_s

    def _advance(self, now: float) -> None:
        passed, self._since = now - self._since, now
        if self._users > 0:
            self._busy_s += passed
        else:
            self._idle_s += passed
