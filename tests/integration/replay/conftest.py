"""A real replay process with its files, for this folder's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from async_search_rl.codec import encode_group
from async_search_rl.questions import Question, write_questions
from async_search_rl.trajectory import Group, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[3]
START_S = 30.0


def _group(ticket, actor="a", rewards=(1.0, 0.0), version=1 << 32, sampled=4, seed=0):
    """An encoded group for ``ticket``; ``seed`` makes its tokens its own, a reward of None a fault."""
    length = 3 + sampled
    mask = np.arange(length) >= 3
    tokens = np.random.default_rng([ticket.ticket, ticket.attempt, seed]).integers(0, 1000, length).astype(np.int32)
    trajectories = tuple(
        Trajectory(
            token_ids=tokens.copy(),
            loss_mask=mask.copy(),
            behaviour_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int64),
            prompt_length=3,
            turns=(Turn(start=3, end=length, action="answer"),),
            reward=reward,
            reward_parts={} if reward is None else {"exact_match": reward},
            outcome="fault" if reward is None else "answered",
            fault="the search failed" if reward is None else None,
        )
        for reward in (rewards if ticket.kind == "train" else rewards[:1])
    )
    group = Group(
        ticket=ticket.ticket,
        attempt=ticket.attempt,
        question_id=ticket.question.id,
        actor=actor,
        evaluation=ticket.evaluation,
        trajectories=trajectories,
    )
    return encode_group(group)


class Process:
    """`bin/replay` on a folder of its own; started, killed and started again by the test."""

    def __init__(self, folder: Path, **sections) -> None:
        self.folder = folder / "r"
        write_questions(folder / "train.jsonl", [Question(id=f"q{i}", question=f"Q{i}?", answers=("a",)) for i in range(40)])
        write_questions(folder / "eval.jsonl", [Question(id=f"e{i}", question=f"E{i}?", answers=("a",)) for i in range(4)])
        keys = {
            "run": {"name": "r", "dir": str(folder)},
            "data": {"train": str(folder / "train.jsonl")},
            "rollout": {"group_size": 2},
            "replay": {"batch_groups": 4, "poll_s": 5.0},
        }
        for section, values in sections.items():
            keys[section] = {**keys.get(section, {}), **values}
        self._argv = [sys.executable, str(ROOT / "bin" / "replay"), str(folder / "c.toml")]
        lines = []
        for section, values in keys.items():
            lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
        (folder / "c.toml").write_text("\n".join(lines) + "\n")
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, largest_file_kib: int | None = None) -> str:
        """Start and wait for the address; no file can grow beyond ``largest_file_kib``, as on a full disk."""
        announced = self.folder / "replay.url"
        before = announced.stat().st_mtime_ns if announced.exists() else 0
        limited = ["bash", "-c", f'ulimit -f {largest_file_kib}; exec "$@"', "bash"] if largest_file_kib else []
        self._child = subprocess.Popen([*limited, *self._argv])
        deadline = time.monotonic() + START_S
        while not announced.exists() or announced.stat().st_mtime_ns == before:
            assert self._child.poll() is None, "the service ended before it was ready"
            assert time.monotonic() < deadline, "the service was not ready in time"
            time.sleep(0.02)
        return announced.read_text().strip()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A start that is expected to fail."""
        return subprocess.run([*self._argv, *arguments], capture_output=True, text=True, timeout=START_S, check=False)

    def kill(self) -> None:
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def wait(self) -> int:
        """The exit code, once it ends by itself."""
        assert self._child is not None
        return self._child.wait(START_S)

    def stop(self) -> int:
        assert self._child is not None
        self._child.terminate()
        return self._child.wait(START_S)

    def close(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self.kill()


def _toml(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)


@pytest.fixture
def replay(tmp_path):
    """Makes :class:`Process`; what it made is killed at the end."""
    made = []

    def make(**sections):
        made.append(Process(tmp_path, **sections))
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.fixture(scope="session")
def encoded_group():
    return _group
