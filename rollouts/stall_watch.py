"""Notices an engine that has requests and does not move. In: its totals, now and then. Out: for how long nothing has happened."""

from __future__ import annotations

from rollouts.engine import EngineStats


class StallWatch:
    """Remembers the last sign of progress; the clock is the caller's."""

    def __init__(self, now: float) -> None:
        self._last: tuple[int, int] = (-1, -1)
        self._moved_at = now

    def stalled_s(self, stats: EngineStats, now: float) -> float:
        """Seconds without a token or an update while requests ran."""
        progress = (stats.tokens, stats.updates)
        if progress != self._last or stats.running == 0:
            self._last, self._moved_at = progress, now
        return now - self._moved_at
