"""What one generator tells about itself: the actor's rows of the metrics table.

In: the engine's totals and finished groups. Out: ``{name: number}``, sent along with every lease request. The
clock is the caller's.
"""

from __future__ import annotations

from collections import deque

from async_search_rl.trajectory import Group
from rollouts.engine import EngineStats

WINDOW_S = 5.0
"""Seconds over which the token rate is taken."""


class Gauges:
    """Counters since the start of the process."""

    def __init__(self) -> None:
        self.episodes_running = 0
        self.episodes_searching = 0
        self.receive_s = 0.0
        """Reception of the last weights."""
        self._counts = dict.fromkeys(("episodes", "faults", "groups_sent", "searches", "search_wait_s"), 0.0)
        self._tokens: deque[tuple[float, int]] = deque()

    def finished(self, group: Group) -> None:
        """A group came to its end and was sent."""
        turns = [turn for t in group.trajectories for turn in t.turns if turn.action == "search"]
        self._counts["episodes"] += len(group.trajectories)
        self._counts["faults"] += sum(not t.valid for t in group.trajectories)
        self._counts["groups_sent"] += 1
        self._counts["searches"] += len(turns)
        self._counts["search_wait_s"] += sum(turn.search_s for turn in turns)

    def read(self, stats: EngineStats, now: float) -> dict[str, float]:
        """All gauges and counters at time ``now``."""
        return {
            **self._counts,
            "episodes_running": self.episodes_running,
            "episodes_searching": self.episodes_searching,
            "tokens_per_s": self._rate(stats.tokens, now),
            "pause_s": stats.last_stall_s,
            "receive_s": self.receive_s,
            "tokens_generated": stats.tokens,
            "idle_s": stats.idle_s,
            "busy_s": stats.busy_s,
            "stall_s": stats.stall_s,
            "weight_updates": stats.updates,
            "in_flight_updates": stats.in_flight_updates,
        }

    def _rate(self, tokens: int, now: float) -> float:
        """Tokens a second since the oldest reading that is at most about ``WINDOW_S`` old."""
        self._tokens.append((now, tokens))
        while len(self._tokens) > 2 and self._tokens[1][0] <= now - WINDOW_S:
            self._tokens.popleft()
        since, before = self._tokens[0]
        return (tokens - before) / (now - since) if now > since else 0.0
