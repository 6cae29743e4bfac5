"""Learning-rate schedules."""

import math

import pytest

from async_search_rl.errors import ConfigError
from learner.schedule import Schedule, warmup_length


def test_warm_up_rises_to_the_peak_and_constant_stays_there() -> None:
    schedule = Schedule(2.0, "constant", warmup_steps=4, total_steps=10)
    assert [schedule.rate(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_to_its_floor_and_stays_there() -> None:
    schedule = Schedule(1.0, "linear", warmup_steps=2, total_steps=6, floor_ratio=0.2)
    assert [round(schedule.rate(step), 9) for step in range(8)] == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]


def test_cosine_follows_half_a_period() -> None:
    schedule = Schedule(1.0, "cosine", total_steps=8, floor_ratio=0.1)
    for step in range(9):
        assert schedule.rate(step) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8)))


def test_a_run_that_is_all_warm_up_never_divides_by_zero() -> None:
    assert Schedule(1.0, "linear", warmup_steps=5, total_steps=5).rate(5) == 1.0


@pytest.mark.parametrize(("steps", "ratio", "length"), [(3, 0.5, 3), (0, 0.285, 285), (0, 0.0, 0)])
def test_warm_up_in_steps_goes_before_the_ratio(steps: int, ratio: float, length: int) -> None:
    assert warmup_length(steps, ratio, 1000) == length


@pytest.mark.parametrize("wrong", [{"total_steps": 0}, {"warmup_steps": -1}, {"shape": "square"}])
def test_nonsense_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Schedule(1.0, **wrong)
