"""A delivery that fails: who is blamed for it, and served alone from then on."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from async_search_rl.weights.delivery import Delivery, Outcome
from async_search_rl.weights.registry import Poll, Registry
from async_search_rl.weights.rendezvous import Rendezvous
from async_search_rl.weights.schema import Offer, OfferRequest, ReceivedRequest, TensorSpec
from async_search_rl.weights.staging import StagedWeights

DEADLINE_S = 0.6
AT_DEADLINE_S = 0.3
EPOCH, VERSION = 1, 5


class GivesUp:
    """A transport that fails ``after_s`` seconds into a bucket, and a transfer of it."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s

    def start(self, flat: torch.Tensor, timeout_s: float) -> GivesUp:
        return self

    def wait(self) -> None:
        time.sleep(self.after_s)
        raise RuntimeError("Application timeout caused pair closure")

    def abort(self) -> None:
        pass


@pytest.fixture(autouse=True)
def short_last_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_search_rl.weights.delivery._AT_DEADLINE_S", AT_DEADLINE_S)


def offer(rank: int) -> Offer:
    return Offer(
        version=VERSION,
        epoch=EPOCH,
        store_host="127.0.0.1",
        store_port=1,
        first_rank=rank,
        world=3,
        transport="gloo",
        buckets=(),
        deadline_s=DEADLINE_S,
    )


def delivered(group: GivesUp, reports: tuple[str, ...] = ()) -> Outcome:
    """A delivery to `quick`, which has the bucket, and `wedged`, which has not; those in ``reports`` say late that they failed."""
    registry, store = Registry(threading.Condition()), HashStore()
    offers = {name: (offer(rank), 1) for rank, name in enumerate(("quick", "wedged"), start=1)}
    rendezvous = Rendezvous(store, EPOCH, VERSION)
    for name, (one, _) in offers.items():
        registry.arrive(
            Poll(OfferRequest(receiver=name, have=None, workers=1, device="cpu", wait_s=1.0), lambda: None, lambda: True), 0.0
        )
        assert registry.assign(name, one, time.monotonic())
        rendezvous.join(one.first_rank)
    rendezvous.beat(1, landed=1)
    staged = StagedWeights([[TensorSpec(name="w", shape=(2,), dtype="float32")]], torch.device("cpu"))

    def report() -> None:
        for name in reports:
            registry.confirm(ReceivedRequest(receiver=name, version=VERSION, epoch=EPOCH, error="timed out"), time.monotonic())

    timer = threading.Timer(DEADLINE_S - 0.1, report)
    timer.start()
    outcome = Delivery(staged, offers, group, store, registry, torch.device("cpu"), lambda: "").run()
    timer.join()
    return outcome


@pytest.mark.parametrize(
    ("after_s", "reports"), [(DEADLINE_S - 0.1, ()), (60.0, ("quick",)), (60.0, ())], ids=["transport", "receiver", "watch"]
)
def test_whoever_gives_up_first_at_the_deadline_the_one_furthest_behind_is_blamed(after_s: float, reports: tuple[str, ...]) -> None:
    outcome = delivered(GivesUp(after_s), reports)
    assert outcome.error
    assert outcome.blamed == ("wedged",)


def test_a_transport_that_breaks_long_before_the_deadline_is_nobodys_fault() -> None:
    outcome = delivered(GivesUp(0.0))
    assert "pair closure" in outcome.error
    assert outcome.blamed == ()
