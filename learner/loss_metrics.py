"""Metrics of the policy loss: sums of one micro-batch, and what their totals over all micro-batches and ranks mean.

In: the terms of :func:`learner.losses.policy_loss`. Out: scalars that add up (:func:`metric_sums`), and from their totals
the figures of a step (:func:`loss_metrics`): the same keys every step, whatever the algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learner.corrections import ratio

if TYPE_CHECKING:
    from learner.losses import TokenBatch


@torch.no_grad()
def metric_sums(
    batch: TokenBatch,
    policy_N: Tensor,
    regulariser_N: Tensor,
    correction_N: Tensor,
    log_ratio_N: Tensor,
    flags_N: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Sums over the tokens of one micro-batch, float64 scalars; tokens of aggregation weight 0 are left out.

    Args:
        batch: the micro-batch.
        policy_N: policy loss of each token, off-policy weight included.
        regulariser_N: KL and entropy terms of each token.
        correction_N: off-policy weight.
        log_ratio_N: current minus proximal log-probability.
        flags_N: bool tensors ``clipped``, ``truncated`` (off-policy weight capped) and ``clip_active``.
    """
    counted_N = batch.weights_N > 0
    zero_N = torch.zeros_like(batch.behaviour_N)
    off_policy_N = batch.current_N - batch.behaviour_N
    ratio_N = ratio(off_policy_N)
    summands: dict[str, Tensor] = {
        "tokens": torch.ones_like(zero_N),
        "policy_loss": batch.weights_N * policy_N,
        "regulariser": batch.weights_N * regulariser_N,
        "clipped_low": flags_N["clipped"] & (log_ratio_N < 0),
        "clipped_high": flags_N["clipped"] & (log_ratio_N > 0),
        "clip_active": flags_N["clip_active"],
        "truncated": flags_N["truncated"],
        "masked": correction_N == 0,
        "weight": correction_N,
        "weight_squared": correction_N.square(),
        "ratio": ratio_N,
        "ratio_squared": ratio_N.square(),
        "kl_behaviour": _k3(off_policy_N),
        "entropy": zero_N if batch.entropy_N is None else batch.entropy_N,
        "kl_reference": zero_N if batch.reference_N is None else _k3(batch.reference_N - batch.current_N),
        "advantage": batch.advantages_N,
        "advantage_squared": batch.advantages_N.square(),
    }
    return {name: torch.where(counted_N, value, 0).sum(dtype=torch.float64) for name, value in summands.items()}


def loss_metrics(totals: Mapping[str, float], denominator: float) -> dict[str, float]:
    """Figures of one optimiser step from the totals of :func:`metric_sums` over all its micro-batches and ranks.

    ``loss`` and ``policy_loss`` are divided by D, everything else is per trainable token. ``clip_active`` is 0 where r is
    1 by construction (one mini-batch), so that clipping can do nothing. ``kl_behaviour`` is KL(behaviour || current) and
    ``kl_reference`` KL(current || reference), both by the estimator k3, in nats. Effective sample sizes are shares of
    the tokens: ``ess`` of the off-policy weights in use, ``ratio_ess`` of the raw ratios current over behaviour.

    Args:
        totals: sums by name.
        denominator: D of :func:`learner.losses.loss_weights`.
    """
    tokens = max(totals["tokens"], 1.0)
    advantage_mean = totals["advantage"] / tokens
    return {
        "loss": (totals["policy_loss"] + totals["regulariser"]) / denominator,
        "policy_loss": totals["policy_loss"] / denominator,
        "advantage_std": max(totals["advantage_squared"] / tokens - advantage_mean**2, 0.0) ** 0.5,
        "ess": effective_share(totals["weight"], totals["weight_squared"], tokens),
        "ratio_ess": effective_share(totals["ratio"], totals["ratio_squared"], tokens),
        "weight_mean": totals["weight"] / tokens,
        "clip_fraction": (totals["clipped_low"] + totals["clipped_high"]) / tokens,
        "clip_low_fraction": totals["clipped_low"] / tokens,
        "clip_high_fraction": totals["clipped_high"] / tokens,
        "mask_fraction": totals["masked"] / tokens,
        "truncated_fraction": totals["truncated"] / tokens,
        "clip_active": float(totals["clip_active"] > 0),
        "kl_behaviour": totals["kl_behaviour"] / tokens,
        "kl_reference": totals["kl_reference"] / tokens,
        "entropy": totals["entropy"] / tokens,
    }


def effective_share(total: float, total_squared: float, count: float) -> float:
    """Effective sample size of weights as a share of their number (Kish 1965); 0 where all weights are 0."""
    return total * total / (count * total_squared) if total_squared > 0 else 0.0


def _k3(log_ratio_N: Tensor) -> Tensor:
    return ratio(log_ratio_N) - 1 - log_ratio_N
