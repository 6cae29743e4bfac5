"""Which charts a run's page shows, and how they follow from the summary, the timeline and the learner's records. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from async_search_rl.launch.charts import WIDE, Series, Strip, bar_chart, clock, clock_ticks, line_chart, strip_chart

Rows = Sequence[Mapping[str, Any]]

_STRIP_CELLS = 300
_BUSY = "c1"


def charts(summary: Mapping[str, Any], timeline: Rows, learner: Rows, max_staleness: int) -> str:
    """The cards with curves; a chart without data is left out."""
    return "".join(
        [
            _card(
                "Exact match",
                "by trained batches",
                line_chart(
                    [_by_step("training batches", "c1", learner, "exact_match"), _held_out(summary, "exact_match", "c2")],
                    y_range=(0, 1),
                ),
            ),
            _card(
                "Reward",
                "mean of a batch",
                line_chart([_by_step("training batches", "c1", learner, "reward_mean"), _held_out(summary, "reward", "c2")]),
            ),
            _card(
                "Searches",
                "an episode",
                line_chart(
                    [_by_step("training batches", "c1", learner, "searches_mean"), _held_out(summary, "searches", "c2")],
                    y_range=(0, None),
                ),
            ),
            _card("Staleness", f"trained groups by their lag; the bound is {max_staleness}", bar_chart(_lags(summary))),
            _card(
                "Sampled tokens",
                "a second, over time",
                line_chart([_token_rate(timeline)], x_format=clock, x_ticks=clock_ticks, y_range=(0, None)),
            ),
            _card(
                "Groups",
                "over time",
                line_chart(
                    [_over_time("running", "c1", timeline, "running"), _over_time("buffered", "c2", timeline, "buffered")],
                    x_format=clock,
                    x_ticks=clock_ticks,
                    y_range=(0, None),
                ),
            ),
            _card("Policy loss", "by trained batches", line_chart([_by_step("loss", "c5", learner, "loss")])),
            _card(
                "Effective sample size",
                "share of the trainable tokens",
                line_chart([_by_step("ess", "c3", learner, "ess")], y_range=(_ess_floor(learner), 1.0)),
            ),
            _card("KL(behaviour, current)", "nats a token", line_chart([_by_step("kl", "c6", learner, "kl_behaviour")])),
            _card("Entropy", "nats a token", line_chart([_by_step("entropy", "c4", learner, "entropy")], y_range=(0, None))),
        ]
    )


def utilisation(timeline: Rows, learner: Rows) -> str:
    """A strip a piece over wall time, and the cores that each used."""
    if len(timeline) < 2:
        return ""
    end = float(timeline[-1]["t"])
    strips = [
        Strip("learner", list(_learner_spans(timeline, learner))),
        Strip("generators", list(_generator_spans(timeline))),
        Strip("search", list(_search_spans(timeline))),
    ]
    legend = [("busy", _BUSY), ("waits, or idle", "idle"), ("takes new weights", "stall")]
    cores = [
        Series(name, f"c{i + 1}", list(_cores(timeline, name)))
        for i, name in enumerate(sorted({name for row in timeline for name in row["cpu_s"]}))
    ]
    return (
        '<div class="grid2">'
        + _card("Utilisation", "over time", strip_chart(strips, end, legend), wide=True)
        + _card(
            "Processor cores in use",
            "by piece, over time",
            line_chart(cores, width=WIDE, x_format=clock, x_ticks=clock_ticks, y_range=(0, None)),
            wide=True,
        )
        + "</div>"
    )


def _card(title: str, note: str, chart: str, *, wide: bool = False) -> str:
    if not chart:
        return ""
    kind = "card wide" if wide else "card"
    return f'<div class="{kind}"><h3>{escape(title)}</h3><span class="faint">{escape(note)}</span>{chart}</div>'


def _ess_floor(learner: Rows) -> float:
    """Where the axis of the effective sample size begins: close to 1 is close to 1, whatever the noise."""
    return min([0.9, *(float(row["ess"]) for row in learner if row.get("ess") is not None)])


def _by_step(name: str, colour: str, learner: Rows, key: str) -> Series:
    return Series(name, colour, [(row["step"], row.get(key)) for row in learner if "step" in row])


def _held_out(summary: Mapping[str, Any], key: str, colour: str) -> Series:
    points = [(result["step"], result.get(key)) for result in summary["evaluations"]]
    return Series("held out", colour, points, marked=True)


def _over_time(name: str, colour: str, timeline: Rows, key: str) -> Series:
    return Series(name, colour, [(row["t"], row[key]) for row in timeline])


def _lags(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    counts = {int(lag): float(groups) for lag, groups in summary["staleness"].items()}
    return [(str(lag), counts.get(lag, 0.0)) for lag in range(max(counts) + 1)] if counts else []


def _token_rate(timeline: Rows) -> Series:
    points: list[tuple[float, float | None]] = []
    for before, row in _reports(timeline):
        grown = sum(_growth(before, row, actor, "tokens_generated") for actor in row["actors"])
        points.append((row["t"], grown / (row["t"] - before["t"])))
    return Series("tokens/s", "c1", points)


def _windows(timeline: Rows) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Neighbouring rows far enough apart that a page is not wider than its pixels."""
    stride = max(1, len(timeline) // _STRIP_CELLS)
    for before, row in pairwise(timeline[::stride]):
        if row["t"] > before["t"]:
            yield before, row


def _reports(timeline: Rows) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Rows between which actors reported: their gauges come with their requests, which may be seconds apart."""
    before: Mapping[str, Any] | None = None
    for _, row in _windows(timeline):
        if not row["actors"]:
            continue
        if before is None or _reported(row) < _reported(before):
            before = row
        elif _reported(row) > _reported(before):
            yield before, row
            before = row


def _reported(row: Mapping[str, Any]) -> float:
    return float(sum(gauges.get("busy_s", 0.0) + gauges.get("idle_s", 0.0) for gauges in row["actors"].values()))


def _growth(before: Mapping[str, Any], row: Mapping[str, Any], actor: str, key: str) -> float:
    new = row["actors"][actor].get(key, 0.0)
    old = before["actors"].get(actor, {}).get(key, 0.0)
    return float(new - old if new >= old else new)


def _generator_spans(timeline: Rows) -> Iterator[tuple[float, float, float, str]]:
    for before, row in _reports(timeline):
        actors = row["actors"]
        busy, idle, stall = (sum(_growth(before, row, actor, key) for actor in actors) for key in ("busy_s", "idle_s", "stall_s"))
        if busy + idle <= 0:
            continue
        working, stalled = max(0.0, busy - stall) / (busy + idle), min(stall, busy) / (busy + idle)
        yield from _cell(before["t"], row["t"], [(working, _BUSY), (stalled, "stall"), (idle / (busy + idle), "idle")])


def _cell(start: float, end: float, parts: Sequence[tuple[float, str]]) -> Iterator[tuple[float, float, float, str]]:
    """One cell of a strip, divided by the shares of ``parts``."""
    at = start
    for share, colour in parts:
        stop = at + share * (end - start)
        if share > 0.005:
            yield at, stop, 1.0, colour
        at = stop


def _search_spans(timeline: Rows) -> Iterator[tuple[float, float, float, str]]:
    for before, row in _windows(timeline):
        if "busy_s" in row["search"]:
            grown = row["search"]["busy_s"] - before["search"].get("busy_s", 0.0)
            share = min(1.0, max(0.0, grown) / (row["t"] - before["t"]))
            if share > 0.005:
                yield before["t"], row["t"], 0.15 + 0.85 * share, _BUSY


def _learner_spans(timeline: Rows, learner: Rows) -> Iterator[tuple[float, float, float, str]]:
    """A step's wait and its work, as long as they were, ending when the record was written.

    Which that is in the run's seconds says the last sample before it: each launch has its own distance to the time of day.
    """
    times = [row["time"] for row in timeline]
    stride = max(1, len(learner) // (2 * _STRIP_CELLS))
    for row in learner[::stride]:
        if not row.get("step_s"):
            continue
        sample = timeline[max(0, bisect_right(times, row["time"]) - 1)]
        end = row["time"] - sample["time"] + sample["t"]
        start = end - row["step_s"]
        worked_from = start + (row.get("wait_s") or 0.0)
        if worked_from > start:
            yield max(0.0, start), worked_from, 1.0, "idle"
        yield max(0.0, worked_from), end, 1.0, _BUSY


def _cores(timeline: Rows, name: str) -> Iterator[tuple[float, float | None]]:
    for before, row in _windows(timeline):
        if name in row["cpu_s"] and name in before["cpu_s"]:
            yield row["t"], max(0.0, row["cpu_s"][name] - before["cpu_s"][name]) / (row["t"] - before["t"])
