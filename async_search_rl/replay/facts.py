"""From a decoded group to the few numbers the replay service keeps of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from async_search_rl.replay.records import GroupFacts
from async_search_rl.trajectory import Group


def facts_of(group: Group) -> GroupFacts:
    """See :class:`~async_search_rl.replay.records.GroupFacts`."""
    valid = [t for t in group.trajectories if t.valid]
    names = sorted({name for t in valid for name in t.reward_parts})
    oldest = group.oldest_version
    return GroupFacts(
        members=len(group.trajectories),
        valid=len(valid),
        reward=_mean([t.reward for t in valid if t.reward is not None]),
        parts={name: _mean([t.reward_parts[name] for t in valid if name in t.reward_parts]) for name in names},
        searches=_mean([t.searches for t in valid]),
        length=_mean([t.length for t in valid]),
        seconds=_mean([t.seconds for t in valid]),
        tokens=group.tokens,
        sampled=sum(t.trainable_tokens for t in group.trajectories),
        oldest_step=None if oldest is None else oldest.step,
    )


def digest_of(group: bytes) -> bytes:
    """16 bytes by which a repeated put is recognised."""
    return hashlib.blake2b(group, digest_size=16).digest()


def wholly_of_version(group: Group, version: int) -> bool:
    """Whether every sampled token of every member was sampled by the packed ``version``."""
    return all(bool((t.versions[t.loss_mask] == version).all()) for t in group.trajectories)


def _mean(values: Sequence[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0
