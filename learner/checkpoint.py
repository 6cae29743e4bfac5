"""Checkpoints: everything a learner needs to go on as if it had never stopped.

In: the networks' engines and where training stands. Out: folders ``checkpoints/step-00000050`` under the run's, each with
DeepSpeed's state of policy and critic, the random state of every rank, and ``state.json``. A checkpoint is written aside and moved
into place, so that there is a whole one or none. The newest few and the best are kept; a thread copies finished ones elsewhere.

The learning-rate schedule has no state: it follows from the step.
"""

from __future__ import annotations

import logging
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from async_search_rl.config import Config, to_toml
from async_search_rl.errors import CheckpointError
from async_search_rl.files import sync, write_whole
from learner.deepspeed_checkpoint import to_universal
from learner.deepspeed_engine import Engine
from learner.ranks import Ranks

_log = logging.getLogger(__name__)
_PREFIX = "step-"
_SCORES = "scores.json"


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """``state.json``: where training stands, and what must be the same to go on."""

    step: int
    """Trained batches."""
    cut: int
    """Batches that are in these weights; the next to ask for."""
    incarnation: int
    """Start of the learner that wrote it."""
    world: int
    """Ranks that wrote it."""
    zero_stage: int
    """`learner.zero_stage`."""
    dtype: str
    """`model.dtype`."""
    networks: list[str]
    """Names of the engines: policy, and critic where there is one."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, config: Config, engines: dict[str, Engine], ranks: Ranks) -> None:
        self._config, self._engines, self._ranks = config, engines, ranks
        self.folder = config.run.folder / "checkpoints"
        self._copies: dict[Path, threading.Thread] = {}

    def save(self, step: int, cut: int, incarnation: int) -> int:
        """Write the checkpoint of ``step`` and forget old ones; the cut of the oldest that is kept. Collective."""
        final = self.folder / f"{_PREFIX}{step:08d}"
        partial = final.with_name(f".partial-{final.name}")
        if self._ranks.first:
            for unfinished in self.folder.glob(".*-step-*"):
                shutil.rmtree(unfinished)
            partial.mkdir(parents=True)
        self._ranks.barrier()
        for name, engine in self._engines.items():
            engine.save(partial / name)
        torch.save(random_state(self._ranks.device), partial / f"random-{self._ranks.rank}.pt")
        self._ranks.barrier()
        if self._ranks.first:
            state = CheckpointState(
                step=step,
                cut=cut,
                incarnation=incarnation,
                world=self._ranks.world,
                zero_stage=self._config.learner.zero_stage,
                dtype=self._config.model.dtype,
                networks=list(self._engines),
            )
            (partial / "config.toml").write_text(to_toml(self._config), encoding="utf-8")
            (partial / "state.json").write_bytes(msgspec.json.encode(state))
            move_into_place(partial, final)
            self._copy(final)
            self._forget_old()
        self._ranks.barrier()
        return min(read_state(kept).cut for kept in list_checkpoints(self.folder))

    def load(self, checkpoint: Path) -> CheckpointState:
        """Put the engines, and at the same world size this rank's random state, where ``checkpoint`` has them. Collective.

        One of another world size is read by way of DeepSpeed's universal form, which is removed afterwards.
        """
        state = read_state(checkpoint)
        universal = make_universal(checkpoint, self._ranks)
        for name, engine in self._engines.items():
            engine.load((universal or checkpoint) / name, universal=universal is not None)
        if universal is not None:
            self._ranks.barrier()
            if self._ranks.first:
                shutil.rmtree(universal)
        else:
            set_random_state(
                torch.load(checkpoint / f"random-{self._ranks.rank}.pt", weights_only=True, map_location="cpu"), self._ranks.device
            )
        return state

    def note_score(self, step: int, exact_match: float) -> None:
        """The weights after ``step`` batches have this held-out exact match; the checkpoint of the best is kept. Rank 0."""
        scores = read_scores(self.folder) | {step: exact_match}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / _SCORES, msgspec.json.encode({str(at): score for at, score in scores.items()}))

    def wait_for_copies(self, timeout_s: float) -> None:
        """Wait for copies under way, each at most ``timeout_s``; one that is later still is logged."""
        for checkpoint, copy in self._copies.items():
            copy.join(timeout_s)
            if copy.is_alive():
                _log.error("checkpoint.copy_to: %s was not copied within %g s", checkpoint, timeout_s)

    def _forget_old(self) -> None:
        self._copies = {path: copy for path, copy in self._copies.items() if copy.is_alive()}
        found = list_checkpoints(self.folder)
        keep = {*found[-self._config.checkpoint.keep :], *self._copies}
        scores = read_scores(self.folder)
        scored = [c for c in found if step_of(c) in scores]
        if self._config.checkpoint.keep_best and scored:
            keep.add(max(scored, key=lambda c: (scores[step_of(c)], step_of(c))))
        for checkpoint in found:
            if checkpoint not in keep:
                forgotten = checkpoint.with_name(f".forgotten-{checkpoint.name}")
                checkpoint.rename(forgotten)  # At once: half of a checkpoint must not be taken for one.
                shutil.rmtree(forgotten)

    def _copy(self, checkpoint: Path) -> None:
        if not self._config.checkpoint.copy_to:
            return
        target = Path(self._config.checkpoint.copy_to) / self._config.run.name
        copy = threading.Thread(target=copy_checkpoint, args=(checkpoint, target), name="checkpoint-copy", daemon=True)
        copy.start()
        self._copies[checkpoint] = copy


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints under ``folder``, oldest first."""
    return sorted((p for p in folder.glob(f"{_PREFIX}*") if (p / "state.json").is_file()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Trained batches of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def read_state(checkpoint: Path) -> CheckpointState:
    """``state.json`` of a checkpoint.

    Raises:
        CheckpointError: when it is missing or not one.
    """
    try:
        return msgspec.json.decode((checkpoint / "state.json").read_bytes(), type=CheckpointState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{checkpoint} must be a checkpoint with state.json, got: {error}") from error


def read_scores(folder: Path) -> dict[int, float]:
    """Held-out exact match by step."""
    path = folder / _SCORES
    return {int(step): score for step, score in msgspec.json.decode(path.read_bytes()).items()} if path.is_file() else {}


def checkpoint_to_resume(config: Config) -> Path | None:
    """The newest checkpoint of the run, by the rules of `run.resume`.

    Raises:
        CheckpointError: `must` without a checkpoint, `never` with one, or one of another ZeRO stage, dtype or set of networks.
    """
    folder = config.run.folder / "checkpoints"
    found = list_checkpoints(folder)
    if config.run.resume == "never" and found:
        raise CheckpointError(f"run.resume = 'never' needs a run without checkpoints, got {found[-1]}")
    if config.run.resume == "must" and not found:
        raise CheckpointError(f"run.resume = 'must' needs a checkpoint under {folder}, got none")
    if not found:
        return None
    state = read_state(found[-1])
    wanted = {
        "learner.zero_stage": (config.learner.zero_stage, state.zero_stage),
        "model.dtype": (config.model.dtype, state.dtype),
        "the networks": (["policy", "critic"] if config.uses_critic else ["policy"], state.networks),
    }
    for key, (now, then) in wanted.items():
        if now != then:
            raise CheckpointError(f"{key} must be {then!r} to resume from {found[-1]}, got {now!r}")
    return found[-1]


def make_universal(checkpoint: Path, ranks: Ranks) -> Path | None:
    """The universal form of ``checkpoint``, written aside, where that is of another world size; else ``None``. Collective."""
    state = read_state(checkpoint)
    if state.world == ranks.world:
        return None
    out = checkpoint.with_name(f".universal-{checkpoint.name}")
    if ranks.first:
        shutil.rmtree(out, ignore_errors=True)
        for name in state.networks:
            to_universal(checkpoint / name, out / name)
    ranks.barrier()
    return out


def copy_checkpoint(checkpoint: Path, target: Path) -> None:
    """Copy ``checkpoint`` into the folder ``target``, where it appears whole or not at all; a failure is logged."""
    partial = target / f".partial-{checkpoint.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint, partial)
        move_into_place(partial, target / checkpoint.name)
    except OSError as error:
        _log.error("checkpoint.copy_to: %s was not copied to %s: %s", checkpoint, target, error)


def move_into_place(partial: Path, final: Path) -> None:
    """Make ``partial`` durable and give it its name."""
    for path in (*partial.rglob("*"), partial):
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    sync(final.parent)


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the generators of Python, NumPy and torch."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Inverse of :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
