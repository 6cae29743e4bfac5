"""The figures of a step that are not the loss's own: what the batch was like, how fast it was, how much memory it took.

In: batches, seconds, the model's shape. Out: ``{name: number}`` by the names of :data:`async_search_rl.metrics.METRICS`, the same
names every step; and their way to ``metrics/learner.jsonl`` and Weights & Biases.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import torch

from async_search_rl.config import Config
from async_search_rl.errors import ConfigError
from async_search_rl.json_lines import JsonLines
from async_search_rl.replay.schema import EvaluationResult
from async_search_rl.trajectory import Outcome
from async_search_rl.version import PolicyVersion, lag
from learner.batch import Batch
from learner.flops import ModelShape, peak_flops, training_flops


def batch_figures(batch: Batch, step: int) -> dict[str, Any]:
    """What the batch was like, at the start of the step that follows ``step`` trained batches."""
    used = [t for t in batch.trajectories if t.valid]
    rewards = batch.rewards_S[batch.valid_S]
    lags = [group.lag(step) for group in batch.groups]
    versions, tokens = np.unique(batch.versions_N, return_counts=True)
    reused = sum(int(count) for version, count in zip(versions, tokens, strict=True) if lag(step, version) > 0)
    figures: dict[str, Any] = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "exact_match": float(np.mean([t.reward_parts.get("exact_match", 0.0) for t in used])),
        "searches_mean": float(np.mean([t.searches for t in used])),
        "length_mean": float(np.mean([t.length for t in used])),
        "trajectories": float(len(used)),
        "trajectories_invalid": float(len(batch.trajectories) - len(used)),
        "groups": float(len(batch.groups)),
        "tokens": float(batch.tokens),
        "trainable_tokens": float(batch.trainable_tokens),
        "reuse_fraction": reused / max(batch.trainable_tokens, 1),
        "lag_mean": float(np.mean(lags)),
        "lag_max": float(max(lags)),
        "lag_histogram": {str(steps): count for steps, count in sorted(Counter(lags).items())},
    }
    for outcome in get_args(Outcome):
        lengths = [t.length for t in batch.trajectories if t.outcome == outcome]
        figures[f"length_{outcome}"] = float(np.mean(lengths)) if lengths else None
    return figures


class SpeedFigures:
    """Rates and memory of the policy's step on this rank's kind of device."""

    def __init__(self, shape: ModelShape, config: Config, device: torch.device, world: int) -> None:
        self._shape, self._device, self._world = shape, device, world
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak = peak_flops(name, config.model.dtype)

    def of(self, batch: Batch, train_s: float) -> dict[str, Any]:
        """Tokens and FLOPs a second; MFU is ``None`` on an unknown device."""
        lengths = batch.lengths_S[batch.valid_S].tolist()
        flops = training_flops(self._shape, lengths, batch.trainable_tokens)
        cuda = self._device.type == "cuda"
        return {
            "tokens_per_s": batch.tokens / train_s,
            "flops": flops,
            "mfu": flops / train_s / self._world / self._peak if self._peak else None,
            "device_memory_bytes": float(torch.cuda.max_memory_allocated(self._device)) if cuda else 0.0,
            "host_memory_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        }


class MetricsWriter:
    """Writes each step's figures to ``metrics/learner.jsonl``, and to Weights & Biases unless `logging.wandb = "disabled"`."""

    def __init__(self, config: Config) -> None:
        folder = config.run.folder
        self._lines = JsonLines(folder / "metrics" / "learner.jsonl")
        self._wandb = _start_wandb(config, folder) if config.logging.wandb != "disabled" else None

    def write(self, figures: Mapping[str, Any]) -> None:
        """One step; ``figures["step"]`` is its number."""
        self._lines.write(figures)
        if self._wandb is not None:
            self._wandb.log({name: v for name, v in figures.items() if isinstance(v, int | float)}, step=int(figures["step"]))

    def evaluation(self, result: EvaluationResult) -> None:
        """A finished evaluation round, against the step of its weights."""
        if self._wandb is not None:
            step = PolicyVersion.unpack(result.version).step
            self._wandb.log({"evaluation/step": step, **{f"evaluation/{name}": value for name, value in result.means.items()}})

    def close(self) -> None:
        """Flush and close both."""
        self._lines.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(config: Config, folder: Path) -> Any:
    """A Weights & Biases run that prints nothing."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"logging.wandb must be 'disabled' without the package wandb, got {config.logging.wandb!r}") from error
    folder.mkdir(parents=True, exist_ok=True)
    return wandb.init(
        project=config.logging.wandb_project,
        name=config.run.name,
        dir=str(folder),
        mode=config.logging.wandb,
        config=msgspec.to_builtins(config),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
    )
