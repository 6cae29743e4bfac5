"""Losses against a slow NumPy version written from the papers; gradients against its finite differences, in float64.

The slow version takes what a paper puts under a stop-gradient from a second, frozen array of log-probabilities, so that finite
differences of the first see exactly the gradient the paper means.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_search_rl.config.learner import CORRECTIONS, LOSSES, AlgorithmSection
from async_search_rl.errors import ConfigError, SchemaError
from learner.loss_metrics import effective_share, loss_metrics
from learner.losses import TokenBatch, kl_estimate, loss_weights, needs_start_logprobs, policy_loss


def random_batch(seed: int, *, proximal: bool = True, per_sequence_advantage: bool = False) -> TokenBatch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 5, 4)
    sequence = np.repeat(np.arange(4), tokens)
    n = len(sequence)
    behaviour = -rng.exponential(1.0, n) - 0.1
    advantages = rng.standard_normal(4)[sequence] if per_sequence_advantage else rng.standard_normal(n)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return TokenBatch(
        current_N=tensor(behaviour + 0.4 * rng.standard_normal(n)),
        behaviour_N=tensor(behaviour),
        advantages_N=tensor(advantages),
        sequence_N=torch.tensor(sequence),
        sequences=4,
        weights_N=tensor((rng.random(4) + 0.5)[sequence]),
        proximal_N=tensor(behaviour + 0.3 * rng.standard_normal(n)) if proximal else None,
        entropy_N=tensor(rng.random(n)),
        reference_N=tensor(behaviour + 0.5 * rng.standard_normal(n)),
    )


def slow_correction(start: np.ndarray, batch: TokenBatch, a: AlgorithmSection) -> np.ndarray:
    difference = start - batch.behaviour_N.numpy()
    weights, sequence = np.ones(len(difference)), batch.sequence_N.tolist()
    for t in range(len(difference)):
        mates = [u for u in range(len(difference)) if sequence[u] == sequence[t]]
        ratio = {
            "token": lambda t=t: math.exp(difference[t]),
            "sequence": lambda mates=mates: math.prod(math.exp(difference[u]) for u in mates),
            "geometric": lambda mates=mates: math.prod(math.exp(difference[u]) for u in mates) ** (1 / len(mates)),
        }[a.correction_level]()
        if a.correction == "tis":
            weights[t] = min(ratio, a.correction_high)
        elif a.correction in ("mis", "icepop"):
            weights[t] = ratio if a.correction_low <= ratio <= a.correction_high else 0.0
    return weights


def slow_loss(current: np.ndarray, frozen: np.ndarray, batch: TokenBatch, a: AlgorithmSection) -> float:
    """The loss sum; ``frozen`` stands for ``current`` wherever no gradient flows."""
    if a.proximal == "behaviour":
        start = batch.behaviour_N.numpy()
    else:
        start = frozen if batch.proximal_N is None else batch.proximal_N.numpy()
    w, sequence = slow_correction(start, batch, a), batch.sequence_N.tolist()
    total = 0.0
    for t, advantage in enumerate(batch.advantages_N.tolist()):
        mates = [u for u in range(len(current)) if sequence[u] == sequence[t]]
        low, high = 1 - a.clip_low, 1 + a.clip_high
        r = math.exp(current[t] - start[t])
        if a.loss == "ppo":
            objective = min(r * advantage, min(max(r, low), high) * advantage)
            if a.dual_clip > 0 and advantage < 0:
                objective = max(objective, a.dual_clip * advantage)
        elif a.loss == "gspo":
            s = math.exp(sum(current[u] - start[u] for u in mates) / len(mates))
            objective = min(s * advantage, min(max(s, low), high) * advantage)
        elif a.loss == "cispo":
            objective = min(max(math.exp(frozen[t] - start[t]), low), high) * advantage * current[t]
        else:
            objective = advantage * current[t]
        loss = -w[t] * objective
        if a.kl_coef > 0 and a.kl_in == "loss":
            q = float(batch.reference_N[t]) - current[t]
            loss += a.kl_coef * {"k1": -q, "k2": q * q / 2, "k3": math.exp(q) - 1 - q}[a.kl_estimator]
        if a.entropy_coef > 0:
            loss -= a.entropy_coef * float(batch.entropy_N[t])
        total += float(batch.weights_N[t]) * loss
    return total


def finite_differences(batch: TokenBatch, a: AlgorithmSection, step: float = 1e-6) -> np.ndarray:
    current = batch.current_N.detach().numpy()
    gradient = np.zeros_like(current)
    for t in range(len(current)):
        up, down = current.copy(), current.copy()
        up[t], down[t] = up[t] + step, down[t] - step
        gradient[t] = (slow_loss(up, current, batch, a) - slow_loss(down, current, batch, a)) / (2 * step)
    return gradient


def loss_and_gradient(batch: TokenBatch, a: AlgorithmSection) -> tuple[float, np.ndarray]:
    current = batch.current_N.detach().clone().requires_grad_(True)
    result = policy_loss(replace(batch, current_N=current), a)
    result.loss.backward()
    return result.loss.item(), current.grad.numpy()


def totals(batch: TokenBatch, a: AlgorithmSection) -> dict[str, float]:
    return {name: value.item() for name, value in policy_loss(batch, a).sums.items()}


@given(
    seed=st.integers(0, 10_000),
    loss=st.sampled_from(sorted(LOSSES)),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    proximal=st.sampled_from(["start", "current", "behaviour"]),
    dual_clip=st.sampled_from([0.0, 1.1, 3.0]),
    kl=st.sampled_from([None, "k1", "k2", "k3"]),
    entropy=st.sampled_from([0.0, 0.01]),
)
@settings(max_examples=80, deadline=None)
def test_every_loss_and_its_gradient_follow_the_papers(seed, loss, correction, level, proximal, dual_clip, kl, entropy) -> None:
    # GSPO's weights are of the trajectory (the configuration refuses others), and its advantages too.
    level = "geometric" if loss == "gspo" and level == "token" else level
    a = AlgorithmSection(
        loss=loss,
        correction="none" if proximal == "behaviour" else correction,
        correction_level=level,
        proximal="behaviour" if proximal == "behaviour" else "recompute",
        dual_clip=dual_clip,
        kl_coef=0.1 if kl else 0.0,
        kl_estimator=kl or "k3",
        entropy_coef=entropy,
    )
    batch = random_batch(seed, proximal=proximal == "start", per_sequence_advantage=loss == "gspo")
    value, gradient = loss_and_gradient(batch, a)
    current = batch.current_N.numpy()
    assert value == pytest.approx(slow_loss(current, current, batch, a), abs=1e-9)
    np.testing.assert_allclose(gradient, finite_differences(batch, a), atol=1e-6)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("advantages_of", ["trajectory", "token"])
def test_ratio_one_gives_the_on_policy_gradient(loss: str, advantages_of: str) -> None:
    batch = random_batch(7, per_sequence_advantage=advantages_of == "trajectory")
    same = replace(batch, behaviour_N=batch.current_N.clone(), proximal_N=batch.current_N.clone())
    for correction in CORRECTIONS:
        a = AlgorithmSection(loss=loss, correction=correction, correction_level="geometric")
        np.testing.assert_allclose(loss_and_gradient(same, a)[1], -(batch.weights_N * batch.advantages_N).numpy(), atol=1e-12)


def test_gspo_with_token_advantages_is_gspo_token() -> None:
    batch, a = random_batch(9), AlgorithmSection(loss="gspo", correction="none", clip_low=0.1, clip_high=0.1)
    expected = np.zeros(len(batch.current_N))
    for s in range(batch.sequences):
        members = (batch.sequence_N == s).numpy()
        ratio = math.exp((batch.current_N - batch.proximal_N).numpy()[members].mean())
        for t in np.flatnonzero(members):
            advantage = float(batch.advantages_N[t])
            clipped = (advantage > 0 and ratio > 1.1) or (advantage < 0 and ratio < 0.9)
            expected[t] = 0.0 if clipped else -float(batch.weights_N[t]) * ratio * advantage
    np.testing.assert_allclose(loss_and_gradient(batch, a)[1], expected, atol=1e-12)
    assert (expected == 0).any()
    assert (expected != 0).any()


@given(seed=st.integers(0, 1000), loss=st.sampled_from(sorted(LOSSES)), correction=st.sampled_from(sorted(CORRECTIONS)))
@settings(max_examples=30, deadline=None)
def test_splitting_the_batch_into_micro_batches_changes_nothing(seed: int, loss: str, correction: str) -> None:
    a = AlgorithmSection(loss=loss, correction=correction, correction_level="sequence", kl_coef=0.1)
    whole = random_batch(seed)
    value, gradient = loss_and_gradient(whole, a)
    parts_value, parts_gradient, parts_totals = 0.0, np.zeros_like(gradient), dict.fromkeys(totals(whole, a), 0.0)
    for members in ([2, 0], [3], [1]):
        index = torch.cat([torch.nonzero(whole.sequence_N == s)[:, 0] for s in members])
        part = TokenBatch(
            **{
                name: getattr(whole, name)[index]
                for name in ("current_N", "behaviour_N", "advantages_N", "weights_N", "proximal_N", "entropy_N", "reference_N")
            },
            sequence_N=torch.repeat_interleave(torch.arange(len(members)), torch.bincount(whole.sequence_N)[members]),
            sequences=len(members),
        )
        part_value, part_gradient = loss_and_gradient(part, a)
        parts_value += part_value
        parts_gradient[index.numpy()] += part_gradient
        parts_totals = {name: parts_totals[name] + x for name, x in totals(part, a).items()}
    assert parts_value == pytest.approx(value, abs=1e-12)
    np.testing.assert_allclose(parts_gradient, gradient, atol=1e-12)
    assert parts_totals == pytest.approx(totals(whole, a))


def test_tokens_of_weight_zero_change_nothing() -> None:
    batch = random_batch(11)
    last = batch.sequence_N == 3
    masked = replace(batch, weights_N=torch.where(last, 0.0, batch.weights_N))
    noisy = replace(masked, advantages_N=masked.advantages_N + 9.0 * last, behaviour_N=masked.behaviour_N - 2.0 * last)
    a = AlgorithmSection(correction="tis", kl_coef=0.1)
    assert loss_and_gradient(masked, a)[0] == loss_and_gradient(noisy, a)[0]
    assert not loss_and_gradient(masked, a)[1][last.numpy()].any()
    assert totals(masked, a) == totals(noisy, a)


def test_an_empty_micro_batch_gives_zero_with_a_gradient() -> None:
    current = torch.zeros(0, requires_grad=True)
    empty = TokenBatch(current, *[torch.zeros(0)] * 2, torch.zeros(0, dtype=torch.int64), 0, torch.zeros(0))
    for loss in LOSSES:
        result = policy_loss(empty, AlgorithmSection(loss=loss, correction_level="sequence"))
        result.loss.backward()
        assert result.loss.item() == 0.0
    assert current.grad is not None


def test_extreme_ratios_give_finite_gradients() -> None:
    batch = random_batch(5)
    far = replace(batch, current_N=batch.current_N + 500.0, proximal_N=batch.proximal_N - 500.0)
    for loss in LOSSES:
        value, gradient = loss_and_gradient(far, AlgorithmSection(loss=loss, kl_coef=0.1))
        assert math.isfinite(value)
        assert np.isfinite(gradient).all()


@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_masking_by_the_correction_does_not_change_the_denominator(seed: int) -> None:
    batch = random_batch(seed)
    a = AlgorithmSection(correction="mis", correction_low=0.9, correction_high=1.1)
    kept = torch.tensor(slow_correction(batch.proximal_N.numpy(), batch, a)) > 0
    plain = policy_loss(batch, AlgorithmSection(correction="tis", correction_high=1e9)).loss
    outside = policy_loss(
        replace(batch, weights_N=batch.weights_N * ~kept), AlgorithmSection(correction="tis", correction_high=1e9)
    ).loss
    assert policy_loss(batch, a).loss.item() == pytest.approx((plain - outside).item(), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_their_expectation(estimator: str) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    estimate = (p * kl_estimate(p.log(), q.log(), estimator)).sum().item()
    assert estimate == pytest.approx(exact, rel=0.05 if estimator == "k2" else 1e-9)


def test_aggregation_weights_and_denominators() -> None:
    tokens, valid = np.array([2, 4, 0, 3]), np.array([True, True, True, False])
    weights, denominator = loss_weights(tokens, valid, AlgorithmSection(aggregation="token_mean"))
    assert (weights.tolist(), denominator) == ([1, 1, 0, 0], 6.0)
    weights, denominator = loss_weights(tokens, valid, AlgorithmSection(aggregation="sequence_mean"))
    assert (weights.tolist(), denominator) == ([0.5, 0.25, 0, 0], 2.0)
    weights, denominator = loss_weights(tokens, valid, AlgorithmSection(aggregation="constant", constant_tokens=10))
    assert (weights.tolist(), denominator) == ([1, 1, 0, 0], 30.0)
    assert loss_weights(tokens, np.zeros(4, bool), AlgorithmSection())[1] == 1.0


def test_metrics_of_one_mini_batch_say_that_clipping_is_inert() -> None:
    batch = random_batch(2, proximal=False)
    metrics = loss_metrics(totals(batch, AlgorithmSection(correction="none")), 1.0)
    assert metrics["clip_active"] == 0.0
    assert metrics["clip_fraction"] == 0.0
    assert loss_metrics(totals(random_batch(2), AlgorithmSection(correction="none")), 1.0)["clip_active"] == 1.0


def test_metrics_follow_their_definitions() -> None:
    batch = random_batch(3)
    a = AlgorithmSection(correction="mis", correction_low=0.8, correction_high=1.2, kl_coef=0.2, clip_low=0.1, clip_high=0.1)
    result = policy_loss(batch, a)
    metrics = loss_metrics({name: value.item() for name, value in result.sums.items()}, 5.0)
    w = slow_correction(batch.proximal_N.numpy(), batch, a)
    r = np.exp((batch.current_N - batch.proximal_N).numpy())
    off_policy = np.exp((batch.current_N - batch.behaviour_N).numpy())
    advantage = batch.advantages_N.numpy()
    clipped = ((advantage > 0) & (r > 1.1)) | ((advantage < 0) & (r < 0.9))
    assert metrics["loss"] == pytest.approx(result.loss.item() / 5.0)
    assert metrics["mask_fraction"] == pytest.approx((w == 0).mean())
    assert metrics["weight_mean"] == pytest.approx(w.mean())
    assert metrics["ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    assert metrics["ratio_ess"] == pytest.approx(off_policy.sum() ** 2 / (len(w) * (off_policy**2).sum()))
    assert metrics["clip_fraction"] == pytest.approx(clipped.mean())
    assert metrics["clip_low_fraction"] == pytest.approx((clipped & (r < 1)).mean())
    assert metrics["kl_behaviour"] == pytest.approx((off_policy - 1 - np.log(off_policy)).mean())
    assert metrics["entropy"] == pytest.approx(batch.entropy_N.mean().item())
    assert metrics["advantage_std"] == pytest.approx(advantage.std())


def test_truncation_is_counted_for_tis_only() -> None:
    batch = random_batch(4)
    ratio = np.exp((batch.proximal_N - batch.behaviour_N).numpy())
    capped = loss_metrics(totals(batch, AlgorithmSection(correction="tis", correction_high=1.1)), 1.0)
    assert capped["truncated_fraction"] == pytest.approx((ratio > 1.1).mean())
    assert loss_metrics(totals(batch, AlgorithmSection(correction="none")), 1.0)["truncated_fraction"] == 0.0


def test_every_algorithm_reports_the_same_keys() -> None:
    keys = {
        tuple(totals(random_batch(1, proximal=False), AlgorithmSection(loss=loss, correction=correction)))
        for loss in LOSSES
        for correction in CORRECTIONS
    }
    assert len(keys) == 1


def test_weights_that_are_all_zero_have_no_effective_sample() -> None:
    assert effective_share(0.0, 0.0, 4.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"minibatches": 2}, True),
        ({"minibatches": 2, "proximal": "behaviour"}, False),
        ({"kl_coef": 0.1, "kl_in": "reward"}, True),
        ({"kl_coef": 0.1}, False),
        ({"advantage": "vtrace"}, True),
    ],
)
def test_when_the_start_of_step_pass_is_needed(changes: dict, needed: bool) -> None:
    assert needs_start_logprobs(AlgorithmSection(**changes)) is needed


@pytest.mark.parametrize(("key", "field"), [("kl_coef", "reference_N"), ("entropy_coef", "entropy_N")])
def test_a_missing_tensor_is_named(key: str, field: str) -> None:
    with pytest.raises(SchemaError, match=f"{field} must be given"):
        policy_loss(replace(random_batch(0), **{field: None}), AlgorithmSection(**{key: 0.1}))


@pytest.mark.parametrize("key", ["loss", "correction"])
def test_unknown_names_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key} must be one of .*, got 'best'"):
        policy_loss(random_batch(0), AlgorithmSection(**{key: "best"}))


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ConfigError, match="importable function, got 'nowhere:best'"):
        policy_loss(random_batch(0), AlgorithmSection(loss="nowhere:best"))
