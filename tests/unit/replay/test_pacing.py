"""Pacing: how many tickets, and from which step on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.replay.pacing import Load, min_step, room

LIMITS = {"batch_groups": 4, "max_staleness": 1, "max_inflight": 100, "max_steps": 50}


@pytest.mark.parametrize(
    ("load", "changes", "expected"),
    [
        ((0, 0, 0, 0), {}, 8),
        ((0, 4, 0, 0), {}, 4),
        ((0, 4, 2, 1), {}, 1),
        ((0, 8, 4, 0), {}, 0),
        ((0, 0, 0, 3), {"max_inflight": 4}, 1),
        ((49, 0, 0, 0), {}, 4),
        ((49, 4, 0, 0), {}, 0),
        ((50, 0, 0, 0), {}, 0),
        ((0, 0, 0, 0), {"max_staleness": 0}, 4),
    ],
)
def test_room(load, changes, expected):
    step, training, buffered, running = load
    state = Load(step=step, training=training, buffered=buffered, running=running)
    assert room(state, **{**LIMITS, **changes}) == expected


@given(st.integers(0, 60), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 4))
def test_a_group_issued_within_the_room_is_within_the_bound_of_its_batch(step, training, buffered, running, eta):
    load = Load(step=step, training=training, buffered=buffered, running=running)
    free = room(load, **{**LIMITS, "max_staleness": eta})
    assert free >= 0
    oldest = min_step(load, batch_groups=4, max_staleness=eta)
    assert 0 <= oldest <= step + training // 4, "reached without any group that still runs"
    assert oldest == max(0, min(step + load.ahead // 4 - eta, step + training // 4))
    if free:
        last = Load(step=step, training=training, buffered=buffered, running=running + free - 1)
        assert min_step(last, batch_groups=4, max_staleness=eta) <= step, "weights that exist are new enough"


def test_an_attempt_issued_again_does_not_wait_for_its_own_batch(bench):
    b = bench(replay={"max_staleness": 0}).running()
    assert len(b.tickets(2)) == 2
    b.now = 11.0
    b.actors.expire(b.now)
    assert [(t.attempt, t.min_step) for t in b.tickets(2)] == [(2, 0), (2, 0)]


def test_tickets_tell_from_which_step_on_they_are_of_use(bench):
    b = bench(replay={"max_staleness": 3}).running()
    assert [t.min_step for t in b.tickets(8)] == [0] * 8
    b.crash()
    assert b.tickets(8) == [], "max_inflight counts what ran before the restart too"
