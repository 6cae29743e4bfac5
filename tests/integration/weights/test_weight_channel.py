"""The weight channel between real processes over loopback: equal bytes, late, killed, silent, damaged and restarted."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from async_search_rl.codec import encode_message
from async_search_rl.config.replay import WeightsSection
from async_search_rl.errors import ConfigError
from async_search_rl.http import client_session
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.plan import plan_buckets
from async_search_rl.weights.schema import OfferRequest, TensorSpec
from async_search_rl.weights.sender import WeightSender
from async_search_rl.weights.staging import StagedWeights

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
RECEIVER = Path(__file__).with_name("receiver_process.py")
SENDER = Path(__file__).with_name("sender_process.py")
PATIENCE_S = 60.0
SPECS = [TensorSpec(name="embedding", shape=(700, 64), dtype="bfloat16")] + [
    TensorSpec(name=f"layer.{i}", shape=(256, 300 + i), dtype="float32") for i in range(20)
]
PLAN = plan_buckets(SPECS, 1 << 20)


class Talking:
    """A process that prints events, and what it said so far."""

    def __init__(self, script: Path, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(msgspec.json.decode(line))
        self.events.put({"event": "exit"})

    def wait_for(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next event of this kind, with these fields."""
        ends_at = time.monotonic() + PATIENCE_S
        while True:
            said: dict[str, Any] = self.events.get(timeout=max(0.0, ends_at - time.monotonic()))
            if said["event"] == event and fields.items() <= said.items():
                return said
            assert said["event"] != "exit", f"the process ended before {event}"

    def move(self, url: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(url + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Channel:
    """A sender in this process and receivers in others."""

    def __init__(self, stack: ExitStack, **section: Any) -> None:
        self._stack = stack
        self.sender = self.new_sender(**section)

    def new_sender(self, token: str | None = None, **section: Any) -> WeightSender:
        sender = WeightSender(msgspec.convert({"deadline_s": 30.0, **section}, WeightsSection), token)
        sender.start()
        self._stack.callback(sender.close)
        return sender

    def receiver(self, name: str, *options: str, url: str | None = None) -> Talking:
        receiver = Talking(RECEIVER, url or self.sender.url, name, *options)
        self._stack.callback(receiver.end)
        return receiver

    def other_sender(self) -> Talking:
        """A sender in another process, which freezes in the middle of its first broadcast."""
        sender = Talking(SENDER)
        self._stack.callback(sender.end)
        return sender

    def receivers(self, count: int) -> list[Talking]:
        """So many receivers, all of them polling."""
        started = [self.receiver(f"r{i}") for i in range(count)]
        self.wait_until_polling(*[f"r{i}" for i in range(count)])
        return started

    def wait_until_polling(self, *names: str) -> None:
        ends_at = time.monotonic() + PATIENCE_S
        with self.sender._changed:
            assert self.sender._changed.wait_for(lambda: self._polling() >= set(names), ends_at - time.monotonic())

    def _polling(self) -> set[str]:
        return {name for name, r in self.sender.status()["receivers"].items() if r["state"] == "polling"}

    def publish(self, step: int, incarnation: int = 1) -> tuple[StagedWeights, str]:
        """Publish random weights; the staged copy, and the checksum that receivers must arrive at."""
        return publish(self.sender, step, incarnation)


def publish(sender: WeightSender, step: int, incarnation: int = 1) -> tuple[StagedWeights, str]:
    sys.path.insert(0, str(RECEIVER.parent))
    try:
        from receiver_process import checksums
    finally:
        sys.path.pop(0)
    generator = torch.Generator().manual_seed(1000 * incarnation + step)
    staged = sender.acquire_buffers(PLAN, PolicyVersion(incarnation, step).pack())
    weights = {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in SPECS}
    for name, tensor in weights.items():
        staged.write(name, tensor)
    expected = checksums([(spec.name, weights[spec.name]) for bucket in PLAN for spec in bucket])
    began = time.monotonic()
    sender.publish(staged)
    assert time.monotonic() - began < 0.5
    return staged, expected


@contextmanager
def channel(**section: Any) -> Iterator[Channel]:
    with ExitStack() as stack:
        yield Channel(stack, **section)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_receiver_gets_equal_bytes_and_keeps_its_group(count: int) -> None:
    with channel() as c:
        receivers = c.receivers(count)
        epochs = set()
        for step in range(3):
            staged, expected = c.publish(step)
            assert c.sender.wait_received(staged.version, PATIENCE_S)
            for receiver in receivers:
                said = receiver.wait_for("received", version=staged.version)
                assert said["sums"] == [expected]
                epochs.add(said["epoch"])
            c.wait_until_polling(*[f"r{i}" for i in range(count)])
        assert len(epochs) == 1
        assert c.sender.stats()["aborted"] == 0
        assert c.sender.stats()["members"] == count


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


def test_a_wedged_worker_is_served_alone_so_that_the_others_wait_for_it_once() -> None:
    with channel(deadline_s=5.0) as c:
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
            assert time.monotonic() - began < 4.5


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
        assert receiver.wait_for("failed")["version"] == damaged.version
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
        staged, expected = c.publish(0)
        assert c.receiver("r0", "--token", "secret").wait_for("received")["sums"] == [expected]
        assert not c.sender.wait_received(staged.version + 1, 0.0)


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
