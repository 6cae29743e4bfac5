"""Samples, one a second, of everything a run's pieces say about themselves, and rates over the last samples.

In: the replay service's status, the search service's metrics, processor seconds. Out: rows of `metrics/timeline.jsonl`, from which
the page and the throughput benchmark are made. Pure: no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from async_search_rl.replay.schema import Status

Row = dict[str, Any]


def sample(t_s: float, status: Status, search: Mapping[str, float], cpu_s: Mapping[str, float]) -> Row:
    """The row of the moment ``t_s`` seconds into the run. ``search`` are its metrics, ``cpu_s`` processor seconds by piece.

    The time between two launches of a run is left out: ``t`` goes on where the earlier one's last row ended.
    """
    return {
        "t": round(t_s, 3),
        "state": status.state,
        "incarnation": status.incarnation,
        "step": status.step,
        "buffered": status.buffered,
        "running": status.running,
        "training": status.training,
        "waiting_for": status.waiting_for,
        "evaluations": len(status.evaluations),
        "counters": status.counters,
        "recent": status.recent,
        "learner": status.learner,
        "actors": {actor.actor: {**actor.gauges, "running": actor.running} for actor in status.actors},
        "staleness": status.staleness,
        "search": dict(search),
        "cpu_s": {name: round(seconds, 2) for name, seconds in cpu_s.items()},
    }


def total_increase(values: Sequence[float]) -> float:
    """What a counter counted in all, given its readings in order; a smaller reading means that its process began anew at 0."""
    total, previous = 0.0, 0.0
    for value in values:
        total += value - previous if value >= previous else value
        previous = value
    return total


def actor_total(rows: Sequence[Row], name: str) -> float:
    """A counter of the actors, summed over all that ever lived."""
    return sum(total_increase(values) for values in _by_actor(rows, name).values())


def actor_increase(rows: Sequence[Row], name: str) -> float:
    """The same counted from the first row on: growth between the first and the last of ``rows``."""
    return sum(total_increase(values) - values[0] for values in _by_actor(rows, name).values())


def last_seconds(rows: Sequence[Row], seconds: float) -> Sequence[Row]:
    """The rows of the last ``seconds`` before the newest one."""
    if not rows:
        return rows
    start = rows[-1]["t"] - seconds
    return [row for row in rows if row["t"] >= start]


def shares(rows: Sequence[Row], learner_steps: Sequence[Mapping[str, Any]] = ()) -> dict[str, float]:
    """How busy the pieces were over ``rows``; what cannot be known is left out.

    Returns shares in [0, 1]: `generators_busy`, `generators_stalled` (for weight updates), `learner_busy` and `learner_waiting`
    (over ``learner_steps``, its records), `search_busy`; and `tokens_per_s` sampled, summed over the actors.
    """
    found: dict[str, float] = {}
    busy, idle, stall = (actor_increase(rows, name) for name in ("busy_s", "idle_s", "stall_s"))
    if busy + idle > 0:
        found["generators_busy"] = max(0.0, busy - stall) / (busy + idle)
        found["generators_stalled"] = min(stall, busy) / (busy + idle)
    steps = [step for step in learner_steps if step.get("step_s")]
    if steps:
        whole = math.fsum(step["step_s"] for step in steps)
        found["learner_waiting"] = min(1.0, math.fsum(step.get("wait_s") or 0.0 for step in steps) / whole)
        found["learner_busy"] = 1.0 - found["learner_waiting"]
    if len(rows) > 1 and (span := rows[-1]["t"] - rows[0]["t"]) > 0:
        searching = [row["search"]["busy_s"] for row in rows if "busy_s" in row["search"]]
        if searching:
            found["search_busy"] = min(1.0, (total_increase(searching) - searching[0]) / span)
        if _by_actor(rows, "tokens_generated"):
            found["tokens_per_s"] = actor_increase(rows, "tokens_generated") / span
    return found


def _by_actor(rows: Sequence[Row], name: str) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for actor, gauges in row["actors"].items():
            if name in gauges:
                values.setdefault(actor, []).append(gauges[name])
    return values
