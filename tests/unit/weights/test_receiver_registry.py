"""Who is offered what: newest only, nobody twice at a time, failures apart and later each time."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.errors import SchemaError
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.registry import FORGET_S, Poll, Registry
from async_search_rl.weights.schema import Offer, OfferRequest, ReceivedRequest


def version(incarnation: int, step: int) -> int:
    return PolicyVersion(incarnation, step).pack()


def new_poll(name: str = "r", have: int | None = None, connected: bool = True, **fields: object) -> Poll:
    values = {"workers": 1, "device": "cpu", "wait_s": 1.0, **fields}
    request = OfferRequest(receiver=name, have=have, **values)  # type: ignore[arg-type]
    return Poll(request, wake=lambda: None, connected=lambda: connected)


def offer(epoch: int = 1, packed: int = 5, deadline_s: float = 1.0) -> Offer:
    return Offer(
        version=packed,
        epoch=epoch,
        store_host="127.0.0.1",
        store_port=1,
        first_rank=1,
        world=2,
        transport="gloo",
        buckets=(),
        deadline_s=deadline_s,
    )


def names(registry: Registry, packed: int, now: float = 0.0) -> list[str]:
    return [member.name for member in registry.waiting(packed, now)]


def received(packed: int = 5, epoch: int = 1, error: str = "") -> ReceivedRequest:
    return ReceivedRequest(receiver="r", version=packed, epoch=epoch, error=error)


@given(st.tuples(st.integers(0, 5), st.integers(0, 1000)), st.tuples(st.integers(0, 5), st.integers(0, 1000)))
def test_a_receiver_is_behind_exactly_when_incarnation_then_step_is_lower(have: tuple[int, int], staged: tuple[int, int]) -> None:
    registry = Registry(threading.Condition())
    registry.arrive(new_poll(have=version(*have)), 0.0)
    assert bool(names(registry, version(*staged))) == (have < staged)


def test_who_hung_up_is_not_served() -> None:
    registry = Registry(threading.Condition())
    registry.arrive(new_poll(connected=False), 0.0)
    assert names(registry, 5) == []
    assert not registry.assign("r", offer(), 0.0)


def test_an_offer_made_while_the_poll_times_out_is_still_delivered() -> None:
    registry = Registry(threading.Condition())
    poll = new_poll()
    registry.arrive(poll, 0.0)
    assert registry.assign("r", offer(), 0.0)
    assert registry.leave(poll, 1.0) == offer()
    assert not registry.assign("r", offer(epoch=2), 0.0)


def test_a_second_poll_of_the_same_name_replaces_the_first() -> None:
    registry = Registry(threading.Condition())
    answered = []
    first, second = new_poll(), new_poll()
    first.wake = lambda: answered.append("first")
    registry.arrive(first, 0.0)
    registry.arrive(second, 0.0)
    assert answered == ["first"]
    assert registry.leave(first, 0.0) is None
    assert names(registry, 5) == ["r"]


def test_outcome_runs_until_the_receiver_reports() -> None:
    registry = Registry(threading.Condition())
    registry.arrive(new_poll(), 0.0)
    registry.assign("r", offer(), 0.0)
    assert registry.outcome("r", 5, 1) is None
    registry.confirm(received(), 1.0)
    assert registry.outcome("r", 5, 1) == ""


def test_polling_again_without_it_counts_as_failed() -> None:
    registry = Registry(threading.Condition())
    registry.arrive(new_poll(), 0.0)
    registry.assign("r", offer(), 0.0)
    registry.arrive(new_poll(), 1.0)
    assert registry.outcome("r", 5, 1) == "the receiver polled again without it"


def test_one_error_is_tried_again_at_once_and_two_make_a_suspect_that_waits_longer_each_time() -> None:
    registry = Registry(threading.Condition())
    waits = []
    for failure in range(5):
        registry.arrive(new_poll(), 0.0)
        registry.assign("r", offer(epoch=failure), 0.0)
        registry.confirm(received(epoch=failure, error="digest"), 0.0)
        registry.arrive(new_poll(), 0.0)
        waits.append(registry.next_retry(5, 0.0) or 0.0)
        [member] = registry.waiting(5, 100.0)
        assert member.suspect == (failure >= 1)
    assert waits[0] == 0.0
    assert waits[1:] == sorted(waits[1:])
    assert waits[1] > 0.0
    assert names(registry, 5, now=0.0) == []


def test_receiving_something_clears_the_record() -> None:
    registry = Registry(threading.Condition())
    registry.arrive(new_poll(), 0.0)
    registry.assign("r", offer(), 0.0)
    registry.withdraw("r", 5, 1, "silent", 0.0)
    registry.confirm(received(), 0.0)
    registry.arrive(new_poll(have=5), 0.0)
    [member] = registry.waiting(6, 0.0)
    assert not member.suspect


def test_nothing_is_held_against_a_receiver_whose_offer_the_sender_withdrew() -> None:
    registry = Registry(threading.Condition())
    registry.arrive(new_poll(), 0.0)
    registry.assign("r", offer(), 0.0)
    registry.withdraw("r", 5, 1, "", 0.0)
    registry.confirm(received(error="the sender gave up"), 0.0)
    registry.arrive(new_poll(), 0.0)
    [member] = registry.waiting(5, 0.0)
    assert not member.suspect


def test_a_report_of_a_stranger_is_refused() -> None:
    with pytest.raises(SchemaError, match="must have polled before it reports, got 'r'"):
        Registry(threading.Condition()).confirm(received(), 0.0)


@pytest.mark.parametrize("fields", [{"workers": 0}, {"workers": 3, "device": "cuda-0,cuda-1"}, {"device": ""}])
def test_workers_and_devices_must_agree(fields: dict[str, object]) -> None:
    with pytest.raises(SchemaError, match=r"workers must be >= 1|device must name"):
        Registry(threading.Condition()).arrive(new_poll(**fields), 0.0)


def test_one_device_stands_for_all_workers() -> None:
    registry = Registry(threading.Condition())
    registry.arrive(new_poll(workers=2), 0.0)
    [member] = registry.waiting(0, 0.0)
    assert member.devices == ("cpu", "cpu")


def test_a_receiver_that_polled_a_moment_ago_is_expected_and_one_long_silent_is_forgotten() -> None:
    registry = Registry(threading.Condition())
    poll = new_poll()
    registry.arrive(poll, 0.0)
    assert registry.about_to_poll(0.0) == []
    registry.leave(poll, 1.0)
    assert registry.about_to_poll(2.0) == ["r"]
    assert registry.about_to_poll(60.0) == []
    assert registry.forget_silent(60.0) == []
    assert registry.forget_silent(2.0 + FORGET_S) == ["r"]


@pytest.mark.parametrize("blame", [None, "silent"])
def test_who_receives_for_long_is_not_forgotten_and_its_report_counts(blame: str | None) -> None:
    registry = Registry(threading.Condition())
    deadline_s = 3 * FORGET_S
    poll = new_poll()
    registry.arrive(poll, 0.0)
    assert registry.assign("r", offer(deadline_s=deadline_s), 30.0)
    registry.leave(poll, 30.0)
    ended = 30.0 + deadline_s
    if blame is not None:
        registry.withdraw("r", 5, 1, blame, ended)
    assert registry.forget_silent(ended) == []
    assert registry.outcome("r", 5, 1) == blame
    registry.confirm(received(), ended)
    assert registry.outcome("r", 5, 1) == ""
    assert registry.forget_silent(ended + FORGET_S) == []
    assert registry.forget_silent(ended + FORGET_S + 1.0) == ["r"]
