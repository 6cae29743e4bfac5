"""What the control half of a receiver makes of a sender's answers."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from async_search_rl.weights.control import ControlServer
from async_search_rl.weights.receiver import WeightReceiver
from async_search_rl.weights.registry import Registry
from async_search_rl.weights.schema import Offer

OFFER = Offer(
    version=5, epoch=1, store_host="127.0.0.1", store_port=1, first_rank=1, world=2, transport="gloo", buckets=(), deadline_s=1.0
)


@pytest.mark.parametrize(("error", "have"), [("", 5), ("digest of bucket 0 must be 1, got 2", None)])
def test_a_sender_that_does_not_know_the_receiver_needs_no_report(
    error: str, have: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a restart of the learner in the middle of a reception."""
    server = ControlServer(Registry(threading.Condition()), admit=lambda request: None, status=dict, token=None)
    url = server.start("127.0.0.1", 0)

    async def report() -> int | None:
        receiver = WeightReceiver(url, "stranger", 1, "cpu", None)
        try:
            await receiver.received(OFFER, error)
        finally:
            await receiver.close()
        return receiver.have

    try:
        with caplog.at_level(logging.INFO, logger="async_search_rl.weights.receiver"):
            assert asyncio.run(report()) == have
    finally:
        server.stop(5.0)
    assert "must have polled before it reports, got 'stranger'" in caplog.text
