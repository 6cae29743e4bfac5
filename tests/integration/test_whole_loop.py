"""The whole system, every process of it: the demo for a few steps, and SmolLM2-135M on real questions with real passages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


def prepared(name: str) -> None:
    subprocess.run([sys.executable, "bin/prepare", name], cwd=ROOT, check=True, timeout=600, capture_output=True)


def launch(config: str, runs: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run ``bin/launch`` to its end; its summary and the learner's records, one a step."""
    sets = [part for override in (f"run.dir={runs}", *overrides) for part in ("--set", override)]
    result = subprocess.run(
        [sys.executable, "bin/launch", config, *sets], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    folder = next(runs.iterdir())
    records = [json.loads(line) for line in (folder / "metrics" / "learner.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), records


def test_the_demo_learns_something_in_a_few_steps_and_loses_nothing(tmp_path: Path) -> None:
    prepared("demo")
    summary, records = launch("configs/demo.toml", tmp_path, "run.max_steps=12", "data.eval_questions=100")
    assert [r["step"] for r in records] == list(range(1, 13))
    assert summary["groups_trained"] == 12 * 16
    assert summary["groups_dropped"] == 0
    assert summary["max_lag"] <= summary["max_staleness"]
    assert summary["weight_updates"] >= 12
    assert summary["n_eval"] == 100
    assert summary["em_end"] > summary["em_start"] + 0.1
    assert (tmp_path / "demo" / "index.html").stat().st_size > 10_000
    assert (tmp_path / "demo" / "model" / "model.safetensors").exists()


def test_two_asynchronous_steps_of_smollm2_on_natural_questions(tmp_path: Path) -> None:
    prepared("questions")
    prepared("smollm2")
    summary, records = launch("configs/smollm2.toml", tmp_path, "data.eval=")
    assert summary["steps"] == 2
    assert summary["groups_trained"] == 4
    assert summary["groups_dropped"] == 0
    # Tokens of the first step were sampled by the very weights that train on them: engine and learner must agree on them.
    first, second = records
    assert first["lag_max"] == 0
    assert abs(first["kl_behaviour"]) < 1e-4
    assert first["ess"] > 0.999
    assert second["lag_max"] <= 1
    assert min(first["trainable_tokens"], second["trainable_tokens"]) > 0
    assert max(r["searches_mean"] for r in records) > 0
    assert all(r["grad_norm"] > 0 for r in records)
    # The second batch was sampled by the starting weights or the first update's, near those that trained on it.
    assert abs(second["kl_behaviour"]) < 1e-2
