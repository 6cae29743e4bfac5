"""How many groups may be rolled out: from the state alone, so that a restart has no counters to restore.

Counts are in groups. B is the batch size, eta the staleness bound, ``training`` the groups of batches that were cut and whose
version is not announced yet, ``buffered`` those waiting for a batch, ``running`` those being rolled out.
"""

from __future__ import annotations

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands: the learner's announced step, and groups by place."""

    step: int
    training: int
    buffered: int
    running: int

    @property
    def ahead(self) -> int:
        """Groups that will be trained before one that is issued now."""
        return self.training + self.buffered + self.running


def room(load: Load, *, batch_groups: int, max_staleness: int, max_inflight: int, max_steps: int) -> int:
    """Training tickets that may be issued now.

    At most ``max_inflight`` run at once; no more are under way than ``max_staleness + 1`` batches hold, so that a group issued
    now is trained at most ``max_staleness`` steps later; and no more than the run still trains. A filtered, stale or failed
    group gives its place back by not being counted any more.
    """
    free = max_inflight - load.running
    fresh = (max_staleness + 1) * batch_groups - load.ahead
    left = (max_steps - load.step) * batch_groups - load.ahead
    return max(0, min(free, fresh, left))


def min_step(load: Load, *, batch_groups: int, max_staleness: int) -> int:
    """Oldest step a group issued now may start with: that of the batch it is expected in, minus the bound.

    Never above the step that is reached without any group that still runs, for then all would wait for one another. An attempt
    that is issued again is not ahead of itself: its ``load`` is that of the others.
    """
    expected = load.step + load.ahead // batch_groups - max_staleness
    return max(0, min(expected, load.step + load.training // batch_groups))
