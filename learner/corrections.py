"""Off-policy correction: the weight ``w`` of a token from the behaviour policy to the proximal one.

In: ``proximal - behaviour`` log-probabilities of a micro-batch's trainable tokens. Out: one weight per token, without
gradient. A trajectory is never split over micro-batches, so sequence-level ratios are exact.

Legend: N trainable tokens of a micro-batch, S trajectories in it; ``sequence_N`` maps the one to the other.

A new correction is a function ``(ratio_N, AlgorithmSection) -> weights_N`` and an entry in
:data:`async_search_rl.config.learner.CORRECTIONS`; what the ratio is of (token, sequence, geometric mean) is decided before,
by ``algorithm.correction_level``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from async_search_rl.config.learner import CORRECTIONS, AlgorithmSection
from learner.registry import resolve

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within this bound before ``exp``: an infinite ratio times a zero gradient would be NaN."""


Correction = Callable[[Tensor, AlgorithmSection], Tensor]


def correction_weights(
    log_ratio_N: Tensor, sequence_N: Tensor, sequences: int, algorithm: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """Weights by ``algorithm.correction`` and ``correction_level``, and where they are capped.

    Returns:
        Weights [N] without gradient, in the dtype of ``log_ratio_N``; and bool [N], true where the weight is smaller than the
        ratio but not 0.

    Raises:
        ConfigError: for a name that stands for no function.
    """
    correct: Correction = resolve(CORRECTIONS, algorithm.correction, "algorithm.correction")
    with torch.no_grad():
        ratio_N = ratio(at_level(log_ratio_N, sequence_N, sequences, algorithm.correction_level))
        weights_N = correct(ratio_N, algorithm)
        if algorithm.correction == "none":
            return weights_N, torch.zeros_like(weights_N, dtype=torch.bool)
        return weights_N, (weights_N < ratio_N) & (weights_N > 0)


def none(ratio_N: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """1: the difference between behaviour and proximal policy is ignored."""
    return torch.ones_like(ratio_N)


def tis(ratio_N: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """Truncated importance sampling: ``min(ratio, C)`` (Ionides 2008; for RL rollouts Yao et al. 2025)."""
    return ratio_N.clamp(max=algorithm.correction_high)


def mis(ratio_N: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """Masked importance sampling: the ratio inside [lo, hi], 0 outside (Liu et al. 2025; their one-sided form is lo = 0)."""
    inside_N = (ratio_N >= algorithm.correction_low) & (ratio_N <= algorithm.correction_high)
    return torch.where(inside_N, ratio_N, torch.zeros_like(ratio_N))


def icepop(ratio_N: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """``M(k) = k`` for k in [alpha, beta], else 0, of the token ratio (Ling Team 2025, Every Step Evolves).

    The same function as two-sided :func:`mis`: the papers differ in the level and in the bounds, both of which are settings.
    """
    return mis(ratio_N, algorithm)


def at_level(log_ratio_N: Tensor, sequence_N: Tensor, sequences: int, level: str) -> Tensor:
    """The log-ratio each token is judged by [N]: its own, the sum over its trajectory, or the mean (geometric)."""
    if level == "token":
        return log_ratio_N
    return (sequence_sum if level == "sequence" else sequence_mean)(log_ratio_N, sequence_N, sequences)


def sequence_sum(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Sum over the tokens of each trajectory, given back to each of its tokens [N]; differentiable."""
    return values_N.new_zeros(sequences).index_add(0, sequence_N, values_N)[sequence_N]


def sequence_mean(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Mean over the tokens of each trajectory, given back to each of its tokens [N]; differentiable."""
    return sequence_sum(values_N, sequence_N, sequences) / sequence_sum(torch.ones_like(values_N), sequence_N, sequences)


def ratio(log_ratio_N: Tensor) -> Tensor:
    """``exp`` of a log-ratio kept within ±20 nats."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
