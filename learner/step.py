"""One training step: from a cut to new weights.

In: a :class:`~learner.batch.Batch`, the same on every rank. Out: the policy (and the critic) after one optimiser step a mini-batch,
and the step's figures, the same on every rank. Every method is collective; nobody but the ranks waits for one another here.

Legend: N trainable tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from async_search_rl.config.schema import Config
from async_search_rl.errors import RunStoppedError
from learner.advantages import AdvantageInputs, Advantages, compute_advantages, kl_rewards
from learner.batch import Batch, MicroBatch
from learner.critic import Critic
from learner.deepspeed_engine import Engine
from learner.flops import ModelShape
from learner.loss_metrics import loss_metrics
from learner.losses import TokenBatch, loss_weights, needs_start_logprobs, policy_loss
from learner.plan import MiniBatch, SumsByName, all_micro_batches, evaluate, plan_step, schedule_of
from learner.ranks import Ranks
from learner.reference import Reference

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class StartOfStep:
    """What is known of every trainable token before the first optimiser step; arrays [N], None where nothing uses them."""

    logprobs_N: Array | None
    """Under the policy at the start of the step."""
    reference_N: Array | None
    """Under the reference policy."""
    values_N: Array | None
    """V of the state before the token."""
    result: Advantages
    """Advantages and value targets."""


class TrainStep:
    """Trains the networks it is given on one batch after the other; ``shape`` is the policy's, for packing."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        policy: Engine,
        critic: Critic | None,
        reference: Reference | None,
        ranks: Ranks,
    ) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._policy, self._critic, self._reference, self._ranks = policy, critic, reference, ranks
        self._quadratic_tokens = shape.quadratic_tokens
        self._schedule = schedule_of(config.optimizer, config)

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on ``batch`` as the step that follows ``step`` trained batches.

        Returns:
            Figures by the names of :data:`async_search_rl.metrics.METRICS`; ``skipped`` counts optimiser steps not applied.

        Raises:
            RunStoppedError: for a loss or gradient that is not finite, with ``learner.skip_nonfinite = false``.
        """
        mini_batches = plan_step(batch, self._config, self._ranks, self._quadratic_tokens)
        start = self._start_of_step(batch, all_micro_batches(mini_batches))
        figures = [
            self._update(batch, mini, start, step, step * self._algorithm.minibatches + index)
            for index, mini in enumerate(mini_batches)
        ]
        skipped = sum(f["skipped"] + f.get("critic_skipped", 0.0) for f in figures)
        if skipped and not self._config.learner.skip_nonfinite:
            raise RunStoppedError(
                f"loss and gradient must be finite with learner.skip_nonfinite = false, got others in step {step + 1}"
            )
        combined = {name: float(np.mean([f[name] for f in figures])) for name in figures[0]}
        return combined | {
            "skipped": skipped,
            "clip_active": max(f["clip_active"] for f in figures),
            "padding": float(np.mean([mini.padding for mini in mini_batches])),
            "microbatches": float(len(all_micro_batches(mini_batches))),
        }

    def _start_of_step(self, batch: Batch, micro_batches: Sequence[MicroBatch]) -> StartOfStep:
        algorithm, ranks = self._algorithm, self._ranks
        logprobs_N = reference_N = values_N = token_rewards_N = None
        if needs_start_logprobs(algorithm):
            logprobs_N = evaluate(lambda m: self._logprobs(m)[0], micro_batches, batch, ranks)
        if self._reference is not None:
            reference_N = evaluate(self._reference, micro_batches, batch, ranks)
        if self._critic is not None:
            values_N = evaluate(self._critic.values, micro_batches, batch, ranks)
        if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
            assert logprobs_N is not None
            assert reference_N is not None
            token_rewards_N = kl_rewards(logprobs_N, reference_N, algorithm)
        inputs = AdvantageInputs(
            rewards_S=batch.rewards_S,
            group_ids_S=batch.group_ids_S,
            valid_S=batch.valid_S,
            tokens_S=batch.tokens_S,
            token_rewards_N=token_rewards_N,
            values_N=values_N,
            behaviour_logprobs_N=batch.behaviour_N,
            target_logprobs_N=logprobs_N,
        )
        return StartOfStep(logprobs_N, reference_N, values_N, compute_advantages(inputs, algorithm))

    def _update(self, batch: Batch, mini: MiniBatch, start: StartOfStep, step: int, optimizer_step: int) -> dict[str, float]:
        """One optimiser step of each network."""
        members = list(mini.members)
        weights_S = np.zeros(len(batch.valid_S))
        weights_S[members], denominator = loss_weights(batch.tokens_S[members], batch.valid_S[members], self._algorithm)
        weights_N = np.repeat(weights_S, batch.tokens_S)
        alone = self._critic is not None and step < self._config.critic.policy_delay_steps
        figures = self._update_policy(batch, mini, start, weights_N, denominator, optimizer_step, frozen=alone)
        if self._critic is not None:
            assert start.values_N is not None
            assert start.result.value_targets_N is not None, "an estimator with a critic gives value targets"
            targets_N = start.result.value_targets_N
            figures |= self._critic.update(mini, start.values_N, targets_N, weights_N, denominator, optimizer_step)
        return figures

    def _update_policy(
        self,
        batch: Batch,
        mini: MiniBatch,
        start: StartOfStep,
        weights_N: Array,
        denominator: float,
        optimizer_step: int,
        frozen: bool,
    ) -> dict[str, float]:
        """One optimiser step of the policy; with ``frozen`` only its figures, while the critic trains alone."""
        sums = SumsByName()
        for index, micro in enumerate(mini.micro_batches):
            with torch.set_grad_enabled(not frozen):
                loss = policy_loss(self._token_batch(batch, micro, start, weights_N), self._algorithm)
            if not frozen:
                self._policy.backward(loss.loss / denominator, last=index == len(mini.micro_batches) - 1)
            sums.add(loss.sums)
        lr = 0.0 if frozen else self._schedule.rate(optimizer_step)
        figures = loss_metrics(sums.total(self._ranks), denominator) | {"lr": lr}
        if frozen:
            return figures | {"grad_norm": 0.0, "skipped": 0.0}
        report = self._policy.step(lr, finite=bool(np.isfinite(figures["loss"])))
        return figures | {"grad_norm": report.grad_norm, "skipped": float(not report.applied)}

    def _token_batch(self, batch: Batch, micro: MicroBatch, start: StartOfStep, weights_N: Array) -> TokenBatch:
        current_N, entropy_N = self._logprobs(micro)
        several = self._algorithm.minibatches > 1
        return TokenBatch(
            current_N=current_N,
            behaviour_N=micro.pick(batch.behaviour_N),
            advantages_N=micro.pick(start.result.advantages_N),
            sequence_N=micro.sequence_N,
            sequences=len(micro.members),
            weights_N=micro.pick(weights_N),
            proximal_N=micro.pick(start.logprobs_N) if several and start.logprobs_N is not None else None,
            entropy_N=entropy_N,
            reference_N=None if start.reference_N is None else micro.pick(start.reference_N),
        )

    def _logprobs(self, micro: MicroBatch) -> Any:
        return self._policy(micro.input_ids_T, micro.layout, micro.positions_N)
