"""The learner on a GPU: bfloat16 with float32 master weights under ZeRO-3, off-load, and a resume from the same losses."""

from pathlib import Path

import pytest
import torch

from learner.recorded import write_groups
from tests.learner_cases import groups, learner_config, learner_records, model_folder, run_learner

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "learner",
    [
        {},
        {"gradient_checkpointing": True, "offload_optimizer": "cpu"},
        {"offload_params": "cpu", "offload_optimizer": "cpu"},
        {"zero_stage": 2},
        {"compile": True},
    ],
    ids=["zero3", "checkpointing", "offload", "zero2", "compiled"],
)
def test_training_in_bfloat16_gives_the_losses_of_float32(tmp_path: Path, learner: dict[str, object]) -> None:
    model, recorded = model_folder(tmp_path / "start"), tmp_path / "recorded.groups"
    write_groups(recorded, groups(12))
    sixteen = learner_config(tmp_path, model, model={"dtype": "bfloat16"}, run={"name": "bf16"}, learner=learner)
    # Heads of 8 are too small for flex attention, which float32 has by itself.
    full = learner_config(tmp_path, model, run={"name": "fp32"}, learner={"attention": "segments"})
    run_learner(sixteen, recorded)
    run_learner(full, recorded)
    a, b = learner_records(sixteen), learner_records(full)
    assert [r["step"] for r in a] == [1, 2, 3, 4]
    assert [r["entropy"] for r in a] == pytest.approx([r["entropy"] for r in b], rel=0.02)
    assert [r["grad_norm"] for r in a] == pytest.approx([r["grad_norm"] for r in b], rel=0.1)
    assert all(r["device_memory_bytes"] > 0 for r in a)


def test_a_resumed_run_goes_on_from_the_same_losses(tmp_path: Path) -> None:
    model, recorded = model_folder(tmp_path / "start"), tmp_path / "recorded.groups"
    write_groups(recorded, groups(12))

    def config(name: str, steps: int):
        return learner_config(
            tmp_path,
            model,
            model={"dtype": "bfloat16"},
            run={"name": name, "max_steps": steps},
            algorithm={"advantage": "gae", "minibatches": 2, "kl_coef": 0.01},
        )

    run_learner(config("whole", 6), recorded)
    run_learner(config("halves", 3), recorded)
    run_learner(config("halves", 6), recorded)
    whole, halves = learner_records(config("whole", 6)), learner_records(config("halves", 6))
    for name in ("loss", "value_loss", "grad_norm"):
        assert [r[name] for r in halves] == pytest.approx([r[name] for r in whole], rel=1e-2), name
