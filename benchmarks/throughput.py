#!/usr/bin/env python3
"""Asynchronous against synchronous training, with this very system: `benchmarks/throughput.py CONFIG --json OUT [--repeats 3]`.

In: a configuration. It is run by `bin/launch` in three modes on the same questions, seeds and number of trained groups:

- `async`: as configured, up to `replay.max_staleness` batches of lag;
- `barrier`: the same placement with `replay.max_staleness = 0`, so that generation and training take turns;
- `time_shared`: the barrier, and each phase with every core (`--time-shared` sets other keys, for example devices).

Out: a table and a JSON file. Everything is computed from what the runs wrote about themselves, over the steps between warm-up and
end. With g and t the seconds a barrier step waits for its groups and does everything else, overlap can gain at most
(g + t) / max(g, t), the `bound`; `ratio_barrier` and `ratio_time_shared` are trained samples a second of `async` over those of the
other modes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from async_search_rl.config import load_config
from async_search_rl.errors import ConfigError, RunStoppedError, SearchRLError
from async_search_rl.json_lines import read_json_lines, surviving_steps
from async_search_rl.launch.timeline import actor_increase, shares
from benchmarks.common import ROOT, alternating, machine, medians, write_json

MODES = ("async", "barrier", "time_shared")
QUIET = (
    "replay.eval_at_start=false",
    "replay.eval_every=0",
    "replay.poll_s=0.5",
    "checkpoint.every=0",
    "checkpoint.export_at_end=false",
    "logging.wandb=disabled",
    "run.resume=never",
)
"""Set in every mode: no evaluation, checkpoint or upload inside the measured window; gauges twice a second."""


def main(argv: list[str]) -> None:
    """Run all modes and repetitions, print the table, write the JSON file."""
    args = _arguments(argv)
    config = load_config(args.config, args.set)
    steps = config.run.max_steps
    cool = config.replay.max_staleness + 1
    if not 0 < args.warm < steps - cool - 1:
        raise ConfigError(
            f"--warm must be in [1, {steps - cool - 2}], got {args.warm} (run.max_steps = {steps}, {cool} last steps are left out)"
        )
    facts = machine()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="throughput-") as scratch:
        folder = args.keep or Path(scratch)
        for repetition, mode in alternating([mode for mode in MODES if mode in args.modes], args.repeats):
            run = _launch(args, mode, folder, f"{mode}-{repetition}")
            runs.append({"mode": mode, "repetition": repetition, **measure(run, args.warm, cool)})
            print(f"{mode} {repetition}: {runs[-1]['samples_per_s']:.2f} samples/s over {runs[-1]['steps']} steps", flush=True)
    result = {
        "config": str(args.config),
        "set": args.set,
        "warm_steps": args.warm,
        "cool_steps": cool,
        "machine": facts,
        **compare(runs),
        "runs": runs,
    }
    Console(width=120).print(table(result))
    if args.json:
        write_json(args.json, result)


def overrides(mode: str, time_shared: Sequence[str]) -> list[str]:
    """The keys that make a mode of a configuration."""
    if mode == "async":
        return []
    if mode == "barrier":
        return ["replay.max_staleness=0"]
    cores = len(os.sched_getaffinity(0))
    return ["replay.max_staleness=0", f"generator.threads={cores}", f"launch.learner_threads={cores}", *time_shared]


def measure(run: Path, warm: int, cool: int) -> dict[str, Any]:
    """Figures of a run's folder over its steps without the first ``warm`` and the last ``cool`` ones.

    ``cool`` is what generation may be ahead: once nothing more is to be generated, training alone uses up what is buffered.

    Raises:
        RunStoppedError: too few steps were recorded.
    """
    recorded = surviving_steps(read_json_lines(run / "metrics" / "learner.jsonl"))
    steps = recorded[warm : len(recorded) - cool]
    if warm < 1 or len(steps) < 2:
        raise RunStoppedError(f"{run} must hold more than {warm + cool + 1} trained steps, got {len(recorded)}")
    begin, end = recorded[warm - 1]["time"], steps[-1]["time"]
    rows = [row for row in read_json_lines(run / "metrics" / "timeline.jsonl") if begin <= row["time"] <= end]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    seconds = end - begin
    waits, stalls = _mean(steps, "wait_s"), _mean(steps, "publish_stall_s")
    busy = shares(rows, steps)
    updates = actor_increase(rows, "weight_updates")
    lags = Counter[str]()
    for step in steps:
        lags.update(step.get("lag_histogram") or {})
    return {
        "steps": len(steps),
        "seconds": seconds,
        "samples": sum(int(step["trajectories"]) for step in steps),
        "groups": sum(int(step["groups"]) for step in steps),
        "samples_per_s": sum(step["trajectories"] for step in steps) / seconds,
        "tokens_per_s": sum(step["tokens"] for step in steps) / seconds,
        "sampled_tokens_per_s": sum(step["trainable_tokens"] for step in steps) / seconds,
        "generation_wait_s": waits,
        "training_s": seconds / len(steps) - waits,
        "idle": {
            "learner": waits * len(steps) / seconds,
            "generators": _rest(busy, "generators_busy", "generators_stalled"),
            "search": _rest(busy, "search_busy"),
        },
        "generators_stalled": busy.get("generators_stalled"),
        "staleness": dict(sorted(lags.items())),
        "weight_sync_s": _mean(steps, "publish_s"),
        "learner_stall_s": stalls,
        "generator_stall_s": actor_increase(rows, "stall_s") / updates if updates else None,
        "weight_updates": updates,
        "em_end": summary["em_end"],
        "n_eval": summary["n_eval"],
        "groups_trained": summary["groups_trained"],
        "wall_s": summary["wall_s"],
    }


def compare(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians by mode, and the ratios between modes."""
    modes = {mode: medians([run for run in runs if run["mode"] == mode]) for mode in MODES}
    found: dict[str, Any] = {"modes": {mode: figures for mode, figures in modes.items() if figures}}
    rate = {mode: figures["samples_per_s"] for mode, figures in found["modes"].items()}
    if "barrier" in rate:
        g, t = modes["barrier"]["generation_wait_s"], modes["barrier"]["training_s"]
        found |= {"g": g, "t": t, "bound": (g + t) / max(g, t)}
    if "async" in rate and "barrier" in rate:
        found["ratio_barrier"] = rate["async"] / rate["barrier"]
        found["share_of_bound"] = found["ratio_barrier"] / found["bound"]
    if "async" in rate and "time_shared" in rate:
        found["ratio_time_shared"] = rate["async"] / rate["time_shared"]
    return found


