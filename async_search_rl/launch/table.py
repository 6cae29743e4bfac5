"""The live table of a run: where it is, how well it does, how fast, and who waits for whom.

In: a :class:`View` of the moment. Out: a rich renderable for a terminal, or one plain line for a log. Pure: the caller decides when
to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from async_search_rl.replay.schema import EvaluationResult, Status

_SPARKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 14
_PROGRESS_CELLS = 40
_TWO_COLUMNS_FROM = 110


@dataclass(frozen=True, kw_only=True)
class View:
    """What is shown at one moment.

    Attributes:
        name: the run's name.
        max_steps: trained batches after which the run ends.
        max_staleness: the bound on the lag.
        elapsed_s: seconds since the launch.
        phase: what the launcher itself is doing, in words; empty while it only watches.
        status: the replay service's last status; ``None`` before the first.
        learner: the learner's figures of its last step.
        shares: see :func:`async_search_rl.launch.timeline.shares`.
        rewards: mean reward of the batches so far, oldest first; likewise ``exact_matches``.
        waits: sentences about pieces that make no progress.
        notes: the last restarts and other events.
    """

    name: str
    max_steps: int
    max_staleness: int
    elapsed_s: float
    phase: str
    status: Status | None = None
    learner: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    rewards: Sequence[float] = ()
    exact_matches: Sequence[float] = ()
    waits: Sequence[str] = ()
    notes: Sequence[str] = ()


def render(view: View, width: int) -> RenderableType:
    """The live table for a terminal of ``width`` cells; on a narrow one the two halves stand one below the other."""
    title = Text.assemble((f" {view.name} ", "bold"), (f"· {_clock(view.elapsed_s)} ", "dim"))
    status = view.status
    if status is None:
        return Panel(Group(Text(view.phase), *_notes(view)), title=title, title_align="left", border_style="cyan")
    left = Group(_progress(view, status), Text(), _learning(view, status))
    right = Group(_work(view), Text(), _flow(view, status))
    parts: list[RenderableType] = [left, Text(), right] if width < _TWO_COLUMNS_FROM else [_side_by_side(left, right)]
    if status.evaluations:
        parts += [Text(), evaluation_table(status.evaluations)]
    phase = [Text(view.phase, style="dim")] if view.phase else []
    return Panel(Group(*parts, *phase, *_notes(view)), title=title, title_align="left", border_style="cyan", padding=(1, 2))


def plain_line(view: View) -> str:
    """The same in one line, for output that is no terminal."""
    status = view.status
    if status is None:
        return f"[{_clock(view.elapsed_s)}] {view.phase}"
    learner, recent = view.learner, status.recent
    parts = [
        f"[{_clock(view.elapsed_s)}] step {status.step}/{view.max_steps}",
        _named("reward", _first(recent, learner, "reward_mean")),
        _named("em", _first(recent, learner, "exact_match")),
        _named("lag", learner.get("lag_mean", recent.get("lag_mean")), ".1f"),
        _named("loss", learner.get("loss"), ".4f"),
        _named("ess", learner.get("ess")),
        _named("tok/s", view.shares.get("tokens_per_s"), ",.0f"),
        _named("learner busy", view.shares.get("learner_busy"), ".0%"),
        _named("generators busy", view.shares.get("generators_busy"), ".0%"),
        f"buffered {status.buffered} running {status.running}",
        _last_evaluation(status.evaluations),
        status.state if status.state != "running" else "",
        "; ".join(view.waits),
        view.phase,
    ]
    return "  ".join(part for part in parts if part)


def evaluation_table(evaluations: Sequence[EvaluationResult]) -> Table:
    """Evaluation rounds, the newest eight, by data source."""
    shown = list(evaluations)[-8:]
    sources = sorted({source for result in shown for source in result.by_source})
    table = Table(
        box=None, padding=(0, 2, 0, 0), title="held-out questions", title_justify="left", title_style="bold", header_style="dim"
    )
    for heading in ("step", "exact match", "reward", "searches", *(f"{source}: em / searches" for source in sources), "questions"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for result in shown:
        by_source = [result.by_source.get(source, {}) for source in sources]
        missing = "" if result.questions == result.asked else f" of {result.asked}"
        table.add_row(
            str(result.version & 0xFFFFFFFF),
            Text(_number(result.means.get("exact_match")), style="bold green"),
            _number(result.means.get("reward")),
            _number(result.means.get("searches"), ".2f"),
            *(f"{_number(means.get('exact_match'))} / {_number(means.get('searches'), '.2f')}" for means in by_source),
            f"{result.questions}{missing}",
        )
    return table


def sparkline(values: Sequence[float], cells: int = _BAR_CELLS) -> str:
    """Means of ``cells`` equal stretches of ``values`` as block characters, between their least and greatest."""
    if not values:
        return ""
    cells = min(cells, len(values))
    edges = [round(i * len(values) / cells) for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def _side_by_side(left: RenderableType, right: RenderableType) -> Table:
    columns = Table.grid(expand=True, padding=(0, 3))
    columns.add_column(ratio=1)
    columns.add_column(ratio=1)
    columns.add_row(left, right)
    return columns


def _progress(view: View, status: Status) -> RenderableType:
    done = min(1.0, status.step / view.max_steps)
    filled = round(done * _PROGRESS_CELLS)
    bar = Text.assemble(("━" * filled, "cyan"), ("━" * (_PROGRESS_CELLS - filled), "grey30"))
    head = Text.assemble(("step ", "dim"), (f"{status.step}", "bold"), (f" / {view.max_steps}   ", "dim"), status.state)
    return Group(head, bar)


def _learning(view: View, status: Status) -> Table:
    learner, recent = view.learner, status.recent
    grid = _grid()
    reward, match = _first(recent, learner, "reward_mean"), _first(recent, learner, "exact_match")
    grid.add_row("reward", Text.assemble((_number(reward), "bold"), "  ", (sparkline(view.rewards), "green")))
    grid.add_row("exact match", Text.assemble((_number(match), "bold"), "  ", (sparkline(view.exact_matches), "green")))
    searches = _first(recent, learner, "searches_mean")
    grid.add_row("searches", f"{_number(searches, '.2f')}   length {_number(_first(recent, learner, 'length_mean'), '.0f')}")
    lag = f"mean {_number(learner.get('lag_mean'), '.2f')}   max {_number(learner.get('lag_max'), '.0f')} of {view.max_staleness}"
    grid.add_row("lag", lag)
    grid.add_row("loss", f"{_number(learner.get('loss'), '+.4f')}   |grad| {_number(learner.get('grad_norm'), '.3f')}")
    grid.add_row("ess", f"{_number(learner.get('ess'))}   kl {_number(learner.get('kl_behaviour'), '.5f')}")
    grid.add_row("entropy", f"{_number(learner.get('entropy'))}   lr {_number(learner.get('lr'), '.2e')}")
    return grid


def _work(view: View) -> Table:
    shares = view.shares
    grid = _grid()
    grid.add_row("learner", _bar(("busy", shares.get("learner_busy"), "green"), ("waits", shares.get("learner_waiting"), "red")))
    busy, stalled = shares.get("generators_busy"), shares.get("generators_stalled")
    idle = None if busy is None else max(0.0, 1.0 - busy - (stalled or 0.0))
    grid.add_row("generators", _bar(("busy", busy, "green"), ("updating", stalled, "yellow"), ("idle", idle, "red")))
    searching = shares.get("search_busy")
    grid.add_row("search", _bar(("busy", searching, "green"), ("idle", None if searching is None else 1.0 - searching, "grey50")))
    for wait in view.waits:
        grid.add_row("", Text(wait, style="yellow"))
    return grid


def _flow(view: View, status: Status) -> Table:
    c, learner = status.counters, view.learner
    grid = _grid()
    rate = f"{_number(view.shares.get('tokens_per_s'), ',.0f')} sampled   {_number(learner.get('tokens_per_s'), ',.0f')} trained"
    grid.add_row("tokens/s", rate)
    grid.add_row("groups", f"{status.running} running   {status.buffered} buffered   {status.training} in training")
    ended = "   ".join(f"{c.get('groups_' + end, 0):.0f} {end}" for end in ("trained", "filtered", "stale", "failed"))
    grid.add_row("", ended)
    versions = {a.version & 0xFFFFFFFF for a in status.actors if a.version is not None}
    newest = f"weights of step {max(versions)}" if versions else "no weights yet"
    went_on = sum(actor.gauges.get("in_flight_updates", 0) for actor in status.actors)
    grid.add_row("actors", f"{len(status.actors)} live   {newest}")
    grid.add_row("", f"{went_on:.0f} requests went on across an update")
    return grid


def _notes(view: View) -> list[Text]:
    return [Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in list(view.notes)[-3:]]


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=11, no_wrap=True)
    grid.add_column()
    return grid


def _bar(*parts: tuple[str, float | None, str]) -> Text:
    known = [(name, share, style) for name, share, style in parts if share is not None]
    if not known:
        return Text("–", style="dim")
    text = Text()
    for _, share, style in known:
        text.append("█" * round(share * _BAR_CELLS), style)
    text.append("  " + "  ".join(f"{name} {share:.0%}" for name, share, _ in known if share >= 0.005 or name == known[0][0]))
    return text


def _last_evaluation(evaluations: Sequence[EvaluationResult]) -> str:
    if not evaluations:
        return ""
    last = evaluations[-1]
    return f"held-out em {_number(last.means.get('exact_match'))} at step {last.version & 0xFFFFFFFF}"


def _first(preferred: Mapping[str, float], other: Mapping[str, float], name: str) -> float | None:
    return preferred.get(name, other.get(name))


def _named(name: str, value: float | None, form: str = ".3f") -> str:
    return "" if value is None else f"{name} {value:{form}}"


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
