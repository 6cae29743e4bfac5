import math

import pytest

from async_search_rl.config.learner import GuardSection
from learner.guard import Guard

GOOD = {"kl_behaviour": 0.1, "entropy": 1.0, "ess": 0.9}


def test_bounds_of_zero_are_off():
    guard = Guard(GuardSection(patience=1))
    assert guard.judge({"kl_behaviour": 1e9, "entropy": 0.0, "ess": 0.0}) is None


def test_a_bound_must_be_left_for_patience_steps_in_a_row():
    guard = Guard(GuardSection(max_kl=1.0, patience=3))
    bad = {**GOOD, "kl_behaviour": 2.0}
    assert [guard.judge(f) for f in (bad, bad, GOOD, bad, bad)] == [None] * 5
    assert not guard.healthy
    verdict = guard.judge(bad)
    assert verdict is not None
    assert verdict.action == "stop"
    assert not guard.healthy
    assert "kl_behaviour must be <= 1.0 (guard.max_kl), got 2 for 3 steps in a row" in verdict.reason


def test_each_bound_names_its_key():
    for key, figures in (
        ("min_entropy", {**GOOD, "entropy": 0.01}),
        ("min_ess", {**GOOD, "ess": 0.01}),
    ):
        verdict = Guard(GuardSection(patience=1, **{key: 0.5})).judge(figures)
        assert verdict is not None
        assert f"guard.{key}" in verdict.reason


def test_a_second_rollback_to_the_same_weights_is_a_stop():
    guard = Guard(GuardSection(max_kl=1.0, patience=1, action="rollback"))
    bad = {**GOOD, "kl_behaviour": 2.0}
    assert guard.judge(bad).action == "rollback"
    assert guard.judge(bad).action == "stop"
    guard = Guard(GuardSection(max_kl=1.0, patience=1, action="rollback"))
    assert guard.judge(bad).action == "rollback"
    guard.checkpointed()
    assert guard.judge(bad).action == "rollback"


@pytest.mark.parametrize(("key", "figure"), [("max_kl", "kl_behaviour"), ("min_entropy", "entropy"), ("min_ess", "ess")])
def test_what_is_not_a_number_is_outside_every_bound(key, figure):
    guard = Guard(GuardSection(patience=1, **{key: 0.5}))
    assert guard.judge({"kl_behaviour": 0.1, "entropy": 1.0, "ess": 0.9, figure: math.nan}) is not None
