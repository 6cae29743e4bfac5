"""Learning-rate schedules: a warm-up, then constant, linear or cosine.

In: the number of optimiser steps already made. Out: the learning rate of the next one. No state: a resumed run gets the same rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from async_search_rl.errors import ConfigError

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step."""

    peak: float
    """Learning rate after the warm-up."""
    shape: Shape = "constant"
    """What follows the warm-up."""
    warmup_steps: int = 0
    """Optimiser steps of linear warm-up; the last of them is made at the peak."""
    total_steps: int = 1
    """Optimiser steps of the whole run; later steps are made at the floor."""
    floor_ratio: float = 0.0
    """Where `linear` and `cosine` end, as a share of the peak."""

    def __post_init__(self) -> None:
        if self.total_steps < 1 or self.warmup_steps < 0:
            raise ConfigError(f"total steps must be >= 1 and warm-up steps >= 0, got {self.total_steps} and {self.warmup_steps}")
        if self.shape not in ("constant", "linear", "cosine"):
            raise ConfigError(f"optimizer.schedule must be one of constant, linear, cosine, got {self.shape!r}")

    def rate(self, step: int) -> float:
        """Learning rate of the optimiser step that follows ``step`` finished ones, ``step >= 0``."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        progress = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        left = 1 - progress if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (self.floor_ratio + (1 - self.floor_ratio) * left)


def warmup_length(warmup_steps: int, warmup_ratio: float, total_steps: int) -> int:
    """Warm-up in optimiser steps: ``warmup_steps``, or where that is 0, ``warmup_ratio`` of all steps, rounded."""
    return warmup_steps or round(warmup_ratio * total_steps)
