"""Tickets: issue, leases, attempts, ends."""

import msgspec
import pytest

from async_search_rl.errors import SchemaError
from async_search_rl.replay.ledger import OUTAGE

GOOD, UNIFORM, FAULTY = (1.0, 0.0), (1.0, 1.0), (None, None)


def test_nothing_is_issued_before_there_are_weights(bench):
    b = bench()
    assert b.tickets(4) == []
    b.start()
    assert b.tickets(4) == []
    b.publish(0)
    assert len(b.tickets(4)) == 4


def test_questions_come_in_a_seeded_permutation_that_changes_each_epoch(bench):
    b = bench(train=3, replay={"max_staleness": 2, "batch_groups": 2}).running()
    again = bench(train=3, replay={"max_staleness": 2, "batch_groups": 2}).running()
    first = [t.question.id for t in b.tickets(6)]
    assert sorted(first[:3]) == sorted(first[3:]) == ["q0", "q1", "q2"]
    assert first == [t.question.id for t in again.tickets(6)]
    other = bench(train=3, run={"seed": 1}, replay={"max_staleness": 2, "batch_groups": 2}).running()
    assert first != [t.question.id for t in other.tickets(6)]


def test_the_files_order_is_kept_without_shuffle(bench):
    b = bench(train=3, data={"shuffle": False}).running()
    assert [t.question.id for t in b.tickets(4)] == ["q0", "q1", "q2", "q0"]


def test_a_lease_that_runs_out_is_issued_again_with_a_higher_attempt(bench, make_group):
    b = bench().running()
    (ticket,) = b.tickets(1, actor="dead")
    b.now = 11.0
    assert b.actors.expire(b.now)
    (again,) = b.tickets(1, actor="b")
    assert (again.ticket, again.attempt, again.question) == (ticket.ticket, 2, ticket.question)
    assert b.put(make_group(ticket, GOOD, actor="dead"))[0] == "accepted", "the first complete group of an open ticket wins"
    assert b.put(make_group(again, GOOD, actor="b"))[0] == "duplicate"
    assert b.state.counters()["groups_duplicate"] == 1


def test_polling_renews_leases(bench):
    b = bench().running()
    (ticket,) = b.tickets(1)
    b.now = 9.0
    b.lease(running=[(ticket, 0)])
    b.now = 15.0
    assert not b.actors.expire(b.now)
    b.now = 20.0
    assert b.actors.expire(b.now)


def test_a_late_actor_gets_its_lease_back_while_nobody_else_has_the_ticket(bench):
    b = bench().running()
    (ticket,) = b.tickets(1)
    b.now = 11.0
    b.actors.expire(b.now)
    b.lease(running=[(ticket, 0)])
    assert all(t.ticket != ticket.ticket for t in b.tickets(3, actor="b"))


def test_a_ticket_fails_after_its_last_attempt_and_its_question_is_parked(bench, make_group):
    b = bench(train=2, data={"shuffle": False}).running()
    for attempt in (1, 2):
        (ticket,) = b.tickets(1)
        assert ticket.attempt == attempt
        result, reason = b.put(make_group(ticket, (1.0, None)))
        assert result == "failed"
        assert "1 valid" in reason
        assert "the search failed" in reason
    (ticket,) = b.tickets(1)
    b.now = 11.0
    b.actors.expire(b.now)
    assert b.state.ledger.parked == [0]
    assert b.put(make_group(ticket, GOOD))[0] == "unknown"
    assert {t.question.id for t in b.tickets(4)} == {"q1"}
    assert b.state.counters()["groups_failed"] == 1


def fail(b, make_group, ticket):
    assert b.put(make_group(ticket, FAULTY))[0] == "failed"


def test_the_questions_of_an_outage_come_back_when_a_group_comes_through(bench, make_group):
    b = bench(replay={"max_attempts": 1, "max_inflight": 40, "batch_groups": 20}).running()
    bad, good, *outage, last = b.tickets(3 + OUTAGE)
    fail(b, make_group, bad)
    assert b.put(make_group(good, GOOD))[0] == "accepted"
    for ticket in outage:
        fail(b, make_group, ticket)
    assert len(b.state.ledger.parked) == 1 + OUTAGE
    b.crash()
    assert b.put(make_group(last, GOOD))[0] == "accepted"
    assert [b.core.train[question].id for question in b.state.ledger.parked] == [bad.question.id], (
        "one that failed alone stays parked"
    )
    assert [t.question.id for t in b.tickets(OUTAGE)] == [t.question.id for t in outage]


def test_a_question_is_forgiven_once(bench, make_group):
    b = bench(replay={"max_attempts": 1, "max_inflight": 40, "batch_groups": 20, "max_staleness": 3}).running()
    asked = b.tickets(OUTAGE)
    for ticket in asked:
        fail(b, make_group, ticket)
    (good,) = b.tickets(1)
    assert b.put(make_group(good, GOOD))[0] == "accepted"
    again = b.tickets(OUTAGE)
    assert [t.question.id for t in again] == [t.question.id for t in asked]
    for ticket in again:
        fail(b, make_group, ticket)
    b.crash()
    (good,) = b.tickets(1)
    assert b.put(make_group(good, GOOD))[0] == "accepted"
    assert len(b.state.ledger.parked) == OUTAGE
    assert b.state.ledger.returned == []


def test_a_stop_because_all_are_parked_is_over_with_a_learners_start(bench, make_group):
    b = bench(train=1, replay={"max_attempts": 1}).running()
    (ticket,) = b.tickets(1)
    fail(b, make_group, ticket)
    assert b.lease(1).stop
    b.start(step=0, cut=0)
    b.publish(0)
    assert [t.question.id for t in b.tickets(1)] == [ticket.question.id]


