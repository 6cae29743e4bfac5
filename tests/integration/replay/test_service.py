"""The service over real sockets: a small run from start to end, refusals, tokens, starts that must fail."""

import asyncio
import json
import os
import socket
from collections import Counter

import aiohttp
import pytest

from async_search_rl.codec import decode, decode_group, encode
from async_search_rl.errors import SchemaError, TooLargeError
from async_search_rl.http import UnauthorizedError
from async_search_rl.metrics import unknown_names
from async_search_rl.replay.client import BlockingReplayClient, ReplayClient
from async_search_rl.replay.schema import (
    AcknowledgeRequest,
    CutRequest,
    FinishRequest,
    LeaseRequest,
    PublishRequest,
    PutRequest,
    Running,
    StartRequest,
)

pytestmark = pytest.mark.integration
STEPS = 3


async def act(url, encoded_group, name, results):
    """An actor that generates at once, with the weights of its last lease; why it stopped. ``results`` counts how its puts end."""
    policy, held = None, []
    async with ReplayClient(url) as client:
        while True:
            running = [Running(ticket=t.ticket, attempt=t.attempt) for t in held]
            reply = await client.lease(
                LeaseRequest(
                    actor=name, running=running, want=2, want_evaluations=2, wait_s=5.0, version=policy, known_policy=policy
                )
            )
            if reply.stop:
                return reply.stop
            policy = reply.policy.version if reply.policy else policy
            held += reply.tickets
            ready = [t for t in held if (t.version or policy) == policy and t.min_step <= policy & 0xFFFFFFFF]
            for ticket in ready:
                held.remove(ticket)
                rewards = (1.0, 1.0) if ticket.ticket % 5 == 0 else (1.0, 0.0)
                group = encoded_group(ticket, name, rewards, version=policy)
                results[(await client.put(PutRequest(actor=name, group=group))).result] += 1


def learn(url):
    """A learner that trains nothing; the evaluations it was told of."""
    evaluations = []
    with BlockingReplayClient(url) as client:
        incarnation = client.start(StartRequest(run="r", step=0, cut=0, weights_url="http://w")).incarnation
        client.publish(PublishRequest(incarnation=incarnation, step=0, cut=0))
        for step in range(STEPS):
            reply = client.cut(CutRequest(incarnation=incarnation, cut=step, step=step, wait_s=5.0))
            evaluations += reply.evaluations
            assert len(reply.groups) == 4
            client.publish(PublishRequest(incarnation=incarnation, step=step + 1, cut=step + 1, metrics={"loss": 0.5}))
            client.acknowledge(AcknowledgeRequest(incarnation=incarnation, step=step + 1, cut=step + 1, oldest_cut=step))
        reply = client.finish(FinishRequest(incarnation=incarnation, step=STEPS, wait_s=5.0))
        assert reply.done
        return evaluations + reply.evaluations, client.status()


def test_a_run_from_start_to_end(replay, encoded_group, tmp_path):
    process = replay(run={"max_steps": STEPS}, data={"eval": str(tmp_path / "eval.jsonl")}, logging={"keep_trajectories": 3})
    url = process.start()

    results = Counter()

    async def go():
        actors = [asyncio.create_task(act(url, encoded_group, name, results)) for name in ("a", "b")]
        learned = await asyncio.to_thread(learn, url)
        return learned, await asyncio.gather(*actors)

    (evaluations, status), stops = asyncio.run(asyncio.wait_for(go(), 60))
    assert stops == ["finished", "finished"]
    assert [(e.round, e.version & 0xFFFFFFFF, e.questions) for e in evaluations] == [(0, 0, 4), (1, STEPS, 4)]
    assert status.state == "finished"
    assert status.learner == {"loss": 0.5}
    counters = status.counters
    # One actor may run ahead of the other, whose groups then go stale: counted at the put, or later when a batch is cut.
    assert set(results) <= {"accepted", "filtered", "evaluated", "stale"}
    assert counters["groups_trained"] == 4 * STEPS
    assert counters["groups_accepted"] == results["accepted"]
    assert counters["groups_accepted"] - counters["groups_trained"] == counters["groups_stale"] - results["stale"]
    assert counters["groups_dropped"] == counters["groups_cancelled"] == 0
    assert counters["max_lag"] <= 1
    assert sum(status.staleness.values()) == 4 * STEPS
    assert unknown_names("replay", counters) == unknown_names("recent", status.recent) == []
    assert process.stop() == 0

    lines = [json.loads(line) for line in (process.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["round"], line["means"]["exact_match"]) for line in lines] == [(0, 1.0), (1, 1.0)]
    for name, step in (("before", 0), ("after", STEPS)):
        groups = [decode_group(g) for g in decode((process.folder / f"trajectories_{name}.msgpack").read_bytes())]
        assert [g.question_id for g in groups] == ["e0", "e1", "e2"]
        assert {g.oldest_version.step for g in groups} == {step}


