"""Staged copies: complete, of the planned shape, at most two, and never the one being sent."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.errors import WeightSyncError
from async_search_rl.weights.plan import plan_buckets
from async_search_rl.weights.schema import TensorSpec
from async_search_rl.weights.staging import StagedWeights, StagingPool, tensor_views

SPECS = [
    TensorSpec(name="embedding", shape=(5, 3), dtype="bfloat16"),
    TensorSpec(name="norm", shape=(3,), dtype="float32"),
    TensorSpec(name="scale", shape=(), dtype="float32"),
]
PLAN = plan_buckets(SPECS, 1 << 10)
CPU = torch.device("cpu")


def new_pool() -> StagingPool:
    return StagingPool(threading.Condition(), CPU)


def fill(staged: StagedWeights, value: float = 1.0) -> StagedWeights:
    for spec in SPECS:
        staged.write(spec.name, torch.full(spec.shape, value))
    return staged


def publish(pool: StagingPool, version: int) -> StagedWeights:
    staged = fill(pool.acquire(PLAN, version), float(version))
    pool.submit(staged)
    return staged


def test_written_parameters_come_out_by_name_and_shape() -> None:
    staged = StagedWeights(PLAN, CPU)
    weights = {spec.name: torch.randn(spec.shape) for spec in SPECS}
    for name, tensor in weights.items():
        staged.write(name, tensor)
    staged.complete()
    staged.seal()
    for spec, view in tensor_views(staged.buckets, staged.flats):
        assert view.shape == spec.shape
        assert torch.equal(view, weights[spec.name].to(view.dtype))
    assert staged.nbytes == 5 * 3 * 2 + 4 * 4
    assert all(bucket.digest > 0 for bucket in staged.buckets)


def test_strangers_and_wrong_shapes_are_refused() -> None:
    staged = StagedWeights(PLAN, CPU)
    with pytest.raises(WeightSyncError, match="got 'bias'"):
        staged.write("bias", torch.zeros(3))
    with pytest.raises(WeightSyncError, match=r"shape of norm must be \(3,\) as planned, got \(4,\)"):
        staged.write("norm", torch.zeros(4))


def test_an_incomplete_copy_is_not_published() -> None:
    pool = new_pool()
    staged = pool.acquire(PLAN, 1)
    staged.write("norm", torch.zeros(3))
    with pytest.raises(WeightSyncError, match="all but 2: embedding, scale"):
        pool.submit(staged)
    assert pool.queued is None


def test_what_the_last_version_wrote_does_not_count_for_the_next() -> None:
    pool = new_pool()
    publish(pool, 1)
    pool.advance()
    publish(pool, 2)
    pool.advance()
    again = pool.acquire(PLAN, 3)
    with pytest.raises(WeightSyncError, match="all but 3"):
        pool.submit(again)


def test_a_queued_publication_gives_its_copy_up_for_a_newer_one() -> None:
    pool = new_pool()
    sent = publish(pool, 1)
    assert pool.advance() is sent
    second = publish(pool, 2)
    third = publish(pool, 3)
    assert third is second
    assert third is not sent
    assert pool.superseded == 1
    assert pool.advance().version == 3


def test_an_older_version_is_refused_even_with_a_higher_step() -> None:
    pool = new_pool()
    publish(pool, (2 << 32) | 0)
    with pytest.raises(WeightSyncError, match=r"newer than 2\.0, got 1\.9"):
        pool.acquire(PLAN, (1 << 32) | 9)


def test_only_the_last_acquired_copy_is_published() -> None:
    pool = new_pool()
    stray = fill(StagedWeights(PLAN, CPU))
    with pytest.raises(WeightSyncError, match="the last one that acquire_buffers gave"):
        pool.submit(stray)


def test_another_plan_gets_new_tensors() -> None:
    pool = new_pool()
    publish(pool, 1)
    other = plan_buckets(SPECS[:1], 1 << 10)
    assert pool.acquire(other, 2).fits(other)


@given(st.lists(st.sampled_from(["acquire", "publish", "advance"]), max_size=40))
def test_no_order_of_calls_touches_the_current_copy_or_makes_a_third(calls: list[str]) -> None:
    pool = new_pool()
    seen: set[int] = set()
    copies = []
    version = 0
    for call in calls:
        current, before = pool.current, None if pool.current is None else pool.current.version
        if call == "advance":
            if pool.queued is None:
                continue
            newest = pool.queued.version
            assert pool.advance().version == newest
            continue
        version += 1
        staged = fill(pool.acquire(PLAN, version))
        if call == "publish":
            pool.submit(staged)
            assert pool.queued is staged
        copies.append(staged)
        seen.add(id(staged))
        assert staged is not current
        assert pool.current is current
        assert before is None or (current is not None and current.version == before)
    assert len(seen) <= 2