def test_the_run_stops_when_every_question_is_parked(bench, make_group):
    b = bench(train=1, replay={"max_attempts": 1}).running()
    (ticket,) = b.tickets(1)
    b.put(make_group(ticket, FAULTY))
    stop = b.lease(1).stop
    assert "1 training questions are parked" in stop
    assert "the search failed" in stop


def test_a_fault_of_an_old_attempt_leaves_the_new_one_alone(bench, make_group):
    b = bench().running()
    (ticket,) = b.tickets(1, actor="slow")
    b.now = 11.0
    b.actors.expire(b.now)
    (again,) = b.tickets(1, actor="b")
    assert b.put(make_group(ticket, FAULTY, actor="slow"))[0] == "failed"
    assert b.core.leases.waiting == []
    assert b.put(make_group(again, GOOD, actor="b"))[0] == "accepted"


def test_a_repeated_put_gets_the_same_answer_and_changes_nothing(bench, make_group):
    b = bench(replay={"max_attempts": 1, "max_staleness": 3}).running()
    tickets = b.tickets(4)
    groups = [make_group(t, rewards) for t, rewards in zip(tickets, (GOOD, UNIFORM, FAULTY, GOOD), strict=True)]
    answers = [b.put(group) for group in groups]
    assert [result for result, _ in answers] == ["accepted", "filtered", "failed", "accepted"]
    before = b.encoded()
    assert [b.put(group) for group in groups] == answers
    b.crash()
    assert [b.put(group) for group in groups] == answers
    assert b.encoded() == before


def test_unknown_tickets_and_attempts_are_told_so(bench, make_group):
    b = bench().running()
    (ticket,) = b.tickets(1)
    before = b.encoded()
    assert b.put(make_group(msgspec.structs.replace(ticket, ticket=99), GOOD))[0] == "unknown"
    assert b.put(make_group(ticket, GOOD, attempt=2))[0] == "unknown"
    assert b.encoded() == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"question_id": "other"}, "question_id"),
        ({"evaluation": 0}, "evaluation"),
    ],
)
def test_a_group_that_is_not_its_tickets_is_refused_by_field_and_changes_nothing(bench, make_group, changes, field):
    b = bench().running()
    (ticket,) = b.tickets(1)
    before = b.encoded()
    with pytest.raises(SchemaError, match=field):
        b.put(make_group(ticket, GOOD, **changes))
    with pytest.raises(SchemaError, match="trajectories"):
        b.put(make_group(ticket, (1.0, 0.0, 1.0)))
    assert b.encoded() == before


def test_equal_rewards_are_filtered_where_they_carry_no_gradient_and_stop_the_run_in_the_end(bench, make_group):
    b = bench(replay={"max_filtered_in_row": 3}).running()
    for rewards in (UNIFORM, UNIFORM, GOOD, UNIFORM, UNIFORM, UNIFORM):
        (ticket,) = b.tickets(1)
        b.put(make_group(ticket, rewards))
    assert b.state.counters()["groups_filtered"] == 5
    assert "3 groups in a row" in b.lease(1).stop
    assert b.state.buffer.buffered == 1


def test_equal_rewards_are_kept_where_a_critic_makes_use_of_them(bench, make_group):
    b = bench(algorithm={"advantage": "gae"}).running()
    tickets = b.tickets(2)
    assert b.put(make_group(tickets[0], UNIFORM))[0] == "accepted"
    assert b.put(make_group(tickets[1], (1.0, None)))[0] == "accepted", "one valid member is enough here"


def test_running_groups_that_no_batch_can_hold_are_cancelled_and_their_question_comes_back(bench, make_group):
    b = bench(data={"shuffle": False}, replay={"max_staleness": 0, "max_inflight": 8}, run={"max_steps": 9}).running()
    tickets = b.tickets(2)
    for ticket in tickets:
        b.put(make_group(ticket, GOOD))
    b.cut(0)
    b.publish(1)
    old, young = b.tickets(2, actor="a")
    reply = b.lease(running=[(old, 0), (young, 1)])
    assert reply.cancelled == [old.ticket]
    assert b.state.counters()["groups_cancelled"] == b.state.counters()["groups_stale"] == 1
    assert b.put(make_group(old, GOOD))[0] == "unknown"
    assert [t.question for t in b.tickets(1)] == [old.question]


def test_tickets_that_others_ended_are_cancelled_but_not_ones_own(bench, make_group):
    b = bench().running()
    (ticket,) = b.tickets(1, actor="a")
    known = b.state.policy.version
    b.put(make_group(ticket, GOOD, actor="a"))
    assert b.lease(running=[(ticket, 0)], actor="a", known=known) is None
    assert b.lease(running=[(ticket, 0)], actor="b", known=known).cancelled == [ticket.ticket]


def test_an_old_attempts_end_does_not_cancel_the_new_one_of_the_same_actor(bench):
    b = bench(replay={"max_staleness": 0}).running()
    (ticket,) = b.tickets(1)
    b.now = 11.0
    b.actors.expire(b.now)
    (again,) = b.tickets(1)
    b.state.step = 5
    assert again.attempt == 2
    reply = b.lease(running=[(ticket, 0)], known=b.state.policy.version)
    assert reply is None


def test_the_newest_policy_is_told_once(bench):
    b = bench().running()
    reply = b.lease()
    assert reply.policy.version == b.state.policy.version
    assert b.lease(known=reply.policy.version) is None
