"""Batches: log order, the staleness bound, the same groups whenever asked, restarts of the learner."""

import pytest

from async_search_rl.errors import SchemaError
from async_search_rl.replay.schema import AcknowledgeRequest, CutRequest, FinishRequest, PublishRequest

GOOD = (1.0, 0.0)


def fill(b, make_group, count, step=0, tokens=2):
    tickets = b.tickets(count)
    for ticket in tickets:
        assert b.put(make_group(ticket, GOOD, step=step, tokens=tokens))[0] == "accepted"
    return [ticket.ticket for ticket in tickets]


def numbers(batch):
    return [entry.ticket for entry in batch.entries]


def test_batches_are_cut_in_log_order(bench, make_group):
    b = bench().running()
    tickets = b.tickets(4)
    for ticket in reversed(tickets):
        b.put(make_group(ticket, GOOD))
    assert numbers(b.cut(0)) == [tickets[3].ticket, tickets[2].ticket]
    assert numbers(b.cut(1)) == [tickets[1].ticket, tickets[0].ticket]
    assert b.cut(2) is None


def test_groups_that_the_next_batch_must_not_hold_come_before_fresher_ones(bench, make_group):
    b = bench(replay={"max_staleness": 1}).running()
    fill(b, make_group, 2)
    b.cut(0)
    old = b.tickets(2)
    b.publish(1)
    fresh = fill(b, make_group, 2, step=1)
    for ticket in old:
        assert b.put(make_group(ticket, GOOD, step=0))[0] == "accepted"
    assert numbers(b.cut(1)) == [ticket.ticket for ticket in old]
    b.publish(2)
    assert numbers(b.cut(2)) == fresh
    assert b.state.counters()["groups_stale"] == 0


def test_groups_over_the_bound_end_stale_when_the_batch_is_cut(bench, make_group):
    b = bench(replay={"max_staleness": 1}, data={"shuffle": False}).running()
    first = fill(b, make_group, 4, tokens=5)
    b.cut(0)
    b.publish(1)
    second = fill(b, make_group, 2, step=1)
    b.cut(1, step=2)
    counters = b.state.counters()
    assert counters["groups_stale"] == 2
    assert counters["stale_tokens"] == 2 * 8
    assert numbers(b.state.buffer.batches[1]) == second
    assert first[:2] == numbers(b.state.buffer.batches[0])
    assert counters["groups_dropped"] == 0
    b.publish(2)
    assert [t.question.id for t in b.tickets(2)] == ["q2", "q3"], "questions of stale groups come back first"


def test_stale_groups_are_dropped_even_if_too_few_are_left(bench, make_group):
    b = bench(replay={"max_staleness": 0}).running()
    fill(b, make_group, 1)
    assert b.cut(0, step=3) is None
    assert b.state.counters()["groups_stale"] == 1
    assert b.core.room == 2


def test_a_group_over_the_bound_already_at_put_ends_stale(bench, make_group):
    b = bench(replay={"max_staleness": 0}).running()
    fill(b, make_group, 2)
    b.cut(0)
    b.publish(1)
    (ticket,) = b.tickets(1)
    result, reason = b.put(make_group(ticket, GOOD, step=0))
    assert result == "stale"
    assert "step 0" in reason


def test_the_same_cut_is_the_same_groups_also_after_restarts(bench, make_group):
    b = bench(replay={"max_staleness": 2, "max_inflight": 20}).running()
    fill(b, make_group, 6)
    cuts = {n: numbers(b.cut(n)) for n in range(3)}
    b.publish(2)
    assert {n: numbers(b.cut(n)) for n in range(3)} == cuts
    b.crash()
    assert {n: numbers(b.cut(n)) for n in range(3)} == cuts
    incarnation = b.state.incarnation
    assert b.start(step=1, cut=1) == incarnation + 1
    assert b.state.counters()["groups_trained"] == 2
    assert b.core.load.training == 4
    assert {n: numbers(b.cut(n)) for n in range(1, 3)} == {1: cuts[1], 2: cuts[2]}
    assert b.state.counters()["groups_dropped"] == 0


def test_a_recorded_cut_is_refused_to_a_later_step(bench, make_group):
    b = bench().running()
    fill(b, make_group, 2)
    b.cut(0)
    with pytest.raises(SchemaError, match="step must be <= 0"):
        b.cut(0, step=1)


def test_a_superseded_learner_is_refused(bench):
    b = bench().running()
    b.start()
    before = b.encoded()
    requests = (
        (b.learner.cut, CutRequest(incarnation=1, cut=0, step=0, wait_s=0.0)),
        (b.learner.acknowledge, AcknowledgeRequest(incarnation=1, step=0, cut=0, oldest_cut=0)),
        (b.learner.finish, FinishRequest(incarnation=1, step=0, wait_s=0.0)),
        (lambda request: b.learner.publish(request, 0.0), PublishRequest(incarnation=1, step=0, cut=0)),
    )
    for call, request in requests:
        with pytest.raises(SchemaError, match="incarnation must be 2, got 1"):
            call(request)
    assert b.encoded() == before


def test_a_checkpoint_that_the_log_does_not_know_is_refused(bench, make_group):
    b = bench().running()
    with pytest.raises(SchemaError, match="cut must be in"):
        b.start(step=5, cut=5)
    fill(b, make_group, 4)
    for n in range(2):
        b.cut(n)
        b.publish(n + 1)
    b.acknowledge(2, oldest_cut=1)
    assert list(b.state.buffer.batches) == [1]
    with pytest.raises(SchemaError, match="cut must be in"):
        b.start(step=0, cut=0)
    assert b.start(step=1, cut=1) == 2


def test_acknowledged_batches_stay_until_their_weights_are_announced(bench, make_group):
    b = bench().running()
    fill(b, make_group, 2)
    b.cut(0)
    b.acknowledge(1, oldest_cut=1)
    assert b.core.load.training == 2
    b.publish(1)
    assert b.state.buffer.batches == {}
    assert b.state.counters()["groups_trained"] == 2


@pytest.mark.parametrize(("cut", "oldest"), [(1, 0), (0, 1)])
def test_a_wrong_acknowledgement_changes_nothing(bench, cut, oldest):
    b = bench().running()
    before = b.encoded()
    with pytest.raises(SchemaError, match="oldest_cut"):
        b.acknowledge(cut, oldest)
    assert b.encoded() == before


def test_a_publication_can_neither_go_back_nor_ahead_of_its_batches(bench, make_group):
    b = bench().running()
    fill(b, make_group, 2)
    b.cut(0)
    b.publish(1)
    for step, cut in ((0, 0), (2, 2), (2, 0)):
        with pytest.raises(SchemaError):
            b.publish(step, cut)
    count = len(b.records)
    b.publish(1)
    assert len(b.records) == count, "the same announcement twice is one"


def test_lags_of_trained_groups_are_counted(bench, make_group):
    b = bench().running()
    fill(b, make_group, 4)
    b.cut(0)
    b.cut(1)
    assert b.state.buffer.staleness == {"0": 2, "1": 2}
    assert b.state.counters()["max_lag"] == 1
