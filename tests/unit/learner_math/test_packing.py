"""Packing: nothing lost, budgets kept, ranks aligned and balanced, and little of the machine idle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_search_rl.errors import SchemaError
from learner.packing import pack, split_groups

BUDGET = 16384


def search_lengths(seed: int, count: int) -> list[int]:
    """Lengths like a search agent's: a prompt, then up to four turns of reasoning, each but the last followed by three passages."""
    rng = np.random.default_rng(seed)
    searches = rng.choice(5, size=count, p=[0.1, 0.35, 0.3, 0.15, 0.1])
    return [
        int(
            rng.normal(180, 30)
            + sum(rng.lognormal(4.5, 0.6) + 500 * rng.uniform(0.7, 1.0) for _ in range(s))
            + rng.lognormal(4.5, 0.8)
        )
        for s in searches
    ]


def long_tailed_lengths(seed: int, count: int) -> list[int]:
    return np.clip(np.random.default_rng(seed).lognormal(7.5, 0.8, count), 64, BUDGET // 2).astype(int).tolist()


def check_plan(plan, lengths: list[int], budget: int, ranks: int) -> None:
    assert len(plan.ranks) == ranks
    assert {len(rank) for rank in plan.ranks} == {plan.micro_batches}
    members = [i for rank in plan.ranks for micro_batch in rank for i in micro_batch]
    assert sorted(members) == list(range(len(lengths)))
    for rank in plan.ranks:
        for micro_batch in rank:
            tokens = sum(lengths[i] for i in micro_batch)
            assert tokens <= budget or len(micro_batch) == 1


@given(lengths=st.lists(st.integers(1, 300), max_size=60), budget=st.integers(1, 250), ranks=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_every_plan_keeps_its_promises(lengths: list[int], budget: int, ranks: int) -> None:
    plan = pack(lengths, budget, ranks)
    check_plan(plan, lengths, budget, ranks)
    assert plan.micro_batches >= 1
    assert 0 <= plan.padding < 1
    assert plan == pack(lengths, budget, ranks)


@pytest.mark.parametrize("distribution", [search_lengths, long_tailed_lengths])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("count", [256, 1024])
def test_padding_is_at_most_three_percent_on_real_distributions(distribution, ranks: int, count: int) -> None:
    for seed in range(3):
        lengths = distribution(seed, count)
        plan = pack(lengths, BUDGET, ranks)
        check_plan(plan, lengths, BUDGET, ranks)
        assert plan.padding <= 0.03
        assert plan.imbalance <= 0.07


@pytest.mark.parametrize("distribution", [search_lengths, long_tailed_lengths])
def test_ranks_are_balanced_on_tokens_and_on_their_squares(distribution) -> None:
    lengths = distribution(0, 512)
    plan = pack(lengths, BUDGET, 8)
    for power, tolerance in ((1, 1.04), (2, 1.08)):
        loads = [sum(lengths[i] ** power for micro_batch in rank for i in micro_batch) for rank in plan.ranks]
        assert max(loads) / np.mean(loads) <= tolerance


def test_few_micro_batches_are_made() -> None:
    lengths = search_lengths(1, 512)
    assert pack(lengths, BUDGET, 1).micro_batches <= -(-sum(lengths) // BUDGET) + 1
    assert pack([3, 3, 2, 2, 2], 6, 1).micro_batches == 2


def test_first_fit_helps_where_spreading_fails() -> None:
    assert pack([6, 3, 3, 2, 2, 2], 6, 1).micro_batches == 3


def test_a_trajectory_over_the_budget_is_alone() -> None:
    plan = pack([50, 10, 10, 10], 20, 2)
    check_plan(plan, [50, 10, 10, 10], 20, 2)
    assert any(micro_batch == [0] for rank in plan.ranks for micro_batch in rank)


def test_fewer_trajectories_than_ranks_leave_empty_micro_batches() -> None:
    plan = pack([10], 20, 3)
    assert sorted(plan.ranks) == [[[]], [[]], [[0]]]
    assert plan.padding == pytest.approx(2 / 3)


def test_no_trajectories_make_one_empty_micro_batch_a_rank() -> None:
    plan = pack([], 20, 2)
    assert plan.ranks == [[[]], [[]]]
    assert plan.padding == 0.0


def test_only_trajectories_over_the_budget() -> None:
    assert pack([30, 40], 20, 2).micro_batches == 1
    check_plan(pack([30, 40, 50], 20, 2), [30, 40, 50], 20, 2)


@pytest.mark.parametrize(("lengths", "budget", "ranks"), [([1], 0, 1), ([1], 1, 0), ([0], 1, 1)])
def test_nonsense_is_refused(lengths: list[int], budget: int, ranks: int) -> None:
    with pytest.raises(SchemaError, match="must be >= 1"):
        pack(lengths, budget, ranks)


def test_mini_batches_keep_groups_whole_and_in_order() -> None:
    groups = ["b", "a", "b", "c", "a", "d", "e"]
    assert split_groups(groups, 2) == [[0, 2, 1, 4], [3, 5, 6]]
    assert split_groups(groups, 5) == [[0, 2], [1, 4], [3], [5], [6]]


@given(groups=st.lists(st.integers(0, 9), min_size=1, max_size=40), data=st.data())
@settings(max_examples=50, deadline=None)
def test_mini_batches_are_a_partition(groups: list[int], data) -> None:
    parts = split_groups(groups, data.draw(st.integers(1, len(set(groups)))))
    assert sorted(i for part in parts for i in part) == list(range(len(groups)))
    seen = [{groups[i] for i in part} for part in parts]
    assert sum(map(len, seen)) == len(set(groups))
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


@pytest.mark.parametrize("parts", [0, 3])
def test_more_mini_batches_than_groups_are_refused(parts: int) -> None:
    with pytest.raises(SchemaError, match="between 1 and the number of groups"):
        split_groups([1, 1, 2], parts)
