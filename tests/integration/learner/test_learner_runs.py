"""Whole runs of `bin/learner` on recorded groups: what it writes, what it skips, what it refuses, and where it turns back."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_search_rl.codec import decode_group
from async_search_rl.config import Config
from async_search_rl.metrics import unknown_names
from async_search_rl.trajectory import Group, Trajectory
from learner.checkpoint import list_checkpoints, step_of
from learner.recorded import read_groups, write_groups
from tests.learner_cases import (
    LEARNER,
    ended,
    groups,
    learner_command,
    learner_config,
    learner_records,
    model_folder,
    run_learner,
    start_process,
)

pytestmark = pytest.mark.integration
BATCH = 3


def with_changes(group: Group, change: object) -> Group:
    def one(t: Trajectory) -> Trajectory:
        return replace(t, **change(t)) if t.valid else t  # type: ignore[operator]

    return replace(group, trajectories=tuple(one(t) for t in group.trajectories))


def weights(config: Config) -> dict[str, torch.Tensor]:
    return load_file(config.run.folder / "model" / "model.safetensors")


def test_several_minibatches_with_a_reference_and_an_export_that_transformers_loads(tmp_path: Path) -> None:
    start, recorded = model_folder(tmp_path / "start", tied=False), tmp_path / "recorded.groups"
    write_groups(recorded, groups(6))
    config = learner_config(
        tmp_path,
        start,
        algorithm={"minibatches": 3, "kl_coef": 0.05, "entropy_coef": 0.01, "advantage": "rloo"},
        optimizer={"weight_decay": 0.1},
        checkpoint={"every": 1, "keep": 2, "copy_to": str(tmp_path / "copies")},
    )
    run_learner(config, recorded)
    records = learner_records(config)
    assert [r["clip_active"] for r in records] == [1.0] * 4
    assert records[0]["kl_reference"] < records[-1]["kl_reference"]
    assert all(np.isfinite(r["loss"]) and r["grad_norm"] > 0 and r["skipped"] == 0 for r in records)
    assert unknown_names("learner", set(records[0]) - {"time"}) == []
    kept = list_checkpoints(config.run.folder / "checkpoints")
    assert [step_of(c) for c in kept] == [3, 4]
    assert {"step-00000003", "step-00000004"} <= {c.name for c in (tmp_path / "copies" / "run").iterdir()}

    model = AutoModelForCausalLM.from_pretrained(config.run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(config.run.folder / "model")
    assert tokenizer("w5 w6").input_ids == [5, 6]
    trained = weights(config)
    assert trained.keys() == load_file(start / "model.safetensors").keys()
    torch.testing.assert_close(model.lm_head.weight, trained["lm_head.weight"], rtol=0, atol=0)

    out = tmp_path / "exported"
    command = [sys.executable, str(LEARNER), "export", str(tmp_path / "run.toml"), "--checkpoint", str(kept[-1]), "--out", str(out)]
    subprocess.run(command, check=True, timeout=120)
    assert digest(out) == digest(config.run.folder / "model")


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("zero_stage", "gather_whole_below", "dtype"),
    [(3, 10**6, "float32"), (3, 0, "float32"), (2, 0, "bfloat16"), (1, 0, "bfloat16")],
)
def test_a_batch_that_is_not_finite_is_skipped_and_kept_for_a_look(
    tmp_path: Path, zero_stage: int, gather_whole_below: int, dtype: str
) -> None:
    start, recorded = model_folder(tmp_path / "start"), tmp_path / "recorded.groups"
    made = groups(4 * BATCH)
    made[BATCH] = with_changes(made[BATCH], lambda t: {"reward": 1e300 * t.reward})
    write_groups(recorded, made)
    engine = {"zero_stage": zero_stage, "gather_whole_below": gather_whole_below}
    sections = {"algorithm": {"advantage": "dr_grpo"}, "learner": engine, "model": {"dtype": dtype}}
    config = learner_config(tmp_path, start, **sections)
    others = tmp_path / "others.groups"
    write_groups(others, made[:BATCH] + made[2 * BATCH :])
    without = learner_config(tmp_path, start, run={"name": "without", "max_steps": 3}, **sections)
    process = start_process(learner_command(without, others))
    run_learner(config, recorded)
    records = learner_records(config)
    assert [r["skipped"] for r in records] == [0, 1, 0, 0]
    assert records[1]["microbatches"] > 1, "gradients of several micro-batches are added up, and forgotten"
    assert all(bool(tensor.isfinite().all()) for tensor in weights(config).values())
    saved = read_groups(config.run.folder / "skipped" / "step-00000002.groups")
    assert [decode_group(g).ticket for g in saved] == [3, 4, 5]

    ended(process)
    assert digest(without.run.folder / "model") == digest(config.run.folder / "model"), "a skipped step leaves no trace"


def test_a_rollback_goes_on_as_if_the_bad_batches_had_not_been(tmp_path: Path) -> None:
    start, recorded = model_folder(tmp_path / "start"), tmp_path / "recorded.groups"
    made = groups(6 * BATCH)

    def far_off(t: Trajectory) -> dict[str, object]:
        return {"behaviour_logprobs": np.where(t.loss_mask, -12.0, 0).astype(np.float32)}

    bad = [with_changes(g, far_off) for g in made[2 * BATCH : 4 * BATCH]]
    write_groups(recorded, made[: 2 * BATCH] + bad + made[4 * BATCH :])
    guard = {"max_kl": 50.0, "patience": 2}

    def config(name: str, steps: int, action: str) -> Config:
        return learner_config(
            tmp_path, start, run={"name": name, "max_steps": steps}, guard={**guard, "action": action}, checkpoint={"every": 1}
        )

    others = tmp_path / "others.groups"
    write_groups(others, made[: 2 * BATCH] + made[4 * BATCH :])
    without = start_process(learner_command(config("without", 4, "stop"), others))
    output = run_learner(config("back", 6, "rollback"), recorded)
    assert "back to the weights of step-00000002" in output
    assert "guard.max_kl" in output
    output = ended(start_process(learner_command(config("stopped", 6, "stop"), recorded)), 3)
    assert output.splitlines()[-1].startswith("learner: stopped: guard: kl_behaviour must be <= 50.0 (guard.max_kl), got"), output
    kept = list_checkpoints(config("stopped", 6, "stop").run.folder / "checkpoints")
    assert [step_of(checkpoint) for checkpoint in kept][-1] == 2, "no weights outside the bounds are what a resume starts from"

    ended(without)
    assert digest(config("without", 4, "stop").run.folder / "model") == digest(config("back", 6, "rollback").run.folder / "model")


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    config = learner_config(tmp_path, model_folder(tmp_path / "start"))
    config.run.folder.write_bytes(b"a file")
    output = ended(start_process(learner_command(config, tmp_path / "none.groups")), 1)
    assert output.splitlines()[-1].startswith(
        f"learner: run.dir and run.name must be a folder that can be written, got {tmp_path}"
    ), output
    assert "Traceback" not in output
