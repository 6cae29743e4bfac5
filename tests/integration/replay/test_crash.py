"""kill -9 of the replay service: what it answered is kept, what it did not is asked again and answered the same."""

import asyncio
import json

import pytest

from async_search_rl.replay.client import ReplayClient
from async_search_rl.replay.schema import CutRequest, LeaseRequest, PublishRequest, PutRequest, Running, StartRequest

pytestmark = pytest.mark.integration
PUTS_BETWEEN_KILLS = 25


class Actor:
    """Puts one group after another; every put is repeated until it is answered."""

    def __init__(self, client, name, encoded_group, puts):
        self.client, self.name, self.encoded_group, self.puts = client, name, encoded_group, puts
        self.answers = {}

    async def work(self, enough):
        while not enough.is_set():
            request = LeaseRequest(actor=self.name, running=[], want=4, want_evaluations=0, wait_s=0.2, version=1 << 32)
            for ticket in (await self.client.lease(request)).tickets:
                put = PutRequest(actor=self.name, group=self.encoded_group(ticket, self.name))
                reply = await self.client.put(put)
                self.answers[ticket.ticket] = (put, reply.result)
                self.puts.release()


async def kill_between_puts(process, puts, kills):
    for _ in range(kills):
        async with asyncio.timeout(60):
            for _ in range(PUTS_BETWEEN_KILLS):
                await puts.acquire()
        process.kill()
        await asyncio.to_thread(process.start)


def test_nothing_that_was_answered_is_lost(replay, encoded_group):
    process = replay(
        replay={"batch_groups": 4, "max_staleness": 200, "max_inflight": 1000, "lease_s": 2.0}, run={"max_steps": 10_000}
    )
    url = process.start()

    async def go():
        async with ReplayClient(url) as client:
            incarnation = (await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))).incarnation
            await client.publish(PublishRequest(incarnation=incarnation, step=0, cut=0))
            puts = asyncio.Semaphore(0)
            actors = [Actor(client, f"a{i}", encoded_group, puts) for i in range(6)]
            enough = asyncio.Event()
            work = [asyncio.create_task(actor.work(enough)) for actor in actors]
            await kill_between_puts(process, puts, 4)
            enough.set()
            await asyncio.gather(*work)
            answers = {}
            for actor in actors:
                answers |= actor.answers
            accepted = {ticket for ticket, (_, result) in answers.items() if result == "accepted"}
            assert len(accepted) >= 4 * PUTS_BETWEEN_KILLS - 20
            process.kill()
            await asyncio.to_thread(process.start)
            for put, result in answers.values():
                assert (await client.put(put)).result == result, "a repeated put gets the same answer"
            status = await client.status()
            assert status.counters["groups_accepted"] == status.buffered == len(accepted)
            groups = {}
            for cut in range(status.buffered // 4):
                request = CutRequest(incarnation=incarnation, cut=cut, step=cut, wait_s=5.0)
                groups[cut] = (await client.cut(request)).groups
            got = [group for cut in groups.values() for group in cut]
            assert len(got) == len(set(got)), "nothing is trained twice"
            assert set(got) <= {put.group for put, result in answers.values() if result == "accepted"}
            assert len(got) == len(accepted) // 4 * 4
            process.kill()
            await asyncio.to_thread(process.start)
            for cut, before in groups.items():
                request = CutRequest(incarnation=incarnation, cut=cut, step=cut, wait_s=5.0)
                assert (await client.cut(request)).groups == before, "the same cut is the same groups"

    asyncio.run(go())
    assert process.stop() == 0


def test_leases_survive_a_restart_and_are_renewed(replay, encoded_group):
    process = replay(replay={"lease_s": 3.0})
    url = process.start()

    async def go():
        async with ReplayClient(url) as client:
            await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))
            await client.publish(PublishRequest(incarnation=1, step=0, cut=0))
            fields = {"actor": "a", "want_evaluations": 0, "wait_s": 1.0, "known_policy": 1 << 32}
            tickets = (await client.lease(LeaseRequest(running=[], want=8, **fields))).tickets
            assert len(tickets) == 8
            process.kill()
            await asyncio.to_thread(process.start)
            running = [Running(ticket=t.ticket, attempt=1) for t in tickets[:4]]
            again = []
            async with asyncio.timeout(20):
                while len(again) < 4:
                    again += (await client.lease(LeaseRequest(running=running, want=8, **fields))).tickets
                    running += [Running(ticket=t.ticket, attempt=t.attempt) for t in again]
            assert {(t.ticket, t.attempt) for t in again} == {(t.ticket, 2) for t in tickets[4:]}
            put = PutRequest(actor="a", group=encoded_group(tickets[0]))
            assert (await client.put(put)).result == "accepted"

    asyncio.run(go())


