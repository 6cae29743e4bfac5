"""The critic of `gae` and `vtrace`: a backbone with a scalar head, on an engine, optimiser and schedule of its own.

In: micro-batches, then value targets. Out: V of the state before each trainable token, and the figures of its updates. Collective,
like everything on an engine.

Legend: T tokens and N trainable tokens of a micro-batch, d hidden size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from async_search_rl.config.learner import OptimizerSection
from async_search_rl.config.schema import Config
from learner.attention import PackedLayout, use_packed_attention
from learner.batch import MicroBatch
from learner.deepspeed_engine import Engine
from learner.loading import DTYPES, block_classes, check_model_folder, load_causal_lm
from learner.plan import MiniBatch, SumsByName, schedule_of
from learner.ranks import Ranks
from learner.value_loss import ValueBatch, value_loss, value_metrics

Array = npt.NDArray[Any]


class ValueModel(nn.Module):
    """The backbone of a causal language model, and one number instead of its vocabulary. The head starts at 0."""

    def __init__(self, causal_lm: Any, attention: str = "auto") -> None:
        super().__init__()
        use_packed_attention(causal_lm, attention)
        self.backbone = causal_lm.get_decoder()
        hidden_size = causal_lm.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden_size, 1, dtype=causal_lm.dtype, device=causal_lm.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids_T: Tensor, layout: PackedLayout, positions_N: Tensor) -> Tensor:
        """V of the state before each of the tokens at ``positions_N``, float32 [N]."""
        hidden_Td = self.backbone(input_ids=input_ids_T[None], **layout.model_kwargs()).last_hidden_state[0]
        values_N: Tensor = self.value_head(hidden_Td[positions_N - 1]).squeeze(-1).float()
        return values_N


class Critic:
    """The value model under its engine."""

    def __init__(self, engine: Engine, config: Config, ranks: Ranks) -> None:
        self.engine = engine
        self._clip, self._ranks = config.critic.value_clip, ranks
        self._schedule = schedule_of(critic_optimizer(config), config)

    def values(self, micro: MicroBatch) -> Tensor:
        """V of the state before each trainable token, float32 [N]."""
        values_N: Tensor = self.engine(micro.input_ids_T, micro.layout, micro.positions_N)
        return values_N

    def update(
        self, mini: MiniBatch, start_N: Array, targets_N: Array, weights_N: Array, denominator: float, optimizer_step: int
    ) -> dict[str, float]:
        """One optimiser step towards ``targets_N``.

        Args:
            mini: the mini-batch.
            start_N: values at the start of the step, over the whole batch; the clip range is around them.
            targets_N: value targets over the whole batch.
            weights_N: aggregation weights over the whole batch.
            denominator: D of :func:`learner.losses.loss_weights`.
            optimizer_step: optimiser steps taken before.

        Returns:
            ``value_loss``, ``explained_variance``, ``critic_lr``, ``critic_grad_norm``, and ``critic_skipped`` (0 or 1).
        """
        sums = SumsByName()
        for index, micro in enumerate(mini.micro_batches):
            batch = ValueBatch(self.values(micro), micro.pick(targets_N), micro.pick(weights_N), micro.pick(start_N))
            loss = value_loss(batch, self._clip)
            self.engine.backward(loss.loss / denominator, last=index == len(mini.micro_batches) - 1)
            sums.add(loss.sums)
        figures = value_metrics(sums.total(self._ranks), denominator)
        lr = self._schedule.rate(optimizer_step)
        report = self.engine.step(lr, finite=bool(np.isfinite(figures["value_loss"])))
        return figures | {"critic_lr": lr, "critic_grad_norm": report.grad_norm, "critic_skipped": float(not report.applied)}


def critic_optimizer(config: Config) -> OptimizerSection:
    """The policy's optimiser with the critic's learning rate and warm-up."""
    o, c = config.optimizer, config.critic
    return OptimizerSection(
        lr=c.lr,
        schedule=o.schedule,
        warmup_steps=c.warmup_steps,
        warmup_ratio=c.warmup_ratio,
        min_lr_ratio=o.min_lr_ratio,
        beta1=o.beta1,
        beta2=o.beta2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        grad_clip=o.grad_clip,
    )


def build_critic(config: Config, ranks: Ranks) -> Critic:
    """The critic of `critic.path`, or of the policy's starting weights."""
    path, key = (config.critic.path, "critic.path") if config.critic.path else (config.model.path, "model.path")
    folder = check_model_folder(path, key, tokenizer=False)
    model = load_causal_lm(folder, DTYPES[config.model.dtype], gradient_checkpointing=config.learner.gradient_checkpointing)
    module = ValueModel(model.to(ranks.device), config.learner.attention)
    optimizer = critic_optimizer(config)
    engine = Engine(module, blocks=block_classes(model), optimizer=optimizer, learner=config.learner, ranks=ranks)
    return Critic(engine, config, ranks)
