"""Policy losses: from log-probabilities and advantages of one micro-batch to a loss sum and the sums of its metrics.

In: flat tensors over the trainable tokens of one micro-batch. Out: ``loss_sum``, whose total over all micro-batches and
ranks, divided by the denominator D of :func:`loss_weights`, is the loss of the optimiser step:

    L = sum_t a_t ( -w_t J_t + kl_coef KL_t - entropy_coef H_t ) / D

``a`` is the aggregation weight of the token's trajectory, ``w`` the off-policy correction (no gradient), ``J`` the
surrogate named by ``algorithm.loss`` with ``r = current / proximal``. D is fixed before the first backward pass and is
not changed by masking, so any packing and any number of ranks gives the same gradient.

Legend: N trainable tokens of a micro-batch, S trajectories (of the batch in NumPy arrays, of the micro-batch in tensors).

A new loss is a function ``(TokenBatch, log_ratio_N, AlgorithmSection) -> Surrogate`` and an entry in
:data:`async_search_rl.config.learner.LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_search_rl.config.learner import LOSSES, AlgorithmSection
from async_search_rl.errors import SchemaError
from learner.corrections import MAX_LOG_RATIO, correction_weights, ratio, sequence_mean
from learner.loss_metrics import metric_sums
from learner.registry import resolve

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TokenBatch:
    """The trainable tokens of one micro-batch; each tensor is [N], floating unless said otherwise, all on one device."""

    current_N: Tensor
    """Log-probabilities under the policy that is being trained; carries the gradient."""
    behaviour_N: Tensor
    """Log-probabilities under the policy that sampled."""
    advantages_N: Tensor
    """Advantages."""
    sequence_N: Tensor
    """int64: trajectory of each token, 0 .. sequences - 1 within this micro-batch."""
    sequences: int
    """Trajectories in this micro-batch."""
    weights_N: Tensor
    """Aggregation weight of each token, from :func:`loss_weights`."""
    proximal_N: Tensor | None = None
    """Log-probabilities at the start of the step; None: the current ones (one mini-batch), so that r = 1."""
    entropy_N: Tensor | None = None
    """Entropy of the current policy at each token, nats; carries the gradient where there is an entropy bonus."""
    reference_N: Tensor | None = None
    """Log-probabilities under the reference policy; needed where there is a KL term in the loss."""


@dataclass(frozen=True)
class Surrogate:
    """What a loss function returns."""

    objective_N: Tensor
    """What is maximised at each token, before the off-policy weight."""
    clipped_N: Tensor
    """bool: tokens whose gradient clipping has removed or bounded."""


@dataclass(frozen=True)
class LossSum:
    """One micro-batch's share of the loss."""

    loss: Tensor
    """Scalar with gradient; not yet divided by D."""
    sums: dict[str, Tensor]
    """Scalars without gradient, always the same keys in the same order; add them up over micro-batches and ranks."""


Loss = Callable[[TokenBatch, Tensor, AlgorithmSection], Surrogate]


def policy_loss(batch: TokenBatch, algorithm: AlgorithmSection) -> LossSum:
    """The loss sum of one micro-batch. An empty micro-batch gives 0 with a gradient of 0.

    Raises:
        ConfigError: for a name that stands for no function.
        SchemaError: when the KL or entropy term lacks its tensor.
    """
    surrogate_of: Loss = resolve(LOSSES, algorithm.loss, "algorithm.loss")
    proximal_N = batch.behaviour_N if algorithm.proximal == "behaviour" else batch.proximal_N
    start_N = batch.current_N.detach() if proximal_N is None else proximal_N
    log_ratio_N = batch.current_N - start_N
    correction_N, truncated_N = correction_weights(start_N - batch.behaviour_N, batch.sequence_N, batch.sequences, algorithm)
    surrogate = surrogate_of(batch, log_ratio_N, algorithm)
    policy_N = -correction_N * surrogate.objective_N
    kl_N = _kl_term(batch, algorithm)
    entropy_N = _entropy_term(batch, algorithm)
    loss = (batch.weights_N * (policy_N + kl_N + entropy_N)).sum()
    flags = {
        "clipped": surrogate.clipped_N,
        "truncated": truncated_N,
        "clip_active": torch.full_like(truncated_N, proximal_N is not None),
    }
    return LossSum(loss, metric_sums(batch, policy_N, kl_N + entropy_N, correction_N, log_ratio_N, flags))


def ppo(batch: TokenBatch, log_ratio_N: Tensor, algorithm: AlgorithmSection) -> Surrogate:
    """``min(r A, clip(r, 1 - low, 1 + high) A)`` (Schulman et al. 2017; Yu et al. 2025, DAPO, for two bounds).

    With ``dual_clip`` = c > 1, negative advantages are bounded below by ``c A`` (Ye et al. 2020). With a proximal policy
    other than the behaviour policy this is decoupled PPO (Hilton et al. 2022).
    """
    r_N, advantages_N = ratio(log_ratio_N), batch.advantages_N
    unclipped_N = r_N * advantages_N
    objective_N = torch.minimum(unclipped_N, r_N.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages_N)
    clipped_N = objective_N < unclipped_N
    if algorithm.dual_clip > 0:
        floor_N = algorithm.dual_clip * advantages_N
        below_N = (advantages_N < 0) & (objective_N < floor_N)
        clipped_N = clipped_N | below_N
        objective_N = torch.where(below_N, floor_N, objective_N)
    return Surrogate(objective_N, clipped_N)


