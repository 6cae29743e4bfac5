"""Advantage estimators: from the rewards of a whole batch to one advantage per trainable token.

In: the batch of all ranks (statistics are over the whole batch, never over one rank's share), as flat NumPy arrays.
Out: advantages, and value targets where there is a critic. No torch, no I/O.

Legend: S trajectories, N trainable tokens of all trajectories one after the other in the order of the trajectories;
``tokens_S`` says how many belong to each. Environment tokens do not appear, so "the next token" is always the next
trainable one. The terminal reward belongs to a trajectory's last trainable token; the state after it has value 0.

A new estimator is a function ``(AdvantageInputs, AlgorithmSection) -> Advantages`` and an entry in
:data:`async_search_rl.config.learner.ADVANTAGES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from async_search_rl.config.learner import ADVANTAGES, AlgorithmSection
from async_search_rl.errors import SchemaError
from learner.registry import resolve

Array = npt.NDArray[Any]

STD_EPSILON = 1e-6


@dataclass(frozen=True)
class AdvantageInputs:
    """A batch as the estimators see it. Floating arrays of any precision; the arithmetic is float64."""

    rewards_S: Array
    """Final reward of each trajectory."""
    group_ids_S: Array
    """Group of each trajectory, any sortable dtype; members need not be neighbours."""
    valid_S: Array
    """False for trajectories broken by a fault: they enter no statistic and get advantage 0."""
    tokens_S: Array
    """Trainable tokens of each trajectory, >= 0."""
    token_rewards_N: Array | None = None
    """Rewards beside the final one, such as a KL penalty; None: none."""
    values_N: Array | None = None
    """V(s_t) of each trainable token's state, read at the position before the token; `gae` and `vtrace` need it."""
    behaviour_logprobs_N: Array | None = None
    """Log-probabilities under the policy that sampled; `vtrace` needs them."""
    target_logprobs_N: Array | None = None
    """Log-probabilities under the learner's policy at the start of the step; `vtrace` needs them."""

    def __post_init__(self) -> None:
        sequences = len(self.rewards_S)
        for name in ("group_ids_S", "valid_S", "tokens_S"):
            if len(getattr(self, name)) != sequences:
                raise SchemaError(f"{name} must have the length of rewards_S ({sequences}), got {len(getattr(self, name))}")
        for name in ("token_rewards_N", "values_N", "behaviour_logprobs_N", "target_logprobs_N"):
            value = getattr(self, name)
            if value is not None and len(value) != self.total_tokens:
                raise SchemaError(f"{name} must have one entry per trainable token ({self.total_tokens}), got {len(value)}")

    @property
    def total_tokens(self) -> int:
        """N."""
        return int(np.sum(self.tokens_S))

    @property
    def valid_N(self) -> Array:
        """Whether each token's trajectory is valid, bool[N]."""
        return np.repeat(np.asarray(self.valid_S, dtype=bool), self.tokens_S)

    @property
    def outcomes_S(self) -> Array:
        """Final reward plus all token rewards of each trajectory, float64[S]: what outcome-based estimators compare."""
        outcomes_S = np.asarray(self.rewards_S, dtype=np.float64)
        if self.token_rewards_N is None:
            return outcomes_S
        sequence_N = np.repeat(np.arange(len(outcomes_S)), self.tokens_S)
        return outcomes_S + np.bincount(sequence_N, weights=self.token_rewards_N, minlength=len(outcomes_S))

    @property
    def rewards_N(self) -> Array:
        """Reward of each token, the final one on the last trainable token, float64[N]."""
        rewards_N = (
            np.zeros(self.total_tokens) if self.token_rewards_N is None else np.array(self.token_rewards_N, dtype=np.float64)
        )
        ends_S = np.cumsum(self.tokens_S)
        some_S = np.asarray(self.tokens_S) > 0
        rewards_N[ends_S[some_S] - 1] += np.asarray(self.rewards_S, dtype=np.float64)[some_S]
        return rewards_N


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns; entries of invalid trajectories are 0."""

    advantages_N: Array
    """float32[N]."""
    value_targets_N: Array | None = None
    """float32[N], what the critic is trained towards; None without a critic."""


Estimator = Callable[[AdvantageInputs, AlgorithmSection], Advantages]


def compute_advantages(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> Advantages:
    """Advantages by ``algorithm.advantage``, whitened where ``algorithm.whiten`` asks for it.

    Raises:
        ConfigError: for a name that stands for no function.
        SchemaError: when the estimator needs an array that is missing.
    """
    estimate: Estimator = resolve(ADVANTAGES, algorithm.advantage, "algorithm.advantage")
    result = estimate(inputs, algorithm)
    valid_N = inputs.valid_N
    advantages_N = whiten(result.advantages_N, valid_N) if algorithm.whiten else result.advantages_N
    targets_N = result.value_targets_N
    return Advantages(
        np.where(valid_N, advantages_N, 0.0).astype(np.float32),
        None if targets_N is None else np.where(valid_N, targets_N, 0.0).astype(np.float32),
    )


def grpo(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> Advantages:
    """``(R - mean) / (std + 1e-6)`` over the valid members of the group, std with n - 1 (Shao et al. 2024, DeepSeekMath)."""
    centred_S, count_S, group_S = _centre(inputs)
    square_S = np.where(inputs.valid_S, centred_S, 0.0) ** 2
    variance_S = np.bincount(group_S, weights=square_S)[group_S] / np.maximum(count_S - 1, 1)
    return _per_token(centred_S / (np.sqrt(variance_S) + STD_EPSILON), inputs)


def dr_grpo(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> Advantages:
    """``R - mean`` over the valid members of the group (Liu et al. 2025, Understanding R1-Zero-Like Training)."""
    return _per_token(_centre(inputs)[0], inputs)


def rloo(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> Advantages:
    """``R`` minus the mean of the group's other valid members (Kool et al. 2019; Ahmadian et al. 2024)."""
    centred_S, count_S, _ = _centre(inputs)
    return _per_token(centred_S * count_S / np.maximum(count_S - 1, 1), inputs)