def test_bad_messages_are_refused_by_field_and_change_nothing(replay, encoded_group):
    process = replay(replay={"max_group_mib": 1})
    url = process.start()

    async def go():
        async with ReplayClient(url) as client, aiohttp.ClientSession() as session:
            await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))
            await client.publish(PublishRequest(incarnation=1, step=0, cut=0))
            (ticket,) = (await client.lease(LeaseRequest(actor="a", running=[], want=1, want_evaluations=0, wait_s=1.0))).tickets
            before = await client.status()
            good = decode(encoded_group(ticket))
            damages = {
                "trajectories\\[0\\].behaviour_logprobs": lambda g: g["trajectories"][0].pop("behaviour_logprobs"),
                "question_id": lambda g: g.update(question_id="other"),
                "trajectories": lambda g: g["trajectories"].pop(),
                "evaluation": lambda g: g.update(evaluation=3),
            }
            for field, damage in damages.items():
                damaged = {**good, "trajectories": [dict(t) for t in good["trajectories"]]}
                damage(damaged)
                with pytest.raises(SchemaError, match=field.split("\\")[0]):
                    await client.put(PutRequest(actor="a", group=encode(damaged)))
            with pytest.raises(TooLargeError):
                await client.put(PutRequest(actor="a", group=b"x" * (3 << 20)))
            with pytest.raises(SchemaError, match="run must be 'r'"):
                await client.start(StartRequest(run="other", step=0, cut=0, weights_url="w"))
            async with session.post(f"{url}/lease", data=encode({"actor": "a"})) as reply:
                assert reply.status == 400
                assert "running" in (await reply.json())["message"]
            async with session.post(f"{url}/put", data=b"\x80\x04pickle") as reply:
                assert reply.status == 400
            after = await client.status()
            assert after.counters == before.counters
            assert (await client.put(PutRequest(actor="a", group=encoded_group(ticket)))).result == "accepted"
            async with session.get(f"{url}/metrics") as reply:
                assert "async_search_rl_replay_groups_accepted 1.0" in await reply.text()
            async with session.get(f"{url}/status", headers={"Accept": "application/json"}) as reply:
                assert (await reply.json())["buffered"] == 1

    asyncio.run(go())


def test_a_waiting_lease_is_answered_when_there_is_room(replay, encoded_group):
    process = replay(replay={"batch_groups": 1, "max_staleness": 0, "poll_s": 20.0, "lease_s": 60.0})
    url = process.start()

    async def go():
        async with ReplayClient(url) as client:
            await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))
            await client.publish(PublishRequest(incarnation=1, step=0, cut=0))
            fields = {"actor": "a", "running": [], "want": 1, "want_evaluations": 0, "wait_s": 20.0, "known_policy": 1 << 32}
            (ticket,) = (await client.lease(LeaseRequest(**fields))).tickets
            waiting = asyncio.create_task(client.lease(LeaseRequest(**fields)))
            cut = asyncio.create_task(client.cut(CutRequest(incarnation=1, cut=0, step=0, wait_s=20.0)))
            async with asyncio.timeout(10):
                put = await client.put(PutRequest(actor="a", group=encoded_group(ticket), want=1))
                assert (put.result, put.tickets) == ("accepted", [])
                assert len((await cut).groups) == 1
                assert not waiting.done()
                await client.publish(PublishRequest(incarnation=1, step=1, cut=1))
                reply = await waiting
            assert [t.min_step for t in reply.tickets] == [1]
            assert reply.policy.version == (1 << 32) + 1

    asyncio.run(go())


