"""Evaluation rounds: when they fall due, who gets their tickets, what they come to."""

import pytest

from async_search_rl.replay.evaluation import falls_due
from async_search_rl.replay.schema import FinishRequest
from async_search_rl.version import PolicyVersion

RULES = {"at_start": True, "every": 0, "max_steps": 10}


@pytest.mark.parametrize(
    ("step", "last", "first", "changes", "expected"),
    [
        (0, None, True, {}, True),
        (0, None, True, {"at_start": False}, False),
        (1, 0, False, {}, False),
        (10, 0, False, {}, True),
        (10, 10, False, {}, False),
        (4, 0, False, {"every": 4}, True),
        (5, 4, False, {"every": 4}, False),
        (6, 0, False, {"every": 4}, True),
        (8, 6, False, {"every": 4}, True),
        (3, None, False, {"every": 4}, False),
    ],
)
def test_rounds_fall_due(step, last, first, changes, expected):
    assert falls_due(step, last, first, **{**RULES, **changes}) is expected


def version(step, incarnation=1):
    return PolicyVersion(incarnation, step).pack()


def finish(b, step):
    return b.learner.finish(FinishRequest(incarnation=b.state.incarnation, step=step, wait_s=0.0))


def close_if_over(b):
    if not b.rounds.is_over(b.now):
        return None
    result = b.rounds.result(b.now)
    b.rounds.close(result, b.now)
    return result


def evaluate(b, make_group, want, step=0, reward=1.0, incarnation=1, actor="a"):
    reply = b.lease(want_evaluations=want, version=version(step, incarnation), actor=actor)
    for ticket in reply.tickets:
        assert ticket.kind == "evaluation"
        assert ticket.group_size == 1
        assert b.put(make_group(ticket, [reward], step=step, incarnation=incarnation, actor=actor))[0] == "evaluated"
    return reply.tickets


def test_a_round_asks_every_question_once_of_one_version(bench, make_group):
    b = bench(evaluation=6, data={"eval_questions": 4}).running()
    first = evaluate(b, make_group, 3)
    assert {t.version for t in first} == {version(0)}
    b.now = 2.0
    second = evaluate(b, make_group, 3, reward=0.0)
    assert [t.question.id for t in first + second] == ["e0", "e1", "e2", "e3"]
    result = close_if_over(b)
    assert (result.round, result.version, result.asked, result.questions, result.seconds) == (0, version(0), 4, 4, 2.0)
    assert result.means == {"reward": 0.75, "searches": 0.0, "length": 5.0, "exact_match": 0.75, "f1": 0.375, "valid": 1.0}
    assert result.by_source["s0"] == {**result.means, "reward": 1.0, "exact_match": 1.0, "f1": 0.5, "questions": 2.0}
    assert result.by_source["s1"]["exact_match"] == 0.5
    assert b.learner.new_evaluations() == [result]
    assert b.learner.new_evaluations() == []


def test_evaluations_take_no_place_from_training(bench):
    b = bench(evaluation=4).running()
    reply = b.lease(want=9, want_evaluations=9, version=version(0))
    assert [t.kind for t in reply.tickets] == ["evaluation"] * 4 + ["train"] * 4
    assert b.core.load.running == 4
    assert b.state.counters()["tickets_issued"] == 4


def test_an_actor_past_the_rounds_version_gets_none_of_its_tickets(bench):
    b = bench(evaluation=2).running()
    assert b.lease(want_evaluations=2, version=version(1), known=b.state.policy.version) is None
    assert len(b.lease(want_evaluations=2, version=None).tickets) == 2, "one that has no weights yet waits for the round's"


def test_tokens_of_another_version_are_a_failed_attempt(bench, make_group):
    b = bench(evaluation=1).running()
    (ticket,) = b.lease(want_evaluations=1).tickets
    result, reason = b.put(make_group(ticket, [1.0], step=1))
    assert result == "failed"
    assert "1.0" in reason
    (again,) = b.lease(want_evaluations=1).tickets
    assert again.attempt == 2
    b.put(make_group(again, [1.0]))
    assert close_if_over(b).questions == 1


def test_a_question_whose_version_is_gone_is_missing(bench, make_group):
    b = bench(evaluation=2).running()
    tickets = b.lease(want_evaluations=2).tickets
    b.put(make_group(tickets[0], [1.0]))
    b.publish(1, cut=0)
    assert b.put(make_group(tickets[1], [1.0], step=1))[0] == "failed"
    result = close_if_over(b)
    assert (result.asked, result.questions, result.means["valid"]) == (2, 1, 0.5)


