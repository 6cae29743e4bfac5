"""Gradients of ZeRO-3 on one rank and on two equal those of plain torch on the whole batch."""

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_search_rl.codec import decode_group
from async_search_rl.config import Config
from learner.advantages import AdvantageInputs, compute_advantages
from learner.batch import batch_from_groups, micro_batch
from learner.losses import TokenBatch, loss_weights, policy_loss
from learner.policy import PackedPolicy
from learner.recorded import read_groups, write_groups
from tests.learner_cases import ended, groups, learner_command, learner_config, model_folder, start_process

pytestmark = pytest.mark.integration

SAVES_GRADIENTS = """
import sys
from pathlib import Path
import torch
from async_search_rl.config import load_config
from learner import assemble, loop
from learner.deepspeed_config import import_deepspeed
import_deepspeed()
from deepspeed.utils import safe_get_full_grad
from learner.deepspeed_engine import Engine

class Saving(Engine):
    def step(self, lr, finite=True):
        gradients = {name: safe_get_full_grad(p).clone() for name, p in self.module.named_parameters()}
        torch.save(gradients, sys.argv[1] + ".gradients")
        return super().step(lr, finite)

assemble.Engine = Saving
loop.run(load_config(sys.argv[1]), Path(sys.argv[3]))
"""


def zero3_gradients(config: Config, process: subprocess.Popen[str]) -> dict[str, torch.Tensor]:
    ended(process)
    gradients: dict[str, torch.Tensor] = torch.load(f"{config.run.dir}/{config.run.name}.toml.gradients", weights_only=True)
    return gradients


def plain_gradients(config: Config, recorded: Path) -> dict[str, torch.Tensor]:
    policy = PackedPolicy(AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32))
    batch = batch_from_groups([decode_group(g) for g in read_groups(recorded)[: config.replay.batch_groups]])
    inputs = AdvantageInputs(
        rewards_S=batch.rewards_S, group_ids_S=batch.group_ids_S, valid_S=batch.valid_S, tokens_S=batch.tokens_S
    )
    advantages_N = compute_advantages(inputs, config.algorithm).advantages_N
    weights_S, denominator = loss_weights(batch.tokens_S, batch.valid_S, config.algorithm)
    micro = micro_batch(batch, [i for i, valid in enumerate(batch.valid_S) if valid], torch.device("cpu"))
    current_N, entropy_N = policy(micro.input_ids_T, micro.layout, micro.positions_N)
    tokens = TokenBatch(
        current_N=current_N,
        behaviour_N=micro.pick(batch.behaviour_N),
        advantages_N=micro.pick(advantages_N),
        sequence_N=micro.sequence_N,
        sequences=len(micro.members),
        weights_N=micro.pick(weights_S.repeat(batch.tokens_S)),
        entropy_N=entropy_N,
    )
    (policy_loss(tokens, config.algorithm).loss / denominator).backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("tied", "whole"), [(True, 10**9), (False, 10**9), (True, 0)], ids=["tied", "untied", "by blocks"])
def test_one_rank_two_ranks_and_plain_torch_give_the_same_gradients(tmp_path: Path, tied: bool, whole: int) -> None:
    model, recorded, program = model_folder(tmp_path / "start", tied=tied), tmp_path / "recorded.groups", tmp_path / "saves.py"
    write_groups(recorded, groups(5))
    program.write_text(SAVES_GRADIENTS)

    def config(name: str) -> Config:
        return learner_config(
            tmp_path,
            model,
            run={"name": name, "max_steps": 1},
            replay={"batch_groups": 5},
            learner={"gather_whole_below": whole},
            algorithm={"entropy_coef": 0.01, "aggregation": "sequence_mean"},
            checkpoint={"export_at_end": False},
        )

    processes = {
        ranks: start_process(learner_command(config(f"ranks{ranks}"), recorded, ranks=ranks, program=program)) for ranks in (1, 2)
    }
    plain = plain_gradients(config("plain"), recorded)
    for ranks, process in processes.items():
        gradients = zero3_gradients(config(f"ranks{ranks}"), process)
        assert gradients.keys() == plain.keys()
        for name, expected in plain.items():
            torch.testing.assert_close(gradients[name], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()), msg=name)
