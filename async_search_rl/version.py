"""Policy versions: which weights computed a token's logits.

A version is ``(incarnation, step)``. ``step`` counts trained batches; every start of the learner raises ``incarnation``.
On the wire and in per-token arrays a version is one int64, ``incarnation << 32 | step``, so that versions sort by time.
"""

from __future__ import annotations

from typing import NamedTuple

_STEP_BITS = 32
_STEP_MASK = (1 << _STEP_BITS) - 1


class PolicyVersion(NamedTuple):
    """The weights after ``step`` trained batches of the learner's ``incarnation``-th start (both >= 0)."""

    incarnation: int
    step: int

    def pack(self) -> int:
        """This version as one int64."""
        return (self.incarnation << _STEP_BITS) | self.step

    @classmethod
    def unpack(cls, packed: int) -> PolicyVersion:
        """Inverse of :meth:`pack`."""
        return cls(int(packed) >> _STEP_BITS, int(packed) & _STEP_MASK)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"


def lag(learner_step: int, packed_version: int) -> int:
    """Staleness in trained batches: ``max(0, learner step - token step)``, whatever the incarnation."""
    return max(0, learner_step - (int(packed_version) & _STEP_MASK))
