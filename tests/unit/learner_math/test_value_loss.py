"""The critic's loss against a slow version and finite differences."""

import numpy as np
import pytest
import torch

from learner.value_loss import ValueBatch, value_loss, value_metrics


def random_batch(seed: int, start: bool = True) -> ValueBatch:
    rng = np.random.default_rng(seed)
    values, targets, weights = rng.standard_normal(9), rng.standard_normal(9), rng.random(9)
    weights[4] = 0.0
    return ValueBatch(
        *(torch.tensor(x) for x in (values, targets, weights)), torch.tensor(values + rng.normal(0, 0.5, 9)) if start else None
    )


def slow(values: np.ndarray, batch: ValueBatch, clip: float) -> float:
    total = 0.0
    for t, v in enumerate(values):
        target, weight = float(batch.targets_N[t]), float(batch.weights_N[t])
        error = (v - target) ** 2
        if clip > 0 and batch.start_values_N is not None:
            old = float(batch.start_values_N[t])
            error = max(error, (min(max(v, old - clip), old + clip) - target) ** 2)
        total += weight * error / 2
    return total


@pytest.mark.parametrize("clip", [0.0, 0.2, 10.0])
@pytest.mark.parametrize("start", [True, False])
def test_loss_and_gradient(clip: float, start: bool) -> None:
    batch = random_batch(1, start)
    values = batch.values_N.numpy().copy()
    batch.values_N.requires_grad_(True)
    loss = value_loss(batch, clip).loss
    loss.backward()
    assert loss.item() == pytest.approx(slow(values, batch, clip))
    for t in range(len(values)):
        up, down = values.copy(), values.copy()
        up[t], down[t] = up[t] + 1e-6, down[t] - 1e-6
        assert batch.values_N.grad[t].item() == pytest.approx((slow(up, batch, clip) - slow(down, batch, clip)) / 2e-6, abs=1e-6)


def test_explained_variance_is_over_counted_tokens() -> None:
    batch = random_batch(2)
    metrics = value_metrics({name: x.item() for name, x in value_loss(batch, 0.0).sums.items()}, 3.0)
    counted = batch.weights_N.numpy() > 0
    targets, values = batch.targets_N.numpy()[counted], batch.values_N.numpy()[counted]
    assert metrics["explained_variance"] == pytest.approx(1 - np.var(targets - values) / np.var(targets))
    assert metrics["value_loss"] == pytest.approx(value_loss(batch, 0.0).loss.item() / 3.0)


def test_equal_targets_have_no_variance_to_explain() -> None:
    batch = ValueBatch(torch.zeros(3), torch.ones(3), torch.ones(3))
    totals = {name: x.item() for name, x in value_loss(batch, 0.0).sums.items()}
    assert value_metrics(totals, 1.0)["explained_variance"] == 0.0
