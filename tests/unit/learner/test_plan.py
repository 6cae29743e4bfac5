import numpy as np
import pytest
import torch

from async_search_rl.config import parse_config
from learner.batch import batch_from_groups
from learner.plan import SumsByName, all_micro_batches, evaluate, plan_step, schedule_of
from learner.ranks import Ranks
from tests.learner_cases import groups

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU, None)


def config(**algorithm):
    return parse_config({"learner": {"micro_batch_tokens": 90}, "algorithm": algorithm, "run": {"max_steps": 10}})


def test_every_valid_trajectory_is_in_exactly_one_micro_batch_of_one_rank():
    batch = batch_from_groups(groups(5))
    ranks = [Ranks(rank, 3, CPU, None) for rank in range(3)]
    plans = [plan_step(batch, config(minibatches=2), rank) for rank in ranks]
    for index in range(2):
        counts = {len(plan[index].micro_batches) for plan in plans}
        assert len(counts) == 1, "every rank must run equally many micro-batches"
        seen = sorted(i for plan in plans for micro in plan[index].micro_batches for i in micro.members)
        assert seen == sorted(plans[0][index].members)
    everything = sorted(i for mini in plans[0] for i in mini.members)
    assert everything == np.flatnonzero(batch.valid_S).tolist()


def test_evaluate_gives_each_token_of_the_batch_its_value():
    batch = batch_from_groups(groups(4))
    micro_batches = all_micro_batches(plan_step(batch, config(), ALONE))
    assert len(micro_batches) > 1
    values_N = evaluate(lambda micro: 2 * micro.pick(batch.behaviour_N), micro_batches, batch, ALONE)
    np.testing.assert_allclose(values_N, 2 * batch.behaviour_N, rtol=1e-6)


def test_sums_add_up_by_name():
    sums = SumsByName()
    sums.add({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
    sums.add({"a": torch.tensor(10.0), "b": torch.tensor(20.0)})
    assert sums.total(ALONE) == {"a": 11.0, "b": 22.0}


def test_the_schedule_counts_optimiser_steps_of_all_minibatches():
    settings = parse_config(
        {
            "run": {"max_steps": 10},
            "algorithm": {"minibatches": 4},
            "optimizer": {"lr": 1.0, "schedule": "linear", "warmup_ratio": 0.5},
        }
    )
    schedule = schedule_of(settings.optimizer, settings)
    assert schedule.rate(19) == pytest.approx(1.0)
    assert schedule.rate(30) == pytest.approx(0.5)
    assert schedule.rate(40) == pytest.approx(0.0)
