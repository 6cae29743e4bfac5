"""A sender here and receivers in other processes, for tests of the weight channel on any device."""

from __future__ import annotations

import hashlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

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
_CHECK_S = 0.25
_LOG_LINES = 40
SPECS = [TensorSpec(name="embedding", shape=(700, 64), dtype="bfloat16")] + [
    TensorSpec(name=f"layer.{i}", shape=(256, 300 + i), dtype="float32") for i in range(20)
]
PLAN = plan_buckets(SPECS, 1 << 20)


class Talking:
    """A process that prints events, what it said so far, and the end of its log."""

    def __init__(self, script: Path, *arguments: str) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_events, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_log, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_events(self, stdout: IO[str]) -> None:
        for line in stdout:
            if line.startswith("{"):
                self.events.put(msgspec.json.decode(line))
            else:
                self._log.append(line)
        self.events.put({"event": "exit"})

    def _read_log(self, stderr: IO[str]) -> None:
        self._log.extend(stderr)

    def wait_for(
        self, event: str, *, fatal: tuple[str, ...] = (), check: Callable[[], None] = lambda: None, **fields: Any
    ) -> dict[str, Any]:
        """The next event of this kind, with these fields.

        Its end, or an event of a ``fatal`` kind, is an error at once; ``check`` is called now and then and may raise.
        """
        ends_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                said = self.events.get(timeout=_CHECK_S)
            except queue.Empty:
                check()
                assert time.monotonic() < ends_at, self.account(f"it must say {event} {fields} within {PATIENCE_S:g} s")
                continue
            if said["event"] == event and fields.items() <= said.items():
                return said
            assert said["event"] not in ("exit", *fatal), self.account(f"it must say {event} {fields}, got {said}")

    def require_life(self) -> None:
        """Raise with the end of its log if the process has ended."""
        assert self.process.poll() is None, self.account("the process must live")

    def account(self, what: str) -> str:
        """``what``, how the process stands, and the end of its log."""
        if self.process.poll() is not None:
            for reader in self._readers:
                reader.join(_CHECK_S)
        return f"{what}; exit status {self.process.poll()}, end of its log:\n{''.join(self._log.copy())}"

    def move(self, url: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(url + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class Channel:
    """A sender in this process and receivers in others."""

    def __init__(self, stack: ExitStack, device: str, token: str | None, **section: Any) -> None:
        self._stack = stack
        self._device = device
        self._receivers: dict[str, Talking] = {}
        self.sender = self.new_sender(token, **section)

    def new_sender(self, token: str | None = None, **section: Any) -> WeightSender:
        sender = WeightSender(msgspec.convert({"deadline_s": 30.0, **section}, WeightsSection), token, self._device)
        sender.start()
        self._stack.callback(sender.close)
        return sender

    def receiver(self, name: str, *options: str, url: str | None = None) -> Talking:
        receiver = Talking(RECEIVER, url or self.sender.url, name, *options)
        self._stack.callback(receiver.end)
        self._receivers[name] = receiver
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
        while True:
            with self.sender._changed:
                if self.sender._changed.wait_for(lambda: self._polling() >= set(names), _CHECK_S):
                    return
            for name in names:
                self._receivers[name].require_life()
            assert time.monotonic() < ends_at, f"{names} must poll within {PATIENCE_S:g} s: {self.sender.status()}"

    def received(self, receiver: Talking, version: int) -> dict[str, Any]:
        """What the receiver says when it holds ``version``; where either side fails before, an error at once, with the reason."""
        return receiver.wait_for("received", fatal=("failed",), check=self._require_no_abort, version=version)

    def _require_no_abort(self) -> None:
        status = self.sender.status()
        assert not status["error"], status

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
