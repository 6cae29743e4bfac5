"""How a run's end is told, and how a run that has ended goes on after everything was started again."""

import pytest

from async_search_rl.errors import SchemaError
from async_search_rl.replay.schema import FinishRequest
from async_search_rl.replay.view import phase_of, status_of


def stopped(bench, make_group):
    """A run that stopped, as every group is filtered."""
    b = bench(replay={"max_filtered_in_row": 1}).running()
    (ticket,) = b.tickets(1)
    b.put(make_group(ticket, (1.0, 1.0)))
    return b


def finished(bench, make_group):
    """A run that reached its last step."""
    b = bench(run={"max_steps": 1}).running()
    for ticket in b.tickets(2):
        b.put(make_group(ticket, (1.0, 0.0)))
    assert b.cut(0) is not None
    b.publish(1)
    assert b.learner.finish(FinishRequest(incarnation=1, step=1, wait_s=0.0))
    return b


ENDED = pytest.mark.parametrize("ended", [stopped, finished])


def shown(b):
    status = status_of(b.core, {}, {}, b.learner.waiting_for(), b.now)
    return status.state, bool(status.stop), status.waiting_for


@ENDED
def test_an_end_is_told_to_everyone_while_its_learner_is_known(bench, make_group, ended):
    b = ended(bench, make_group)
    assert b.lease(1).stop
    assert b.lease(1, known=b.state.policy.version).stop
    assert shown(b) == (ended.__name__, ended is stopped, "")


@ENDED
def test_newcomers_after_a_relaunch_wait_for_the_learner_that_lifts_the_end(bench, make_group, ended):
    b = ended(bench, make_group)
    b.crash()
    assert b.lease(1) is None, "neither the end nor the weights of the learner that has left"
    assert shown(b) == ("waiting for a learner", False, "a learner to start")
    b.start(step=b.state.step, cut=b.state.buffer.position)
    b.publish(b.state.step, cut=b.state.buffer.position)
    assert b.state.end is None
    reply = b.lease()
    assert (reply.stop, reply.policy) == (None, b.state.policy)
    assert phase_of(b.core) == "running"


def test_an_end_of_this_process_counts_though_no_learner_has_spoken_to_it(bench, make_group):
    b = bench(replay={"max_filtered_in_row": 1}).running()
    (ticket,) = b.tickets(1)
    b.crash()
    b.put(make_group(ticket, (1.0, 1.0)))
    assert b.lease(1).stop
    assert shown(b)[0] == "stopped"


@ENDED
def test_an_end_outlasts_a_crash_for_those_who_were_there(bench, make_group, ended):
    b = ended(bench, make_group)
    b.crash()
    assert b.lease(1, known=b.state.policy.version).stop, "an actor of the run that ended"
    with pytest.raises(SchemaError, match="incarnation must be 1"):
        b.learner.finish(FinishRequest(incarnation=0, step=1, wait_s=0.0))
    assert b.lease(1) is None, "another learner's words do not count"
    assert b.learner.finish(FinishRequest(incarnation=1, step=1, wait_s=0.0)), "its learner still asks"
    assert b.lease(1).stop, "now newcomers may know too"
    assert shown(b) == (ended.__name__, ended is stopped, "")
