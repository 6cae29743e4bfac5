"""Group commit: many concurrent puts share a sync, so that small groups go in by the hundred a second."""

import asyncio
import time

import pytest

from async_search_rl.replay.client import ReplayClient
from async_search_rl.replay.schema import LeaseRequest, PublishRequest, PutRequest, StartRequest

pytestmark = pytest.mark.integration
CLIENTS, PUTS, ROUNDS = 32, 400, 3
LEAST_PUTS_PER_S = 150
"""Several hundred on an idle machine; this bound still holds where other tests take most of it."""


async def puts_per_s(client, encoded_group):
    request = LeaseRequest(actor="a", running=[], want=PUTS, want_evaluations=0, wait_s=5.0)
    tickets = (await client.lease(request)).tickets
    puts = iter([PutRequest(actor="a", group=encoded_group(ticket, sampled=60)) for ticket in tickets])

    async def put_all():
        for put in puts:
            assert (await client.put(put)).result == "accepted"

    began = time.perf_counter()
    await asyncio.gather(*(put_all() for _ in range(CLIENTS)))
    return len(tickets) / (time.perf_counter() - began)


def test_small_groups_go_in_by_the_hundred_a_second(replay, encoded_group, record_property):
    limits = {"batch_groups": 1000, "max_staleness": 100, "max_inflight": 100_000}
    url = replay(replay=limits, run={"max_steps": 100_000}).start()

    async def go():
        async with ReplayClient(url) as client:
            await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))
            await client.publish(PublishRequest(incarnation=1, step=0, cut=0))
            return [await puts_per_s(client, encoded_group) for _ in range(ROUNDS)]

    rates = asyncio.run(asyncio.wait_for(go(), 120))
    record_property("puts_per_s", max(rates))
    assert max(rates) >= LEAST_PUTS_PER_S, rates
