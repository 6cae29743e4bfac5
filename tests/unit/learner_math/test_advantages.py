"""Advantage estimators against slow versions written from the papers, one trajectory and one token at a time."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_search_rl.config.learner import ADVANTAGES, AlgorithmSection
from async_search_rl.errors import ConfigError, SchemaError
from learner.advantages import AdvantageInputs, compute_advantages, kl_rewards, reverse_scan, whiten


def random_inputs(seed: int, *, critic: bool = True, token_rewards: bool = True, sequences: int = 9) -> AdvantageInputs:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 6, sequences)
    n = int(tokens.sum())
    behaviour = -rng.exponential(1.0, n)
    return AdvantageInputs(
        rewards_S=rng.integers(0, 3, sequences) / 2,
        group_ids_S=rng.permutation(np.arange(sequences) % 3),
        valid_S=rng.random(sequences) < 0.8,
        tokens_S=tokens,
        token_rewards_N=0.1 * rng.standard_normal(n) if token_rewards else None,
        values_N=rng.standard_normal(n) if critic else None,
        behaviour_logprobs_N=behaviour,
        target_logprobs_N=behaviour + 0.7 * rng.standard_normal(n),
    )


def per_trajectory(inputs: AdvantageInputs, flat: np.ndarray) -> list[np.ndarray]:
    return np.split(np.asarray(flat, dtype=float), np.cumsum(inputs.tokens_S)[:-1])


def slow_token_rewards(inputs: AdvantageInputs) -> list[list[float]]:
    extra = inputs.token_rewards_N if inputs.token_rewards_N is not None else np.zeros(int(np.sum(inputs.tokens_S)))
    rewards = [list(part) for part in per_trajectory(inputs, extra)]
    for part, final in zip(rewards, inputs.rewards_S, strict=True):
        if part:
            part[-1] += final
    return rewards


def slow_group(inputs: AdvantageInputs, name: str) -> list[np.ndarray]:
    extra = inputs.token_rewards_N if inputs.token_rewards_N is not None else np.zeros(int(np.sum(inputs.tokens_S)))
    outcomes = [r + sum(part) for r, part in zip(inputs.rewards_S, per_trajectory(inputs, extra), strict=True)]
    result = []
    for i, tokens in enumerate(inputs.tokens_S):
        mates = [j for j in range(len(outcomes)) if inputs.group_ids_S[j] == inputs.group_ids_S[i] and inputs.valid_S[j]]
        advantage = 0.0
        if inputs.valid_S[i] and len(mates) > 1:
            mean = sum(outcomes[j] for j in mates) / len(mates)
            if name == "rloo":
                others = [outcomes[j] for j in mates if j != i]
                advantage = outcomes[i] - sum(others) / len(others)
            else:
                advantage = outcomes[i] - mean
            if name == "grpo":
                std = math.sqrt(sum((outcomes[j] - mean) ** 2 for j in mates) / (len(mates) - 1))
                advantage /= std + 1e-6
        result.append(np.full(tokens, advantage))
    return result


def slow_gae(inputs: AdvantageInputs, gamma: float, lam: float) -> list[np.ndarray]:
    result = []
    for rewards, values in zip(slow_token_rewards(inputs), per_trajectory(inputs, inputs.values_N), strict=True):
        deltas = [r + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, r in enumerate(rewards)]
        result.append(np.array([sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]))
    return result


def slow_vtrace(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> tuple[list[np.ndarray], list[np.ndarray]]:
    advantages, targets = [], []
    parts = zip(
        slow_token_rewards(inputs),
        per_trajectory(inputs, inputs.values_N),
        per_trajectory(inputs, np.exp(inputs.target_logprobs_N - inputs.behaviour_logprobs_N)),
        strict=True,
    )
    for rewards, values, ratios in parts:
        length = len(rewards)
        rho = [min(algorithm.rho_bar, x) for x in ratios]
        c = [algorithm.lam * min(algorithm.c_bar, x) for x in ratios]
        following = [*values[1:], 0.0]
        deltas = [rho[t] * (rewards[t] + algorithm.gamma * following[t] - values[t]) for t in range(length)]
        v = []
        for s in range(length):
            total = values[s]
            for t in range(s, length):
                total += algorithm.gamma ** (t - s) * math.prod(c[s:t]) * deltas[t]
            v.append(total)
        targets.append(np.array(v))
        advantages.append(np.array([rho[s] * (rewards[s] + algorithm.gamma * [*v, 0.0][s + 1] - values[s]) for s in range(length)]))
    return advantages, targets


def expected(inputs: AdvantageInputs, parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part if valid else 0 * part for part, valid in zip(parts, inputs.valid_S, strict=True)])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(seed=st.integers(0, 10_000), token_rewards=st.booleans())
@settings(max_examples=25, deadline=None)
def test_group_estimators_follow_their_papers(name: str, seed: int, token_rewards: bool) -> None:
    inputs = random_inputs(seed, token_rewards=token_rewards)
    result = compute_advantages(inputs, AlgorithmSection(advantage=name))
    np.testing.assert_allclose(result.advantages_N, expected(inputs, slow_group(inputs, name)), atol=1e-5)
    assert result.value_targets_N is None
    assert result.advantages_N.dtype == np.float32


@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
@settings(max_examples=25, deadline=None)
def test_gae_follows_its_paper(seed: int, gamma: float, lam: float) -> None:
    inputs = random_inputs(seed)
    result = compute_advantages(inputs, AlgorithmSection(advantage="gae", gamma=gamma, lam=lam))
    slow = slow_gae(inputs, gamma, lam)
    np.testing.assert_allclose(result.advantages_N, expected(inputs, slow), atol=1e-5)
    targets = [a + v for a, v in zip(slow, per_trajectory(inputs, inputs.values_N), strict=True)]
    np.testing.assert_allclose(result.value_targets_N, expected(inputs, targets), atol=1e-5)


@given(
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.9]),
    rho_bar=st.sampled_from([1.0, 1.5]),
    c_bar=st.sampled_from([0.8, 1.0]),
)
@settings(max_examples=25, deadline=None)
def test_vtrace_follows_its_paper(seed: int, gamma: float, lam: float, rho_bar: float, c_bar: float) -> None:
    inputs = random_inputs(seed)
    algorithm = AlgorithmSection(advantage="vtrace", gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar, correction="none")
    result = compute_advantages(inputs, algorithm)
    advantages, targets = slow_vtrace(inputs, algorithm)
    np.testing.assert_allclose(result.advantages_N, expected(inputs, advantages), atol=1e-5)
    np.testing.assert_allclose(result.value_targets_N, expected(inputs, targets), atol=1e-5)


@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]))
@settings(max_examples=25, deadline=None)
def test_reinforce_pp_is_the_return_whitened_over_valid_tokens(seed: int, gamma: float) -> None:
    inputs = random_inputs(seed)
    returns = [
        np.array([sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))])
        for rewards in slow_token_rewards(inputs)
    ]
    used = [part for part, valid in zip(returns, inputs.valid_S, strict=True) if valid]
    pool = np.concatenate(used) if used else np.zeros(0)
    result = compute_advantages(inputs, AlgorithmSection(advantage="reinforce_pp", gamma=gamma)).advantages_N
    if pool.size and pool.max() > pool.min():
        slow = expected(inputs, [(part - pool.mean()) / (pool.std() + 1e-6) for part in returns])
        np.testing.assert_allclose(result, slow, atol=1e-5)
    else:
        assert not result.any()


@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(ADVANTAGES)))
@settings(max_examples=40, deadline=None)
def test_the_order_of_trajectories_changes_nothing(seed: int, name: str) -> None:
    inputs = random_inputs(seed)
    order = np.random.default_rng(seed + 1).permutation(len(inputs.rewards_S))

    def shuffled(flat: np.ndarray) -> np.ndarray:
        return np.concatenate([per_trajectory(inputs, flat)[i] for i in order])

    moved = AdvantageInputs(
        **{key: getattr(inputs, key)[order] for key in ("rewards_S", "group_ids_S", "valid_S", "tokens_S")},
        **{
            key: shuffled(getattr(inputs, key))
            for key in ("token_rewards_N", "values_N", "behaviour_logprobs_N", "target_logprobs_N")
        },
    )
    algorithm = AlgorithmSection(advantage=name, lam=0.9)
    here, there = compute_advantages(inputs, algorithm), compute_advantages(moved, algorithm)
    np.testing.assert_allclose(there.advantages_N, shuffled(here.advantages_N), atol=1e-5)


@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(ADVANTAGES)), whitened=st.booleans())
@settings(max_examples=40, deadline=None)
def test_invalid_trajectories_change_nothing_elsewhere(seed: int, name: str, whitened: bool) -> None:
    inputs = random_inputs(seed)
    invalid_N = ~inputs.valid_N
    broken = AdvantageInputs(
        rewards_S=np.where(inputs.valid_S, inputs.rewards_S, np.nan),
        group_ids_S=inputs.group_ids_S,
        valid_S=inputs.valid_S,
        tokens_S=inputs.tokens_S,
        token_rewards_N=inputs.token_rewards_N + 5.0 * invalid_N,
        values_N=inputs.values_N - 3.0 * invalid_N,
        behaviour_logprobs_N=inputs.behaviour_logprobs_N,
        target_logprobs_N=inputs.target_logprobs_N + 1.0 * invalid_N,
    )
    algorithm = AlgorithmSection(advantage=name, whiten=whitened)
    here, there = compute_advantages(inputs, algorithm), compute_advantages(broken, algorithm)
    np.testing.assert_array_equal(here.advantages_N, there.advantages_N)
    assert not here.advantages_N[invalid_N].any()


def test_with_gamma_and_lambda_one_the_advantage_is_reward_minus_value() -> None:
    inputs = random_inputs(3, token_rewards=False)
    result = compute_advantages(inputs, AlgorithmSection(advantage="gae"))
    reward_N = np.repeat(inputs.rewards_S, inputs.tokens_S)
    np.testing.assert_allclose(result.advantages_N, np.where(inputs.valid_N, reward_N - inputs.values_N, 0), atol=1e-5)
    np.testing.assert_allclose(result.value_targets_N, np.where(inputs.valid_N, reward_N, 0), atol=1e-5)


def test_vtrace_on_policy_equals_gae_with_lambda_one() -> None:
    inputs = random_inputs(4)
    on_policy = AdvantageInputs(**{**vars(inputs), "target_logprobs_N": inputs.behaviour_logprobs_N})
    vtrace = compute_advantages(on_policy, AlgorithmSection(advantage="vtrace", gamma=0.9))
    gae = compute_advantages(on_policy, AlgorithmSection(advantage="gae", gamma=0.9, lam=1.0))
    np.testing.assert_allclose(vtrace.advantages_N, gae.advantages_N, atol=1e-5)
    np.testing.assert_allclose(vtrace.value_targets_N, gae.value_targets_N, atol=1e-5)


def test_extreme_ratios_do_not_overflow_vtrace() -> None:
    inputs = AdvantageInputs(
        np.ones(1), np.zeros(1), np.ones(1, bool), np.array([2]), None, np.zeros(2), np.full(2, -2000.0), np.zeros(2)
    )
    result = compute_advantages(inputs, AlgorithmSection(advantage="vtrace"))
    np.testing.assert_allclose(result.advantages_N, [1.0, 1.0])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    inputs = AdvantageInputs(np.full(3, 0.1), np.array(["a", "a", "a"]), np.ones(3, bool), np.array([1, 2, 3]))
    assert not compute_advantages(inputs, AlgorithmSection(advantage=name)).advantages_N.any()


def test_whitened_advantages_have_mean_zero_and_variance_one_over_valid_tokens() -> None:
    inputs = random_inputs(5)
    result = compute_advantages(inputs, AlgorithmSection(advantage="gae", whiten=True)).advantages_N[inputs.valid_N]
    assert abs(result.mean()) < 1e-6
    assert result.std() == pytest.approx(1.0, abs=1e-4)


def test_whitening_nothing_gives_zeros() -> None:
    np.testing.assert_array_equal(whiten(np.array([1.0, 2.0]), np.zeros(2, bool)), [0.0, 0.0])


def test_an_empty_batch_has_no_advantages() -> None:
    empty = AdvantageInputs(np.zeros(0), np.zeros(0, int), np.zeros(0, bool), np.zeros(0, int), values_N=np.zeros(0))
    for name in ("grpo", "reinforce_pp", "gae"):
        assert compute_advantages(empty, AlgorithmSection(advantage=name)).advantages_N.shape == (0,)


def test_reverse_scan_stops_at_the_end_of_each_trajectory() -> None:
    np.testing.assert_allclose(reverse_scan(np.array([1.0, 1.0, 1.0]), 0.5, np.array([2, 0, 1])), [1.5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("estimator", "slow"), [("k1", lambda q: -q), ("k2", lambda q: q * q / 2), ("k3", lambda q: math.exp(q) - 1 - q)]
)
def test_kl_rewards_are_minus_the_estimate(estimator: str, slow) -> None:
    current, reference = np.array([-1.0, -0.3]), np.array([-0.5, -2.0])
    rewards = kl_rewards(current, reference, AlgorithmSection(kl_coef=0.1, kl_in="reward", kl_estimator=estimator))
    np.testing.assert_allclose(rewards, [-0.1 * slow(r - c) for c, r in zip(current, reference, strict=True)])


def test_an_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage must be one of grpo.*got 'best'"):
        compute_advantages(random_inputs(0), AlgorithmSection(advantage="best"))


@pytest.mark.parametrize(
    ("name", "missing"), [("gae", "values_N"), ("vtrace", "behaviour_logprobs_N"), ("vtrace", "target_logprobs_N")]
)
def test_a_missing_array_is_named(name: str, missing: str) -> None:
    inputs = AdvantageInputs(**{**vars(random_inputs(0)), missing: None})
    with pytest.raises(SchemaError, match=f"{missing} must be given"):
        compute_advantages(inputs, AlgorithmSection(advantage=name))


@pytest.mark.parametrize("name", ["valid_S", "values_N"])
def test_arrays_of_the_wrong_length_are_refused(name: str) -> None:
    with pytest.raises(SchemaError, match=name):
        AdvantageInputs(**{**vars(random_inputs(0)), name: np.zeros(1)})