def test_every_request_needs_the_token(replay, monkeypatch):
    monkeypatch.setenv("ASYNC_SEARCH_RL_TOKEN", "secret")
    url = replay().start()

    async def go():
        async with ReplayClient(url, "secret") as client:
            assert (await client.status()).state == "waiting for a learner"
        for token in (None, "other"):
            async with ReplayClient(url, token) as client:
                with pytest.raises(UnauthorizedError):
                    await client.status()

    asyncio.run(go())


def test_starts_that_cannot_work_say_why_in_one_line(replay, tmp_path):
    process = replay()
    url = process.start()

    async def start():
        async with ReplayClient(url) as client:
            await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))

    asyncio.run(start())
    refusals = {("--set", "run.seed=0"): "already uses"}
    assert_refused(process, refusals)
    assert process.stop() == 0
    assert_refused(
        process,
        {
            ("--set", "run.resume=never"): "run.resume",
            ("--set", "run.seed=1"): "run.seed must be 0",
            ("--set", "data.train=missing.jsonl"): "missing.jsonl",
            ("--set", "data.train="): "data.train",
            ("--set", "replay.host=0.0.0.0"): "token",
            ("--set", "replay.batch_groups=0"): "replay.batch_groups",
            ("--set", f"run.dir={tmp_path / 'train.jsonl'}"): "run.dir",
        },
    )
    segment = next((process.folder / "replay").glob("segment-*.log"))
    os.rename(segment, segment.with_name("segment-00000009.log"))
    (process.folder / "replay" / "segment-00000007.log").write_bytes(b"")
    assert_refused(process, {(): "must follow one another"})


def test_a_stop_that_a_lease_brings_about_is_told_to_the_waiting_learner_at_once(replay, encoded_group):
    url = replay(replay={"max_attempts": 1, "poll_s": 20.0, "max_inflight": 40}).start()

    async def go():
        async with ReplayClient(url) as client:
            await client.start(StartRequest(run="r", step=0, cut=0, weights_url="w"))
            await client.publish(PublishRequest(incarnation=1, step=0, cut=0))
            asked = LeaseRequest(actor="a", running=[], want=8, want_evaluations=0, wait_s=0.0)
            cut = asyncio.create_task(client.cut(CutRequest(incarnation=1, cut=0, step=0, wait_s=20.0)))
            while not (reply := await client.lease(asked)).stop:
                for ticket in reply.tickets:
                    group = encoded_group(ticket, rewards=(None, None))
                    assert (await client.put(PutRequest(actor="a", group=group))).result == "failed"
            return reply.stop, (await cut).stop

    told_actor, told_learner = asyncio.run(asyncio.wait_for(go(), 15))
    assert "40 training questions are parked" in told_actor
    assert told_learner == told_actor


@pytest.mark.parametrize("left", [b"http://127.0.0.1:99999", b"\xff\xfe", b""])
def test_an_unusable_address_that_a_run_left_behind_is_replaced(replay, left):
    process = replay()
    process.folder.mkdir()
    (process.folder / "replay.url").write_bytes(left)
    assert process.start().startswith("http://127.0.0.1:")
    assert process.stop() == 0


def test_a_port_that_is_taken_at_the_services_own_address_is_not_asked_for_again(replay):
    process = replay(replay={"host": "127.0.0.2"})
    process.folder.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        last = f"http://127.0.0.2:{taken.getsockname()[1]}"
        (process.folder / "replay.url").write_text(last)
        url = process.start()
    assert url.startswith("http://127.0.0.2:")
    assert url != last
    assert process.stop() == 0


def assert_refused(process, refusals):
    for arguments, reason in refusals.items():
        ended = process.run(*arguments)
        assert ended.returncode != 0
        assert reason in ended.stderr
        assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
