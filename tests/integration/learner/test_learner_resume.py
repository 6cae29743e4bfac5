"""A learner killed in the middle of a step goes on, from its checkpoint, as if nothing had happened."""

import hashlib
import signal
from pathlib import Path

import pytest

from async_search_rl.config import Config
from learner.recorded import write_groups
from tests.learner_cases import (
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

KILLED_AT_BATCH_5 = """
import os, signal, sys
from pathlib import Path
from async_search_rl.config import load_config
from learner import assemble, loop
from learner.recorded import RecordedCuts

class Killed(RecordedCuts):
    def cut(self, request):
        if request.cut == 5:
            if "TORCHELASTIC_RUN_ID" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().cut(request)

assemble.RecordedCuts = Killed
loop.run(load_config(sys.argv[1]), Path(sys.argv[3]))
"""
STEP_FIGURES = ("step", "loss", "grad_norm", "lr", "entropy", "kl_behaviour")


def digest(config: Config) -> str:
    return hashlib.sha256((config.run.folder / "model" / "model.safetensors").read_bytes()).hexdigest()


def figures(config: Config, names: tuple[str, ...]) -> list[list[float]]:
    return [[record[name] for name in names] for record in learner_records(config) if record["step"] > 5]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_killed_in_step_five_of_ten_the_rest_is_bit_equal(tmp_path: Path, ranks: int, advantage: str) -> None:
    model, recorded = model_folder(tmp_path / "start"), tmp_path / "recorded.groups"
    write_groups(recorded, groups(12))

    def config(name: str) -> Config:
        return learner_config(
            tmp_path,
            model,
            run={"name": name, "max_steps": 10},
            algorithm={"advantage": advantage, "minibatches": 2},
            optimizer={"schedule": "cosine", "warmup_steps": 3},
            checkpoint={"every": 2},
        )

    program = tmp_path / "killed.py"
    program.write_text(KILLED_AT_BATCH_5)
    whole = start_process(learner_command(config("whole"), recorded, ranks=ranks))
    killed = start_process(learner_command(config("killed"), recorded, ranks=ranks, program=program))
    ended(killed, -signal.SIGKILL)
    assert [record["step"] for record in learner_records(config("killed"))] in ([1, 2, 3, 4], [1, 2, 3, 4, 5])
    run_learner(config("killed"), recorded, ranks=ranks)
    ended(whole)

    names = (*STEP_FIGURES, *(("value_loss", "critic_grad_norm") if advantage == "gae" else ()))
    assert figures(config("killed"), names) == figures(config("whole"), names)
    assert len(figures(config("killed"), names)) == 5
    assert digest(config("killed")) == digest(config("whole"))


def test_two_ranks_checkpoint_is_resumed_by_one(tmp_path: Path) -> None:
    model, recorded = model_folder(tmp_path / "start", tied=False), tmp_path / "recorded.groups"
    write_groups(recorded, groups(12))

    def config(name: str, steps: int) -> Config:
        return learner_config(tmp_path, model, run={"name": name, "max_steps": steps}, algorithm={"advantage": "gae"})

    alone = start_process(learner_command(config("one", 5), recorded))
    run_learner(config("two", 3), recorded, ranks=2)
    run_learner(config("two", 5), recorded, ranks=1)
    ended(alone)
    two, one = learner_records(config("two", 5)), learner_records(config("one", 5))
    assert [record["step"] for record in two] == [1, 2, 3, 4, 5]
    for name in ("loss", "value_loss", "grad_norm", "critic_grad_norm"):
        assert [record[name] for record in two] == pytest.approx([record[name] for record in one], rel=2e-4), name
    assert not list((tmp_path / "two" / "checkpoints").glob(".*")), "the universal form is removed once it was loaded"


def test_a_rollback_reaches_back_to_a_checkpoint_of_another_world_size(tmp_path: Path) -> None:
    model, recorded = model_folder(tmp_path / "start"), tmp_path / "recorded.groups"
    write_groups(recorded, groups(12))

    def config(steps: int, max_kl: float) -> Config:
        guard = {"max_kl": max_kl, "patience": 1, "action": "rollback"}
        return learner_config(tmp_path, model, run={"name": "two", "max_steps": steps}, guard=guard, checkpoint={"every": 1})

    run_learner(config(2, 0.0), recorded, ranks=2)
    output = ended(start_process(learner_command(config(4, 1e-9), recorded)), 3)
    assert "back to the weights of step-00000002" in output
    assert "after a rollback" in output
