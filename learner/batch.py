"""From groups to arrays: a whole batch as flat NumPy arrays, and its micro-batches as tensors.

In: the groups of one cut, the same on every rank. Out: :class:`Batch`, which every rank builds for itself, and for each list of
trajectory indices that packing planned a :class:`MicroBatch` on this rank's device. No collectives here.

Legend: S trajectories of the batch, L tokens of all of them one after the other, N their trainable tokens one after the other.
Trajectories broken by a fault are kept for the counts; they have no trainable tokens here and are never packed.
In a micro-batch T, N and S are its own tokens, trainable tokens and trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_search_rl.errors import SchemaError
from async_search_rl.trajectory import Group, Trajectory
from learner.attention import PackedLayout

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Batch:
    """Everything one step trains on."""

    groups: tuple[Group, ...]
    """The cut, in order."""
    trajectories: tuple[Trajectory, ...]
    """S trajectories, group after group."""
    group_ids_S: Array
    """int64: ticket of each trajectory's group."""
    rewards_S: Array
    """float64: final reward, 0 for invalid ones."""
    valid_S: Array
    """bool."""
    lengths_S: Array
    """int64: tokens, prompt included."""
    tokens_S: Array
    """int64: trainable tokens, 0 for invalid ones."""
    behaviour_N: Array
    """float32: recorded log-probabilities."""
    versions_N: Array
    """int64: packed versions of the policies that sampled."""

    @cached_property
    def token_starts_S(self) -> Array:
        """Where each trajectory begins among the N trainable tokens."""
        return np.cumsum(self.tokens_S) - self.tokens_S

    @property
    def tokens(self) -> int:
        """L of the valid trajectories."""
        return int(self.lengths_S[self.valid_S].sum())

    @property
    def trainable_tokens(self) -> int:
        """N."""
        return int(self.tokens_S.sum())

    def tokens_of(self, members: Sequence[int]) -> Array:
        """Indices into the N trainable tokens of the trajectories ``members``, in their order; int64."""
        ranges = [np.arange(self.token_starts_S[i], self.token_starts_S[i] + self.tokens_S[i]) for i in members]
        return np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int64)


def batch_from_groups(groups: Sequence[Group]) -> Batch:
    """The arrays of one cut.

    Raises:
        SchemaError: when no trajectory is valid.
    """
    trajectories = tuple(t for group in groups for t in group.trajectories)
    valid_S = np.array([t.valid for t in trajectories], dtype=bool)
    if not valid_S.any():
        raise SchemaError(f"a batch must have valid trajectories, got {len(trajectories)} invalid ones")
    used = [t for t in trajectories if t.valid]
    return Batch(
        groups=tuple(groups),
        trajectories=trajectories,
        group_ids_S=np.array([group.ticket for group in groups for _ in group.trajectories], dtype=np.int64),
        rewards_S=np.array([t.reward or 0.0 for t in trajectories]),
        valid_S=valid_S,
        lengths_S=np.array([t.length for t in trajectories], dtype=np.int64),
        tokens_S=np.array([t.trainable_tokens if t.valid else 0 for t in trajectories], dtype=np.int64),
        behaviour_N=np.concatenate([t.behaviour_logprobs[t.loss_mask] for t in used]),
        versions_N=np.concatenate([t.versions[t.loss_mask] for t in used]),
    )


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Trajectories packed one after the other, as the model reads them; tensors are int64 on the rank's device."""

    input_ids_T: Tensor
    """Token ids of all trajectories, concatenated."""
    layout: PackedLayout
    """Where each trajectory lies."""
    positions_N: Tensor
    """Index into T of each trainable token."""
    sequence_N: Tensor
    """Trajectory of each trainable token, counted within this micro-batch."""
    members: tuple[int, ...]
    """The trajectories' indices in the batch; empty for a rank that only keeps step with the others."""
    batch_tokens_N: Array
    """int64 on the host: each trainable token's index among those of the batch."""

    def pick(self, values_N: Array) -> Tensor:
        """This micro-batch's share of an array over the batch's trainable tokens, float32 on the device."""
        picked = torch.from_numpy(np.ascontiguousarray(values_N[self.batch_tokens_N], dtype=np.float32))
        return picked.to(self.input_ids_T.device, non_blocking=True)


def micro_batch(batch: Batch, members: Sequence[int], device: torch.device) -> MicroBatch:
    """The trajectories ``members`` as one packed row.

    An empty list gives one token without anything to train: every rank must run the model equally often, for ZeRO-3's sake.
    """
    chosen = [batch.trajectories[i] for i in members]
    lengths = [t.length for t in chosen] or [1]
    starts = np.cumsum(lengths) - lengths
    positions = [np.flatnonzero(t.loss_mask) + start for t, start in zip(chosen, starts, strict=False)]
    counts = [len(p) for p in positions]

    def on_device(arrays: Sequence[Array]) -> Tensor:
        joined = np.concatenate([np.zeros(0, dtype=np.int64), *arrays]).astype(np.int64)
        return torch.from_numpy(joined).to(device, non_blocking=True)

    return MicroBatch(
        input_ids_T=on_device([t.token_ids for t in chosen] or [np.zeros(1)]),
        layout=PackedLayout.of(lengths, device),
        positions_N=on_device(positions),
        sequence_N=on_device([np.repeat(np.arange(len(counts)), counts)]),
        members=tuple(members),
        batch_tokens_N=batch.tokens_of(members),
    )