def gspo(batch: TokenBatch, log_ratio_N: Tensor, algorithm: AlgorithmSection) -> Surrogate:
    """``min(s A, clip(s) A)`` with the geometric mean ``s`` of the trajectory's ratios (Zheng et al. 2025, GSPO).

    Written as GSPO-token, ``s_t = sg(s) pi_t / sg(pi_t)``: equal to GSPO in value and gradient where a trajectory's
    tokens share one advantage and one weight, and defined where they do not.
    """
    s_N = ratio(sequence_mean(log_ratio_N.detach(), batch.sequence_N, batch.sequences))
    s_N = s_N * (batch.current_N - batch.current_N.detach()).exp()
    unclipped_N = s_N * batch.advantages_N
    objective_N = torch.minimum(unclipped_N, s_N.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * batch.advantages_N)
    return Surrogate(objective_N, objective_N < unclipped_N)


def cispo(batch: TokenBatch, log_ratio_N: Tensor, algorithm: AlgorithmSection) -> Surrogate:
    """``sg(clip(r)) A log pi``: clipping bounds a token's weight and never removes its gradient (MiniMax 2025, MiniMax-M1)."""
    r_N = ratio(log_ratio_N.detach())
    bounded_N = r_N.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return Surrogate(bounded_N * batch.advantages_N * batch.current_N, bounded_N != r_N)


def reinforce(batch: TokenBatch, log_ratio_N: Tensor, algorithm: AlgorithmSection) -> Surrogate:
    """``A log pi`` (Williams 1992)."""
    return Surrogate(batch.advantages_N * batch.current_N, torch.zeros_like(log_ratio_N, dtype=torch.bool))


def kl_estimate(current_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """KL(current || reference) at each sampled token [N] (Schulman 2020, Approximating KL Divergence).

    With ``q = reference - current``: k1 is ``-q``, k2 is ``q^2 / 2``, k3 is ``exp(q) - 1 - q``. In a loss, k2 has the
    gradient of the KL divergence; the gradient of k1 is 0 in expectation, so k1 belongs in the reward.
    """
    q_N = reference_N - current_N
    if estimator == "k1":
        return -q_N
    if estimator == "k2":
        return 0.5 * q_N.square()
    return torch.expm1(q_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - q_N


def loss_weights(tokens_S: Array, valid_S: Array, algorithm: AlgorithmSection) -> tuple[Array, float]:
    """Aggregation weight of each trajectory's tokens, float64[S], and the denominator D, for one optimiser step.

    ``token_mean``: every token alike, D = tokens (Yu et al. 2025). ``sequence_mean``: the mean over each trajectory, D =
    trajectories (Shao et al. 2024). ``constant``: every token alike, D = trajectories * constant_tokens (Liu et al. 2025).
    Invalid trajectories weigh 0 and count for nothing. D is at least 1.

    Args:
        tokens_S: trainable tokens of each trajectory of the step, all ranks together.
        valid_S: False for trajectories broken by a fault.
        algorithm: names the aggregation.
    """
    used_S = np.asarray(valid_S, dtype=bool) & (np.asarray(tokens_S) > 0)
    if algorithm.aggregation == "sequence_mean":
        return used_S / np.maximum(tokens_S, 1), max(float(used_S.sum()), 1.0)
    total = float(np.sum(tokens_S, where=used_S))
    if algorithm.aggregation == "constant":
        total = float(np.sum(valid_S)) * algorithm.constant_tokens
    return used_S.astype(np.float64), max(total, 1.0)


def needs_start_logprobs(algorithm: AlgorithmSection) -> bool:
    """Whether a step must compute the learner's log-probabilities of the whole batch before its first optimiser step."""
    several = algorithm.minibatches > 1 and algorithm.proximal == "recompute"
    in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    return several or in_reward or algorithm.advantage == "vtrace"


def _kl_term(batch: TokenBatch, algorithm: AlgorithmSection) -> Tensor:
    if algorithm.kl_coef == 0 or algorithm.kl_in != "loss":
        return torch.zeros_like(batch.behaviour_N)
    if batch.reference_N is None:
        raise SchemaError(f"reference_N must be given with algorithm.kl_coef = {algorithm.kl_coef}, got None")
    return algorithm.kl_coef * kl_estimate(batch.current_N, batch.reference_N, algorithm.kl_estimator)


def _entropy_term(batch: TokenBatch, algorithm: AlgorithmSection) -> Tensor:
    if algorithm.entropy_coef == 0:
        return torch.zeros_like(batch.behaviour_N)
    if batch.entropy_N is None:
        raise SchemaError(f"entropy_N must be given with algorithm.entropy_coef = {algorithm.entropy_coef}, got None")
    return -algorithm.entropy_coef * batch.entropy_N
