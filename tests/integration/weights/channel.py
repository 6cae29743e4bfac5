"""A sender here and receivers in other processes, for tests of the weight channel on any device."""

from __future__ import annotations

import hashlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from async_search_rl.config.replay import WeightsSection
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.plan import plan_buckets
from async_search_rl.weights.schema import TensorSpec
from async_search_rl.weights.sender import WeightSender
from async_search_rl.weights.staging import StagedWeights

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

    def __init__(self, stack: ExitStack, device: str, token: str | None, **section: Any) -> None:
        self._stack = stack
        self._device = device
        self.sender = self.new_sender(token, **section)

    def new_sender(self, token: str | None = None, **section: Any) -> WeightSender:
        sender = WeightSender(msgspec.convert({"deadline_s": 30.0, **section}, WeightsSection), token, self._device)
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
def channel(device: str = "cpu", token: str | None = None, **section: Any) -> Iterator[Channel]:
    """A started sender with these settings; everything is closed and killed at the end."""
    with ExitStack() as stack:
        yield Channel(stack, device, token, **section)


def checksums(pairs: list[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 of names, shapes, dtypes and bytes."""
    state = hashlib.sha256()
    for name, tensor in pairs:
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()