def test_a_full_disk_ends_the_service_and_loses_nothing(replay, encoded_group, capfd):
    process = replay(replay={"max_staleness": 9})
    url = process.start(largest_file_kib=16)

    async def go():
        async with ReplayClient(url) as client:
            await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))
            await client.publish(PublishRequest(incarnation=1, step=0, cut=0))
            fields = {"actor": "a", "running": [], "want": 40, "want_evaluations": 0, "wait_s": 1.0}
            tickets = (await client.lease(LeaseRequest(**fields))).tickets
            puts = [PutRequest(actor="a", group=encoded_group(ticket)) for ticket in tickets]
            waiting = [asyncio.create_task(client.put(put)) for put in puts]
            assert await asyncio.to_thread(process.wait) == 1
            assert not all(task.done() for task in waiting)
            await asyncio.to_thread(process.start)
            async with asyncio.timeout(30):
                results = [reply.result for reply in await asyncio.gather(*waiting)]
            assert results == ["accepted"] * len(puts)
            assert (await client.status()).buffered == len(puts)

    asyncio.run(go())
    assert "the trajectory log cannot be written: File too large" in capfd.readouterr().err


def test_an_evaluation_whose_files_cannot_be_written_ends_the_service_and_is_kept_after_all(replay, encoded_group, tmp_path, capfd):
    process = replay(data={"eval": str(tmp_path / "eval.jsonl")})
    url = process.start()
    in_the_way = process.folder / "evaluations.jsonl"
    in_the_way.mkdir()

    async def go():
        async with ReplayClient(url) as client:
            await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))
            await client.publish(PublishRequest(incarnation=1, step=0, cut=0))
            asked = LeaseRequest(actor="a", running=[], want=0, want_evaluations=4, wait_s=1.0, version=1 << 32)
            tickets = (await client.lease(asked)).tickets
            puts = [client.put(PutRequest(actor="a", group=encoded_group(ticket))) for ticket in tickets]
            waiting = [asyncio.create_task(put) for put in puts]
            assert await asyncio.to_thread(process.wait) == 1
            in_the_way.rmdir()
            await asyncio.to_thread(process.start)
            async with asyncio.timeout(30):
                assert [reply.result for reply in await asyncio.gather(*waiting)] == ["evaluated"] * 4
                while not (results := (await client.status()).evaluations):
                    pass
            return results

    (result,) = asyncio.run(go())
    assert result.questions == 4
    (line,) = in_the_way.read_text().splitlines()
    assert json.loads(line)["questions"] == 4
    assert capfd.readouterr().err.splitlines() == ["replay: the evaluation files cannot be written: Is a directory"]


def test_a_polite_stop_does_not_wait_for_long_polls(replay):
    process = replay(replay={"poll_s": 60.0, "lease_s": 300.0})
    url = process.start()

    async def go():
        async with ReplayClient(url, retry_s=1.0) as client:
            poll = asyncio.create_task(client.lease(LeaseRequest(actor="a", running=[], want=1, want_evaluations=0, wait_s=60.0)))
            async with asyncio.timeout(20):
                while not (await client.status()).actors:
                    pass
                assert await asyncio.to_thread(process.stop) == 0
                assert (await poll).tickets == []

    asyncio.run(go())
