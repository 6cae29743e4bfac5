import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.questions import Question
from async_search_rl.replay.schema import Ticket
from async_search_rl.version import PolicyVersion
from rollouts.roster import Roster, missed, waits

QUESTION = Question(id="q", question="who", answers=("x",))


def train(number, min_step=0):
    return Ticket(ticket=number, attempt=1, kind="train", question=QUESTION, group_size=2, min_step=min_step)


def evaluation(number, step):
    version = PolicyVersion(1, step).pack()
    return Ticket(ticket=number, attempt=1, kind="evaluation", question=QUESTION, group_size=1, evaluation=0, version=version)


def test_room_counts_held_running_and_asked_for():
    roster = Roster(3, 2)
    roster.hold(train(1))
    assert (roster.room("train"), roster.room("evaluation")) == (2, 2)
    with roster.asking("train", 2):
        assert roster.room("train") == 0
    roster.take_runnable(PolicyVersion(1, 0).pack())
    assert roster.room("train") == 2
    roster.drop(1)
    assert roster.room("train") == 3


def test_nothing_runs_before_the_first_weights():
    roster = Roster(3, 2)
    roster.hold(train(1))
    assert roster.take_runnable(None) == []
    assert [t.ticket for t in roster.take_runnable(PolicyVersion(1, 0).pack())] == [1]
    assert roster.take_runnable(PolicyVersion(1, 1).pack()) == []


@pytest.mark.parametrize(
    ("ticket", "step", "expected_waits", "expected_missed"),
    [
        (train(1, 5), 4, True, False),
        (train(1, 5), 5, False, False),
        (evaluation(1, 5), 4, True, False),
        (evaluation(1, 5), 5, False, False),
        (evaluation(1, 5), 6, False, True),
    ],
)
def test_which_version_a_ticket_runs_on(ticket, step, expected_waits, expected_missed):
    version = PolicyVersion(1, step).pack()
    assert (waits(ticket, version), missed(ticket, version)) == (expected_waits, expected_missed)


@given(st.lists(st.tuples(st.sampled_from(["hold", "run", "drop"]), st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_room_is_never_negative_and_a_ticket_is_in_one_place(events):
    roster, here = Roster(4, 4), set()
    for event, number, step in events:
        if event == "hold":
            roster.hold(train(number, step))
            here.add(number)
        elif event == "run":
            started = [t.ticket for t in roster.take_runnable(PolicyVersion(1, step).pack())]
            assert set(started) <= here
        else:
            roster.drop(number)
            here.discard(number)
        assert sorted(t.ticket for t in roster.tickets) == sorted(here)
        assert roster.room("train") == max(0, 4 - len(here))
