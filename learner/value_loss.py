"""The critic's loss: from values and value targets of one micro-batch to a loss sum and the sums of its metrics.

In: flat tensors over the trainable tokens of one micro-batch. Out: ``loss``, whose total over all micro-batches and ranks
divided by the denominator D of :func:`learner.losses.loss_weights` is the critic's loss of the optimiser step.

Legend: N trainable tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.losses import LossSum


@dataclass(frozen=True)
class ValueBatch:
    """The trainable tokens of one micro-batch; each tensor is floating [N], all on one device."""

    values_N: Tensor
    """V(s_t) of the critic in training, read at the position before each token; carries the gradient."""
    targets_N: Tensor
    """Value targets of the advantage estimator."""
    weights_N: Tensor
    """Aggregation weight of each token, from :func:`learner.losses.loss_weights`."""
    start_values_N: Tensor | None = None
    """Values at the start of the step; None: the current ones (one mini-batch), so that clipping is inert."""


def value_loss(batch: ValueBatch, value_clip: float) -> LossSum:
    """``1/2 max((V - R)^2, (clip(V, V_start - c, V_start + c) - R)^2)``, summed with weights (Schulman et al. 2016; PPO's code).

    Args:
        batch: the micro-batch.
        value_clip: c; 0 turns clipping off.
    """
    error_N = (batch.values_N - batch.targets_N).square()
    if value_clip > 0 and batch.start_values_N is not None:
        change_N = (batch.values_N - batch.start_values_N).clamp(-value_clip, value_clip)
        error_N = torch.maximum(error_N, (batch.start_values_N + change_N - batch.targets_N).square())
    loss = 0.5 * (batch.weights_N * error_N).sum()
    with torch.no_grad():
        counted_N = batch.weights_N > 0
        residual_N = batch.targets_N - batch.values_N
        summands = {
            "tokens": torch.ones_like(residual_N),
            "value_loss": 0.5 * batch.weights_N * error_N,
            "target": batch.targets_N,
            "target_squared": batch.targets_N.square(),
            "residual": residual_N,
            "residual_squared": residual_N.square(),
        }
        sums = {name: torch.where(counted_N, value, 0).sum(dtype=torch.float64) for name, value in summands.items()}
    return LossSum(loss, sums)


def value_metrics(totals: Mapping[str, float], denominator: float) -> dict[str, float]:
    """``value_loss`` and ``explained_variance`` = 1 - Var(target - value) / Var(target) (0 where all targets are equal).

    Args:
        totals: sums of :func:`value_loss` over all micro-batches and ranks, by name.
        denominator: D of :func:`learner.losses.loss_weights`.
    """
    tokens = max(totals["tokens"], 1.0)
    variance = totals["target_squared"] / tokens - (totals["target"] / tokens) ** 2
    unexplained = totals["residual_squared"] / tokens - (totals["residual"] / tokens) ** 2
    return {
        "value_loss": totals["value_loss"] / denominator,
        "explained_variance": 1 - unexplained / variance if variance > 1e-12 else 0.0,
    }