def test_a_fault_is_tried_again_and_missing_in_the_end(bench, make_group):
    b = bench(evaluation=1, replay={"max_attempts": 2}).running()
    for _ in range(2):
        (ticket,) = b.lease(want_evaluations=1).tickets
        assert b.put(make_group(ticket, [None]))[0] == "failed"
    assert close_if_over(b).questions == 0
    assert b.state.ledger.parked == []


def test_a_round_ends_by_its_deadline_and_late_answers_are_unknown(bench, make_group):
    b = bench(evaluation=2, replay={"eval_timeout_s": 30.0, "lease_s": 100.0}).running()
    tickets = b.lease(want_evaluations=2).tickets
    b.put(make_group(tickets[0], [1.0]))
    b.now = 29.0
    assert close_if_over(b) is None
    b.now = 30.0
    assert close_if_over(b).questions == 1
    assert b.put(make_group(tickets[1], [1.0]))[0] == "unknown"
    assert b.lease(running=[(tickets[1], 0)]).cancelled == [tickets[1].ticket]


def test_a_round_whose_version_vanished_unasked_is_asked_again_with_the_newest(bench, make_group):
    b = bench(evaluation=2).running()
    b.publish(1, cut=0)
    b.lease(version=version(1))
    assert close_if_over(b) is None
    assert b.state.evaluations.open.version == version(1)
    assert len(evaluate(b, make_group, 2, step=1)) == 2
    assert close_if_over(b).version == version(1)


def test_a_round_that_falls_due_while_another_is_open_follows_it(bench, make_group):
    b = bench(evaluation=1, run={"max_steps": 1}).running()
    b.publish(1, cut=0)
    assert not finish(b, 1)
    evaluate(b, make_group, 1)
    assert close_if_over(b).version == version(0)
    assert b.state.evaluations.open.version == version(1)
    assert not finish(b, 1)
    evaluate(b, make_group, 1, step=1)
    assert close_if_over(b).version == version(1)
    assert finish(b, 1)
    assert b.lease().stop == "finished"


def test_the_end_waits_for_the_announcement_of_the_last_weights(bench):
    b = bench(run={"max_steps": 1}).running()
    assert not finish(b, 1)
    b.publish(1, cut=0)
    assert finish(b, 1)


def test_a_learners_restart_asks_an_open_round_again_with_the_new_version(bench, make_group):
    b = bench(evaluation=2).running()
    evaluate(b, make_group, 1)
    b.start()
    assert b.state.evaluations.open is None
    assert [t.kind for t in b.tickets(1, want_evaluations=2)] == ["train"]
    b.publish(0)
    tickets = evaluate(b, make_group, 2, incarnation=2)
    assert {t.version for t in tickets} == {version(0, 2)}
    assert close_if_over(b).questions == 2


def test_results_of_a_history_that_did_not_survive_are_dropped(bench, make_group):
    b = bench(evaluation=1, run={"max_steps": 2}).running()
    evaluate(b, make_group, 1)
    close_if_over(b)
    b.publish(2, cut=0)
    evaluate(b, make_group, 1, step=2)
    close_if_over(b)
    assert len(b.state.evaluations.results) == 2
    b.start(step=1, cut=0)
    assert [r.version for r in b.state.evaluations.results] == [version(0)]
    b.publish(2, cut=0)
    assert b.state.evaluations.open is not None


def test_an_open_round_survives_a_crash(bench, make_group):
    b = bench(evaluation=3).running()
    evaluate(b, make_group, 2)
    b.crash()
    evaluate(b, make_group, 2)
    assert close_if_over(b).questions == 3


def test_a_crash_between_a_round_falling_due_and_opening_loses_neither(bench):
    b = bench(evaluation=1).running()
    b.crash(lost=1)
    assert b.state.evaluations.open is None
    assert b.rounds.busy
    assert b.rounds.open_if_due(b.now)
    assert len(b.lease(want_evaluations=1).tickets) == 1


def test_lost_evaluation_leases_are_issued_again(bench):
    b = bench(evaluation=1).running()
    (ticket,) = b.lease(want_evaluations=1, actor="dead").tickets
    b.now = 11.0
    b.actors.expire(b.now)
    (again,) = b.lease(want_evaluations=1, actor="b").tickets
    assert (again.ticket, again.attempt) == (ticket.ticket, 2)


@pytest.mark.parametrize("again", ["the learner starts", "the service starts"])
def test_rounds_are_told_again_after_a_start_for_a_reply_may_have_been_lost_with_its_reader(bench, make_group, again):
    b = bench(evaluation=1).running()
    evaluate(b, make_group, 1)
    result = close_if_over(b)
    assert b.learner.new_evaluations() == [result]
    assert b.learner.new_evaluations() == []
    if again == "the learner starts":
        b.start()
    else:
        b.crash()
    assert b.learner.new_evaluations() == [result]
    assert b.learner.new_evaluations() == []
