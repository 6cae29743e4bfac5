"""Epochs: a group is reused only by the members who all have it open, and offers give every worker a rank."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.weights.epochs import OpenGroups, make_offers
from async_search_rl.weights.groups import Transfer
from async_search_rl.weights.plan import plan_buckets
from async_search_rl.weights.schema import TensorSpec
from async_search_rl.weights.staging import StagedWeights
from async_search_rl.weights.transport import GroupPlan, Member


class FakeGroup:
    """A group that knows whether it was aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def start(self, flat: torch.Tensor, timeout_s: float) -> Transfer:
        raise AssertionError("nothing is sent here")

    def abort(self) -> None:
        self.aborted.set()


def plan(*names: str, epoch: int | None = None, suspect: bool = False) -> GroupPlan:
    return GroupPlan("gloo", tuple(Member(name, ("cpu",), epoch, suspect) for name in names))


def test_a_group_is_reused_while_all_members_have_it_open() -> None:
    groups, group = OpenGroups(), FakeGroup()
    epoch, none = groups.enter(plan("a", "b"))
    assert none is None
    groups.keep(plan("a", "b"), epoch, group)
    assert groups.enter(plan("a", "b", epoch=epoch)) == (epoch, group)
    assert groups.epochs == 1


@pytest.mark.parametrize(
    "members",
    [
        lambda epoch: (Member("a", ("cpu",), epoch), Member("b", ("cpu",), None)),
        lambda epoch: (Member("a", ("cpu",), epoch), Member("b", ("cpu",), epoch - 1)),
        lambda epoch: (Member("a", ("cpu",), epoch),),
        lambda epoch: (Member("a", ("cpu",), epoch), Member("b", ("cpu", "cpu"), epoch)),
    ],
)
def test_any_other_membership_begins_a_new_epoch(members: object) -> None:
    groups, group = OpenGroups(), FakeGroup()
    epoch, _ = groups.enter(plan("a", "b"))
    groups.keep(plan("a", "b"), epoch, group)
    newer, none = groups.enter(GroupPlan("gloo", members(epoch)))  # type: ignore[operator]
    assert none is None
    assert newer > epoch


def test_who_enters_another_group_has_left_the_first() -> None:
    groups, first, second = OpenGroups(), FakeGroup(), FakeGroup()
    epoch, _ = groups.enter(plan("a", "b"))
    groups.keep(plan("a", "b"), epoch, first)
    newer, _ = groups.enter(plan("b", "c"))
    groups.keep(plan("b", "c"), newer, second)
    assert first.aborted.is_set()
    assert not second.aborted.is_set()
    groups.close()
    assert second.aborted.is_set()


def test_epochs_of_two_senders_do_not_meet() -> None:
    assert len({OpenGroups().enter(plan("a"))[0] for _ in range(20)}) == 20


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_every_worker_has_a_rank_of_its_own_and_the_sender_rank_0(workers: list[int]) -> None:
    specs = [TensorSpec(name="a", shape=(2,), dtype="float32")]
    staged = StagedWeights(plan_buckets(specs, 100), torch.device("cpu"))
    staged.reset(7)
    members = tuple(Member(f"r{i}", ("cpu",) * count, None) for i, count in enumerate(workers))
    offers = make_offers(GroupPlan("gloo", members), staged, 3, ("127.0.0.1", 1), 5.0)
    ranks = [offer.first_rank + worker for offer, count in offers.values() for worker in range(count)]
    assert ranks == list(range(1, 1 + sum(workers)))
    assert {offer.world for offer, _ in offers.values()} == {1 + sum(workers)}
    assert {(offer.version, offer.epoch, offer.handles) for offer, _ in offers.values()} == {(7, 3, ())}
