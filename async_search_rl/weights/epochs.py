"""The sender's open groups, one epoch each, and the offers that bring receivers into them.

A group lasts as long as its members and its transport; any change, failure or restart gives a new group under a new epoch. Used by
the broadcast thread alone.
"""

from __future__ import annotations

import secrets

from async_search_rl.weights.delivery import discard
from async_search_rl.weights.groups import BroadcastGroup
from async_search_rl.weights.ipc import export_handle
from async_search_rl.weights.schema import Offer
from async_search_rl.weights.staging import StagedWeights
from async_search_rl.weights.transport import GroupPlan

_EPOCH_BITS = 30


class OpenGroups:
    """Groups by who is in them. Epochs start at a random number, so that those of two senders do not meet."""

    def __init__(self) -> None:
        self._first_epoch = secrets.randbits(_EPOCH_BITS) << _EPOCH_BITS
        self._last_epoch = self._first_epoch
        self._groups: dict[GroupPlan, tuple[int, BroadcastGroup]] = {}

    @property
    def epochs(self) -> int:
        """Epochs begun so far."""
        return self._last_epoch - self._first_epoch

    def enter(self, plan: GroupPlan) -> tuple[int, BroadcastGroup | None]:
        """The epoch for the next broadcast to these members, and their group if all still have it open.

        The group leaves the book; :meth:`keep` puts it back when it has served well.
        """
        epoch, group = self._groups.pop(_key(plan), (0, None))
        if group is not None and all(member.epoch == epoch for member in plan.members):
            return epoch, group
        if group is not None:
            discard(group)
        self._last_epoch += 1
        return self._last_epoch, None

    def keep(self, plan: GroupPlan, epoch: int, group: BroadcastGroup) -> None:
        """Keep a group for the next publication; its members have left any other."""
        self.drop({member.name for member in plan.members})
        self._groups[_key(plan)] = (epoch, group)

    def drop(self, names: set[str]) -> None:
        """Discard the groups that one of these receivers was in."""
        for key in [key for key in self._groups if any(member.name in names for member in key.members)]:
            discard(self._groups.pop(key)[1])

    def close(self) -> None:
        """Discard all groups."""
        for _, group in self._groups.values():
            discard(group)
        self._groups.clear()


def make_offers(
    plan: GroupPlan, staged: StagedWeights, epoch: int, store: tuple[str, int], deadline_s: float
) -> dict[str, tuple[Offer, int]]:
    """Each member's offer, by name, with the number of its workers; ``store``: host and port. Ranks follow the order of members."""
    if plan.transport == "ipc" and not staged.handles:
        staged.handles = tuple(export_handle(flat) for flat in staged.flats)
    offers: dict[str, tuple[Offer, int]] = {}
    rank = 1
    for member in plan.members:
        offer = Offer(
            version=staged.version,
            epoch=epoch,
            store_host=store[0],
            store_port=store[1],
            first_rank=rank,
            world=1 + sum(len(other.devices) for other in plan.members),
            transport=plan.transport,
            buckets=staged.buckets,
            deadline_s=deadline_s,
            handles=staged.handles if plan.transport == "ipc" else (),
        )
        offers[member.name] = (offer, len(member.devices))
        rank += len(member.devices)
    return offers


def _key(plan: GroupPlan) -> GroupPlan:
    """The plan without what changes between two publications."""
    return GroupPlan(plan.transport, tuple(member._replace(epoch=None, suspect=False) for member in plan.members))
