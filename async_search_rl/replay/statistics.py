"""Moving averages over the last groups, for the live table. In memory only; they begin anew after a restart."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from async_search_rl.replay.records import GroupFacts
from async_search_rl.replay.schema import PutResult


class Statistics:
    """Averages over the last ``groups`` training groups that were put (filtered and stale ones included) or cut (lags)."""

    def __init__(self, groups: int) -> None:
        self._puts: deque[tuple[float, PutResult, GroupFacts]] = deque(maxlen=groups)
        self._answers: deque[float] = deque(maxlen=groups)
        self._lags: deque[int] = deque(maxlen=groups)

    def put(self, result: PutResult, facts: GroupFacts, now: float) -> None:
        """A training group was judged."""
        self._answers.append(now)
        if result not in ("duplicate", "unknown"):
            self._puts.append((now, result, facts))

    def cut(self, lags: Iterable[int]) -> None:
        """A batch with groups of these lags was cut."""
        self._lags.extend(lags)

    def recent(self, now: float) -> dict[str, float]:
        """The averages; names and units are in :mod:`async_search_rl.metrics`, scope ``recent``."""
        values: dict[str, float] = {}
        if self._puts:
            facts = [f for _, _, f in self._puts]
            rated = [f for f in facts if f.valid]
            span = max(now - self._puts[0][0], 1e-9)
            values = {
                "reward_mean": _mean([f.reward for f in rated]),
                "exact_match": _mean([f.parts.get("exact_match", 0.0) for f in rated]),
                "searches_mean": _mean([f.searches for f in rated]),
                "length_mean": _mean([f.length for f in rated]),
                "seconds_mean": _mean([f.seconds for f in rated]),
                "valid_share": sum(f.valid for f in facts) / sum(f.members for f in facts),
                "filtered_share": _mean([float(result == "filtered") for _, result, _ in self._puts]),
                "groups_per_s": len(facts) / span,
                "tokens_per_s": sum(f.sampled for f in facts) / span,
                "puts_per_s": len(self._answers) / max(now - self._answers[0], 1e-9),
            }
        if self._lags:
            values |= {"lag_mean": _mean([float(lag) for lag in self._lags]), "lag_max": float(max(self._lags))}
        return values


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
