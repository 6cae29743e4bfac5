"""One step's micro-batches on this rank, mini-batch by mini-batch, and the way back from their tokens to the whole batch.

In: a :class:`~learner.batch.Batch`, the same on every rank. Out: for each optimiser step the micro-batches of this rank, equally
many on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_search_rl.config.learner import OptimizerSection
from async_search_rl.config.schema import Config
from learner.batch import Batch, MicroBatch, micro_batch
from learner.packing import QUADRATIC_TOKENS, pack, split_groups
from learner.ranks import Ranks
from learner.schedule import Schedule, warmup_length

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """What one optimiser step trains on."""

    members: tuple[int, ...]
    """Indices of its valid trajectories, of all ranks."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's share."""
    padding: float
    """Share of token slots that idle, all ranks together."""


def plan_step(batch: Batch, config: Config, ranks: Ranks, quadratic_tokens: int = QUADRATIC_TOKENS) -> list[MiniBatch]:
    """The mini-batches of ``batch``, in the order in which they are trained; deterministic. See :func:`learner.packing.pack`."""
    parts = split_groups(batch.group_ids_S.tolist(), config.algorithm.minibatches)
    mini_batches = []
    for part in parts:
        members = [i for i in part if batch.valid_S[i]]
        lengths = [int(batch.lengths_S[i]) for i in members]
        packed = pack(lengths, config.learner.micro_batch_tokens, ranks.world, quadratic_tokens)
        mine = [micro_batch(batch, [members[i] for i in local], ranks.device) for local in packed.ranks[ranks.rank]]
        mini_batches.append(MiniBatch(tuple(members), tuple(mine), packed.padding))
    return mini_batches


@torch.no_grad()
def evaluate(
    run: Callable[[MicroBatch], Tensor], micro_batches: Iterable[MicroBatch], batch: Batch, ranks: Ranks
) -> npt.NDArray[np.float64]:
    """``run`` on every micro-batch without gradient; its values for all N trainable tokens of the batch, on every rank."""
    values_N = np.zeros(batch.trainable_tokens)
    for micro in micro_batches:
        values_N[micro.batch_tokens_N] = run(micro).double().cpu().numpy()
    return ranks.sum(values_N)


def all_micro_batches(mini_batches: Sequence[MiniBatch]) -> list[MicroBatch]:
    """This rank's micro-batches of the whole step."""
    return [micro for mini in mini_batches for micro in mini.micro_batches]


class SumsByName:
    """Adds up scalars by name: over micro-batches on the device, then over ranks. Names come in the same order every time."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the scalars of one micro-batch."""
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def total(self, ranks: Ranks) -> dict[str, float]:
        """Totals over all ranks; collective, and the first wait for the device."""
        return ranks.sum_by_name(dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True)))


def schedule_of(optimizer: OptimizerSection, config: Config) -> Schedule:
    """The learning rate of ``optimizer`` over the optimiser steps of the whole run."""
    total = config.run.max_steps * config.algorithm.minibatches
    return Schedule(
        peak=optimizer.lr,
        shape=optimizer.schedule,
        warmup_steps=warmup_length(optimizer.warmup_steps, optimizer.warmup_ratio, total),
        total_steps=total,
        floor_ratio=optimizer.min_lr_ratio,
    )
