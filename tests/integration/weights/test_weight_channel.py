"""The weight channel between real processes over loopback: equal bytes, late, killed, silent, damaged and restarted."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
import torch

from async_search_rl.codec import encode_message
from async_search_rl.config.replay import WeightsSection
from async_search_rl.errors import ConfigError
from async_search_rl.http import client_session
from async_search_rl.weights.schema import OfferRequest, TensorSpec
from async_search_rl.weights.sender import WeightSender
from tests.integration.weights.channel import PATIENCE_S, Talking, channel, publish

pytestmark = pytest.mark.integration


def test_every_receiver_gets_equal_bytes_and_a_group_lasts_as_long_as_its_members() -> None:
    with channel() as c:
        receivers: dict[str, Talking] = {}
        epochs = []
        for count in (1, 2, 3):
            receivers[f"r{count}"] = c.receiver(f"r{count}", "--have", str(c.sender.current_version or 0))
            c.wait_until_polling(*receivers)
            for _ in range(2):
                staged, expected = c.publish(len(epochs))
                said = [receiver.wait_for("received", version=staged.version) for receiver in receivers.values()]
                assert [one["sums"] for one in said] == [[expected]] * count
                assert len({one["epoch"] for one in said}) == 1
                assert c.sender.stats()["members"] == count
                epochs.append(said[0]["epoch"])
                c.wait_until_polling(*receivers)
        assert epochs == sorted(epochs)
        assert epochs[0::2] == epochs[1::2]
        assert len(set(epochs)) == 3
        assert c.sender.stats()["aborted"] == 0


def test_all_workers_of_an_engine_are_members() -> None:
    with channel() as c:
        receiver = c.receiver("r0", "--workers", "3")
        staged, expected = c.publish(0)
        assert receiver.wait_for("received", version=staged.version)["sums"] == [expected] * 3
        assert c.sender.stats()["members"] == 3


def test_a_late_receiver_gets_the_staged_copy() -> None:
    with channel() as c:
        [early] = c.receivers(1)
        staged, expected = c.publish(0)
        first = early.wait_for("received", version=staged.version)
        late = c.receiver("late").wait_for("received", version=staged.version)
        assert late["sums"] == [expected]
        assert late["epoch"] != first["epoch"]
        assert early.events.empty()


def test_a_receiver_that_has_it_already_is_left_alone() -> None:
    with channel() as c:
        staged, _ = c.publish(0)
        receiver = c.receiver("r0", "--have", str(staged.version))
        c.wait_until_polling("r0")
        newer, expected = c.publish(1)
        assert receiver.wait_for("offer")["version"] == newer.version
        assert receiver.wait_for("received")["sums"] == [expected]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_dies_or_freezes_in_the_middle_costs_the_others_one_deadline_at_most(blow: signal.Signals) -> None:
    with channel(deadline_s=4.0) as c:
        [good] = c.receivers(1)
        bad = c.receiver("r1", "--stall", "transfer")
        c.wait_until_polling("r0", "r1")
        staged, expected = c.publish(0)
        began = time.monotonic()
        first = good.wait_for("offer")
        assert first["world"] == 3
        bad.wait_for("stalled")
        bad.process.send_signal(blow)
        said = good.wait_for("received", version=staged.version)
        assert time.monotonic() - began < 20.0
        assert said["sums"] == [expected]
        assert said["epoch"] > first["epoch"]
        assert c.sender.stats()["aborted"] >= 1
        newer, expected = c.publish(1)
        assert good.wait_for("received", version=newer.version)["sums"] == [expected]


def test_a_receiver_that_never_joins_is_left_out_at_the_deadline() -> None:
    with channel(deadline_s=3.0) as c:
        [good] = c.receivers(1)
        c.receiver("r1", "--stall", "join")
        c.wait_until_polling("r0", "r1")
        staged, expected = c.publish(0)
        began = time.monotonic()
        said = good.wait_for("received", version=staged.version)
        assert time.monotonic() - began >= 3.0
        assert said["sums"] == [expected]
        assert "silent" in c.sender.status()["receivers"]["r1"]["error"]
        assert c.sender.status()["error"] == "all members must join within 3 s"


def test_a_wedged_worker_is_served_alone_so_that_the_others_wait_for_it_once() -> None:
    with channel(deadline_s=10.0) as c:
        [good] = c.receivers(1)
        bad = c.receiver("r1", "--stall", "transfer")
        c.wait_until_polling("r0", "r1")
        c.publish(0)
        bad.wait_for("failed")
        good.wait_for("received")
        c.wait_until_polling("r0", "r1")
        for step in range(1, 4):
            staged, expected = c.publish(step)
            began = time.monotonic()
            assert good.wait_for("received", version=staged.version)["sums"] == [expected]
            assert time.monotonic() - began < 9.0, "less than the deadline, for which they would wait with it"


def test_a_newer_publication_replaces_a_queued_one() -> None:
    with channel(deadline_s=3.0) as c:
        [good] = c.receivers(1)
        slow = c.receiver("r1", "--stall", "join")
        c.wait_until_polling("r0", "r1")
        c.publish(0)
        slow.wait_for("offer")
        for step in range(1, 4):
            staged, expected = c.publish(step)
        said = good.wait_for("received")
        assert said["version"] == staged.version
        assert said["sums"] == [expected]
        assert c.sender.stats()["superseded"] == 2


def test_a_new_incarnation_wins_over_a_higher_step_at_another_address() -> None:
    with channel() as c:
        [receiver] = c.receivers(1)
        old, _ = c.publish(step=9, incarnation=1)
        receiver.wait_for("received", version=old.version)
        successor = c.new_sender()
        c.sender.close()
        receiver.move(successor.url)
        staged, expected = publish(successor, step=0, incarnation=2)
        said = receiver.wait_for("received")
        assert said["version"] == staged.version > old.version
        assert said["sums"] == [expected]


def test_a_damaged_bucket_is_refused_and_the_next_version_accepted() -> None:
    with channel() as c:
        [witness] = c.receivers(1)
        damaged, _ = c.publish(0)
        witness.wait_for("received")
        damaged.flats[-1].view(torch.int32)[17] ^= 1 << 30
        receiver = c.receiver("r1")
        failed = receiver.wait_for("failed")
        assert failed["version"] == damaged.version
        assert "digest of bucket" in failed["error"]
        assert "digest of bucket" in c.sender.status()["receivers"]["r1"]["error"]
        newer, expected = c.publish(1)
        said = receiver.wait_for("received")
        assert said["version"] == newer.version
        assert said["sums"] == [expected]


def test_a_learner_killed_in_the_middle_is_succeeded_by_its_next_incarnation() -> None:
    with channel() as c:
        learner = c.other_sender()
        receiver = c.receiver("r0", url=learner.wait_for("serving")["url"])
        offered = receiver.wait_for("offer")
        learner.wait_for("stalled")
        learner.process.kill()
        assert receiver.wait_for("failed")["version"] == offered["version"]
        receiver.move(c.sender.url)
        staged, expected = c.publish(step=0, incarnation=2)
        said = receiver.wait_for("received")
        assert said["version"] == staged.version > offered["version"]
        assert said["sums"] == [expected]


def test_a_receiver_that_the_transport_cannot_reach_is_told_so() -> None:
    with channel() as c:
        request = OfferRequest(receiver="r0", have=None, workers=2, device="cuda-a,cuda-b,cuda-c", wait_s=0.0)

        async def ask() -> str:
            async with (
                client_session(None, 10.0) as session,
                session.post(c.sender.url + "/offer", data=encode_message(request)) as r,
            ):
                return (await r.text()) if r.status == 400 else ""

        assert "device must name one device or one for each of 2 workers" in asyncio.run(ask())


def test_without_the_token_nothing_is_answered_and_with_it_everything_works() -> None:
    with channel(token="secret") as c:
        request = OfferRequest(receiver="thief", have=None, workers=1, device="cpu", wait_s=0.0)

        async def ask(token: str | None) -> int:
            async with (
                client_session(token, 10.0) as session,
                session.post(c.sender.url + "/offer", data=encode_message(request)) as r,
            ):
                return r.status

        assert asyncio.run(ask(None)) == 401
        assert asyncio.run(ask("other")) == 401
        assert asyncio.run(ask("secret")) == 200
        stranger = c.receiver("stranger", "--token", "other")
        assert stranger.process.wait(PATIENCE_S) != 0
        _, expected = c.publish(0)
        assert c.receiver("r0", "--token", "secret").wait_for("received")["sums"] == [expected]


def test_malformed_requests_change_nothing() -> None:
    with channel() as c:

        async def post(path: str, body: bytes) -> int:
            async with client_session(None, 10.0) as session, session.post(c.sender.url + path, data=body) as reply:
                return reply.status

        bodies = [b"", b"\x80\x04K\x01.", encode_message(TensorSpec(name="a", shape=(), dtype="float32"))]
        assert [asyncio.run(post(path, body)) for path in ("/offer", "/received") for body in bodies] == [400] * 6
        assert asyncio.run(post("/offer", b"x" * (1 << 20))) == 413
        assert c.sender.status()["receivers"] == {}


def test_only_loopback_is_served_without_a_token() -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        WeightSender(WeightsSection(host="0.0.0.0"), None).start()
    with pytest.raises(ConfigError, match="for a learner on the CPU, got 'nccl'"):
        WeightSender(WeightsSection(transport="nccl"), None)


def test_closing_is_bounded_while_a_member_is_silent() -> None:
    with channel(deadline_s=120.0) as c:
        stalled = c.receiver("r0", "--stall", "transfer")
        c.wait_until_polling("r0")
        c.publish(0)
        stalled.wait_for("stalled")
        began = time.monotonic()
        c.sender.close(timeout_s=5.0)
        assert time.monotonic() - began < 10.0
