"""The page of a run, `<run folder>/index.html`: headline figures, curves, utilisation, episodes before and after.

In: the files of the run's folder. Out: one file that loads nothing else. Whatever a run lacks (no evaluation, no search metrics, no
tokenizer) is left out or said in words. All text from questions, documents and the model is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from async_search_rl.config import Config, load_config
from async_search_rl.errors import DataError, SearchRLError
from async_search_rl.files import write_whole
from async_search_rl.json_lines import read_json_lines, surviving_steps
from async_search_rl.launch.page_charts import charts, utilisation
from async_search_rl.launch.page_style import STYLE
from async_search_rl.launch.transcript import Decode, html, load_decoder, read_groups, segments, versions_text
from async_search_rl.questions import Question, read_questions
from async_search_rl.trajectory import Group, Trajectory


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run left in its folder."""

    config: Config
    summary: Mapping[str, Any]
    timeline: Sequence[Mapping[str, Any]]
    learner: Sequence[Mapping[str, Any]]
    before: Sequence[Group] = ()
    after: Sequence[Group] = ()
    questions: Mapping[str, Question] = field(default_factory=dict)
    decode: Decode | None = None
    troubles: Sequence[str] = ()


def read_run(folder: Path) -> RunFiles:
    """Everything the page is made of.

    Raises:
        DataError: there is no summary, so it is not the folder of a run that has ended.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise DataError(f"{folder} must hold the summary.json of a run, got none")
    config = load_config(folder / "config.toml")
    troubles: list[str] = []
    before, after = (read_groups(folder / f"trajectories_{when}.msgpack") for when in ("before", "after"))
    decode, questions = None, {}
    if before or after:
        try:
            decode = load_decoder(Path(config.model.path))
            questions = {question.id: question for question in read_questions(config.data.eval)}
        except SearchRLError as error:
            troubles.append(str(error))
    return RunFiles(
        config=config,
        summary=json.loads(path.read_text(encoding="utf-8")),
        timeline=list(read_json_lines(folder / "metrics" / "timeline.jsonl")),
        learner=surviving_steps(read_json_lines(folder / "metrics" / "learner.jsonl")),
        before=before,
        after=after,
        questions=questions,
        decode=decode,
        troubles=troubles,
    )


def write_page(folder: Path) -> Path:
    """Write ``index.html`` into the run's folder, whole or not at all; returns its path.

    Raises:
        DataError: as :func:`read_run`.
    """
    path = folder / "index.html"
    write_whole(path, page(read_run(folder)).encode())
    return path


def page(run: RunFiles) -> str:
    """The page as HTML text."""
    name = escape(run.config.run.name)
    body = [
        _header(run),
        _tiles(run.summary),
        _section(
            "Curves", f'<div class="grid2">{charts(run.summary, run.timeline, run.learner, run.config.replay.max_staleness)}</div>'
        ),
        _section("Who worked, who waited", utilisation(run.timeline, run.learner)),
        _section("Held-out questions", _evaluations(run.summary)),
        _section("Episodes before and after", _episodes(run)),
        _section("This run", _facts(run)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name} · async-search-rl</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _header(run: RunFiles) -> str:
    outcome = str(run.summary["outcome"])
    fine = outcome == "finished"
    shown = outcome if outcome in ("finished", "interrupted", "failed") else "stopped"
    config = run.config
    algorithm = config.algorithm
    what = f"{algorithm.advantage} · {algorithm.loss} · lag at most {config.replay.max_staleness} · seed {config.run.seed}"
    parts = [
        f"<header><h1>{escape(config.run.name)}</h1>",
        f'<span class="badge{"" if fine else " bad"}">{escape(shown)}</span>',
        f'<span class="soft">{escape(Path(config.model.path).name)}</span><span class="faint">{escape(what)}</span></header>',
    ]
    if shown == "stopped":
        parts.append(f'<p class="note">{escape(outcome)}</p>')
    return "".join(parts)


def _tiles(summary: Mapping[str, Any]) -> str:
    two_hop = any(source.endswith("2hop") for result in summary["evaluations"][:1] for source in result["by_source"])
    tiles = []
    if summary["em_start"] is not None:
        tiles.append(_change("exact match", summary["em_start"], summary["em_end"], f"{summary['n_eval']} held-out questions"))
        note = "a two-hop question" if two_hop else "a question"
        tiles.append(_change("searches", summary["searches_start"], summary["searches_end"], note))
    tiles += [
        _tile(
            "trained batches", f"{summary['steps']:,}", f"{summary['groups_trained']:,} groups, {summary['groups_dropped']} dropped"
        ),
        _tile("wall time", _duration(summary["wall_s"]), "start-up included"),
        _tile("weight updates", f"{summary['weight_updates']:,}", f"{summary['in_flight_updates']:,} requests went on in flight"),
        _tile("largest lag", "–" if summary["max_lag"] is None else str(summary["max_lag"]), f"bound {summary['max_staleness']}"),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(name: str, value: str, note: str) -> str:
    above, below = (f'<span class="faint">{escape(text)}</span>' for text in (name, note))
    return f'<div class="card tile">{above}<b>{value}</b>{below}</div>'


def _change(name: str, before: float | None, after: float | None, note: str) -> str:
    if before is None or after is None:
        return ""
    return _tile(name, f"<i>{before:.2f} →</i> {after:.2f}", note)


def _evaluations(summary: Mapping[str, Any]) -> str:
    results = summary["evaluations"]
    if not results:
        return ""
    sources = sorted({source for result in results for source in result["by_source"]})
    head = ["after step", "exact match", "reward", "searches", *(f"{source}: EM" for source in sources)]
    head += [*(f"{source}: searches" for source in sources), "questions", "seconds"]
    rows = []
    for result in results:
        by_source = [result["by_source"].get(source, {}) for source in sources]
        cells = [str(result["step"]), *(_number(result.get(key)) for key in ("exact_match", "reward", "searches"))]
        cells += [_number(means.get(key)) for key in ("exact_match", "searches") for means in by_source]
        cells += [f"{result['questions']} of {result['asked']}", f"{result['seconds']:.1f}"]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    heading = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="card scroll"><table><tr>{heading}</tr>{"".join(rows)}</table></div>'


def _episodes(run: RunFiles) -> str:
    troubles = "".join(f'<p class="note">{escape(trouble)}</p>' for trouble in run.troubles)
    if not (run.before or run.after):
        return ""
    before, after = ({group.question_id: group.trajectories[0] for group in groups} for groups in (run.before, run.after))
    order = [
        *(key for key in before if key in after),
        *(key for key in {**before, **after} if not (key in before and key in after)),
    ]
    legend = (
        '<p class="text keys faint"><span class="sampled">underlined: sampled by the policy</span>'
        "<span>not underlined: inserted</span>"
        '<span class="think">thought</span><span class="search">search</span><span class="information box">passages</span>'
        '<span class="answer box">answer</span></p>'
    )
    shown = order[: max(1, run.config.logging.keep_trajectories)]
    return troubles + legend + "".join(_episode(run, key, before.get(key), after.get(key)) for key in shown)


def _episode(run: RunFiles, question_id: str, before: Trajectory | None, after: Trajectory | None) -> str:
    question = run.questions.get(question_id)
    title = escape(question.question if question else question_id)
    gold = f'<span class="faint">accepted: {escape(" · ".join(question.answers))}</span>' if question else ""
    same = run.summary["steps"] == 0
    sides = [_side(run, "before", before), "" if same else _side(run, "after", after)]
    return f'<div class="card episode"><h3>{title}</h3>{gold}<div class="pair">{"".join(sides)}</div></div>'


def _side(run: RunFiles, when: str, trajectory: Trajectory | None) -> str:
    if trajectory is None:
        return f'<div class="side"><div class="head"><span>{when}</span></div><span class="faint">not kept</span></div>'
    right = trajectory.reward_parts.get("exact_match", 0.0) >= 1.0
    verdict = (
        '<span class="right">right</span>'
        if right
        else f'<span class="wrong">{escape(trajectory.outcome.replace("_", " "))}</span>'
    )
    if not right and trajectory.outcome == "answered":
        verdict = '<span class="wrong">wrong</span>'
    count = trajectory.searches
    facts = f"{count} search{'' if count == 1 else 'es'} · {trajectory.length} tokens · {versions_text(trajectory)}"
    if run.decode is None:
        text = escape(" ".join(map(str, trajectory.token_ids.tolist())))
    else:
        text = html(segments(trajectory, run.decode))
    head = f'<div class="head"><span>{when} · {escape(facts)}</span>{verdict}</div>'
    return f'<div class="side">{head}<div class="text">{text}</div></div>'


def _facts(run: RunFiles) -> str:
    summary = run.summary
    rows = [(f"{name.replace('_', ' ')}", f"{value:,.0f}") for name, value in sorted(summary["counters"].items())]
    rows += [(f"restarts of {name}", str(count)) for name, count in sorted(summary["restarts"].items()) if count]
    versions = " · ".join(f"{name} {version}" for name, version in summary["versions"].items())
    table = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    digest = escape(str(summary["config_sha256"])[:16])
    return (
        f'<div class="card"><table>{table}</table></div>'
        f'<p class="faint">{escape(versions)}<br>configuration {digest}… · the numbers are in summary.json and metrics/</p>'
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d}" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60:02d}"