def table(result: Mapping[str, Any]) -> Table:
    """The comparison as a rich table."""
    modes = result["modes"]
    shown = Table(title=f"asynchronous against synchronous: {result['config']}", title_justify="left")
    shown.add_column("median over repetitions")
    for mode in modes:
        shown.add_column(mode.replace("_", " "), justify="right")
    rows = [
        ("trained samples/s", "samples_per_s", ".2f"),
        ("tokens/s", "tokens_per_s", ",.0f"),
        ("sampled tokens/s", "sampled_tokens_per_s", ",.0f"),
    ]
    rows += [("a step waits for groups, s", "generation_wait_s", ".2f"), ("a step trains, s", "training_s", ".2f")]
    rows += [("weights reach the engines, s", "weight_sync_s", ".3f"), ("learner stalls for it, s", "learner_stall_s", ".4f")]
    rows += [("a generator stalls for it, s", "generator_stall_s", ".3f"), ("held-out exact match at the end", "em_end", ".3f")]
    for label, key, form in rows:
        shown.add_row(label, *(_shown(figures.get(key), form) for figures in modes.values()))
    for piece in ("learner", "generators", "search"):
        shown.add_row(f"{piece} idle", *(_shown(figures["idle"].get(piece), ".1%") for figures in modes.values()))
    lags = sorted({lag for figures in modes.values() for lag in figures["staleness"]})
    for lag in lags:
        shown.add_row(f"groups of lag {lag}", *(_shown(figures["staleness"].get(lag, 0), ".0f") for figures in modes.values()))
    ratios = [
        f"{name} {result[name]:.3f}" for name in ("ratio_barrier", "bound", "share_of_bound", "ratio_time_shared") if name in result
    ]
    shown.caption = "   ".join(ratios)
    return shown


def _launch(args: argparse.Namespace, mode: str, folder: Path, name: str) -> Path:
    """One run by `bin/launch`; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = [*args.set, *QUIET, *overrides(mode, args.time_shared), f"run.dir={folder}", f"run.name={name}"]
    command = [
        sys.executable,
        str(ROOT / "bin" / "launch"),
        str(args.config),
        *(part for key in settings for part in ("--set", key)),
    ]
    with (folder / f"{name}.log").open("wb") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=args.timeout_s, check=False).returncode
    if code:
        last = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise RunStoppedError(f"the {mode} run ended with exit status {code}: {' '.join(last)}")
    return folder / name


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="CONFIG")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result here")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="repetitions of each mode, in alternating order (default 3)"
    )
    parser.add_argument("--warm", type=int, default=5, metavar="N", help="first steps that are not measured (default 5)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="modes to run (default all)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key in every mode")
    parser.add_argument(
        "--time-shared", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key in time_shared alone"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs' folders here")
    parser.add_argument("--timeout-s", type=float, default=3600.0, metavar="S", help="longest that one run may take (default 3600)")
    return parser.parse_args(argv)


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return math.fsum(values) / len(values) if values else 0.0


def _rest(busy: Mapping[str, float], *names: str) -> float | None:
    """What ``names`` leave of 1; ``None`` where the first is not known."""
    return max(0.0, 1.0 - sum(busy.get(name, 0.0) for name in names)) if names[0] in busy else None


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SearchRLError as error:
        sys.exit(f"error: {error}")
    except subprocess.TimeoutExpired as error:
        sys.exit(f"error: a run took longer than --timeout-s {error.timeout:g}")