def reinforce_pp(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> Advantages:
    """Discounted return of each token, whitened over the trainable tokens of the batch (Hu 2025, REINFORCE++)."""
    returns_N = reverse_scan(inputs.rewards_N, algorithm.gamma, inputs.tokens_S)
    return Advantages(whiten(returns_N, inputs.valid_N))


def gae(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016); value targets are ``A + V``.

    ``delta_t = r_t + gamma V(s_t+1) - V(s_t)`` and ``A_t = delta_t + gamma lambda A_t+1``.
    """
    values_N = _needed(inputs.values_N, "values_N", "gae")
    deltas_N = inputs.rewards_N + algorithm.gamma * _following(values_N, inputs.tokens_S) - values_N
    advantages_N = reverse_scan(deltas_N, algorithm.gamma * algorithm.lam, inputs.tokens_S)
    return Advantages(advantages_N, advantages_N + values_N)


def vtrace(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> Advantages:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, IMPALA).

    ``rho_t = min(rho_bar, pi/mu)``, ``c_t = lambda min(c_bar, pi/mu)``,
    ``v_t = V_t + rho_t (r_t + gamma V_t+1 - V_t) + gamma c_t (v_t+1 - V_t+1)`` and ``A_t = rho_t (r_t + gamma v_t+1 - V_t)``.
    The advantage carries the importance weight already: no other correction may be applied to it.
    """
    values_N = _needed(inputs.values_N, "values_N", "vtrace")
    behaviour_N = _needed(inputs.behaviour_logprobs_N, "behaviour_logprobs_N", "vtrace")
    log_ratio_N = _needed(inputs.target_logprobs_N, "target_logprobs_N", "vtrace") - behaviour_N
    rho_N = np.exp(np.minimum(log_ratio_N, math.log(algorithm.rho_bar)))
    c_N = algorithm.lam * np.exp(np.minimum(log_ratio_N, math.log(algorithm.c_bar)))
    rewards_N, gamma = inputs.rewards_N, algorithm.gamma
    deltas_N = rho_N * (rewards_N + gamma * _following(values_N, inputs.tokens_S) - values_N)
    targets_N = values_N + reverse_scan(deltas_N, gamma * c_N, inputs.tokens_S)
    advantages_N = rho_N * (rewards_N + gamma * _following(targets_N, inputs.tokens_S) - values_N)
    return Advantages(advantages_N, targets_N)


def kl_rewards(current_N: Array, reference_N: Array, algorithm: AlgorithmSection) -> Array:
    """Token rewards ``-kl_coef * KL`` of ``kl_in = "reward"``, float64[N], by ``algorithm.kl_estimator`` (Schulman 2020).

    ``current_N`` and ``reference_N`` are log-probabilities of the sampled tokens under the learner's policy at the start of
    the step and under the reference policy.
    """
    q_N = np.asarray(reference_N, dtype=np.float64) - np.asarray(current_N, dtype=np.float64)
    if algorithm.kl_estimator == "k1":
        return algorithm.kl_coef * q_N
    if algorithm.kl_estimator == "k2":
        return -algorithm.kl_coef * 0.5 * q_N**2
    return -algorithm.kl_coef * (np.expm1(np.clip(q_N, -20.0, 20.0)) - q_N)


def whiten(values_N: Array, include_N: Array) -> Array:
    """``values_N`` shifted and scaled to mean 0 and variance 1 over the entries where ``include_N``; float64[N]."""
    values_N = np.asarray(values_N, dtype=np.float64)
    included = values_N[include_N]
    if included.size == 0 or included.min() == included.max():
        return np.zeros_like(values_N)
    whitened_N: Array = (values_N - included.mean()) / (included.std() + STD_EPSILON)
    return whitened_N


def reverse_scan(x_N: Array, coefficient_N: Array | float, tokens_S: Array) -> Array:
    """``y_t = x_t + coefficient_t * y_t+1`` within each trajectory, ``y`` after its end being 0; float64[N].

    Steps through time for all trajectories at once, so the cost is that of the longest one.
    """
    tokens_S = np.asarray(tokens_S, dtype=np.int64)
    longest = int(tokens_S.max(initial=0))
    starts_S = np.cumsum(tokens_S) - tokens_S
    sequence_N = np.repeat(np.arange(len(tokens_S)), tokens_S)
    from_end_N = np.repeat(tokens_S, tokens_S) - 1 - (np.arange(len(sequence_N)) - starts_S[sequence_N])
    x_TS = np.zeros((longest, len(tokens_S)))
    coefficient_TS = np.zeros((longest, len(tokens_S)))
    x_TS[from_end_N, sequence_N] = x_N
    coefficient_TS[from_end_N, sequence_N] = coefficient_N
    for t in range(1, longest):
        x_TS[t] += coefficient_TS[t] * x_TS[t - 1]
    scanned_N: Array = x_TS[from_end_N, sequence_N]
    return scanned_N


def _following(values_N: Array, tokens_S: Array) -> Array:
    """Value of the next trainable token's state in the same trajectory, 0 after the last one."""
    following_N = np.zeros(len(values_N))
    following_N[:-1] = values_N[1:]
    ends_S = np.cumsum(tokens_S)
    following_N[ends_S[np.asarray(tokens_S) > 0] - 1] = 0.0
    return following_N


def _centre(inputs: AdvantageInputs) -> tuple[Array, Array, Array]:
    """Outcomes minus the group's mean (0 in a group whose valid outcomes are all equal), valid members, group index; each [S]."""
    _, group_S = np.unique(np.asarray(inputs.group_ids_S), return_inverse=True)
    valid_S = np.asarray(inputs.valid_S, dtype=bool)
    outcomes_S = inputs.outcomes_S
    groups = int(group_S.max(initial=-1)) + 1
    count_G = np.bincount(group_S, weights=valid_S, minlength=groups)
    mean_G = np.bincount(group_S, weights=np.where(valid_S, outcomes_S, 0.0), minlength=groups) / np.maximum(count_G, 1)
    low_G, high_G = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low_G, group_S[valid_S], outcomes_S[valid_S])
    np.maximum.at(high_G, group_S[valid_S], outcomes_S[valid_S])
    differs_S = valid_S & (high_G > low_G)[group_S]
    return np.where(differs_S, outcomes_S - mean_G[group_S], 0.0), count_G[group_S], group_S


def _per_token(advantages_S: Array, inputs: AdvantageInputs) -> Advantages:
    return Advantages(np.repeat(advantages_S, inputs.tokens_S))


def _needed(array: Array | None, name: str, estimator: str) -> Array:
    if array is None:
        raise SchemaError(f"{name} must be given for algorithm.advantage = {estimator!r}, got None")
    return np.asarray(array, dtype=np.float64)
