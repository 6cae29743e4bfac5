"""Bounds that a healthy run keeps: what to do when one is left for several steps in a row.

In: the figures of each step. Out: nothing while all is well, else a :class:`Verdict`. Pure; who asks carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from async_search_rl.config.learner import GuardSection


@dataclass(frozen=True)
class Verdict:
    """What must happen, and why in words."""

    action: Literal["stop", "rollback"]
    reason: str


class Guard:
    """Counts steps outside the bounds of `[guard]`. What is not a number is outside every bound."""

    def __init__(self, section: GuardSection) -> None:
        self._section = section
        self._outside = 0
        self._rolled_back = False

    def judge(self, figures: Mapping[str, float]) -> Verdict | None:
        """The verdict after a step with ``figures``.

        A second rollback without a checkpoint in between (:meth:`checkpointed`) would go on from the same weights: it is a stop.
        """
        broken = self._broken(figures)
        self._outside = self._outside + 1 if broken else 0
        if self._outside < self._section.patience:
            return None
        reason = f"guard: {broken} for {self._outside} steps in a row"
        if self._section.action == "stop" or self._rolled_back:
            return Verdict("stop", reason + (", after a rollback" if self._rolled_back else ""))
        self._outside = 0
        self._rolled_back = True
        return Verdict("rollback", reason)

    @property
    def healthy(self) -> bool:
        """Whether the last step was inside the bounds; a checkpoint of others would be nothing to go back to."""
        return self._outside == 0

    def checkpointed(self) -> None:
        """A checkpoint was written, to which the next rollback will go."""
        self._rolled_back = False

    def _broken(self, figures: Mapping[str, float]) -> str:
        s = self._section
        if s.max_kl and not figures["kl_behaviour"] <= s.max_kl:
            return f"kl_behaviour must be <= {s.max_kl} (guard.max_kl), got {figures['kl_behaviour']:.4g}"
        if s.min_entropy and not figures["entropy"] >= s.min_entropy:
            return f"entropy must be >= {s.min_entropy} (guard.min_entropy), got {figures['entropy']:.4g}"
        if s.min_ess and not figures["ess"] >= s.min_ess:
            return f"ess must be >= {s.min_ess} (guard.min_ess), got {figures['ess']:.4g}"
        return ""
