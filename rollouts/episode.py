"""The tokens of one episode while it grows, and the finished trajectory at its end.

In: prompt, sampled turns, inserted tokens, in order. Out: a :class:`Trajectory`, whose constructor checks every invariant.
No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_search_rl.trajectory import NO_VERSION, Action, Outcome, PassageRecord, Trajectory, Turn
from async_search_rl.version import PolicyVersion
from rollouts.engine import Sample


class Episode:
    """Grows token by token; ``token_ids`` is the whole context so far."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = list(prompt_ids)
        self.texts: list[str] = []
        """Decoded text of each turn."""
        self.turns: list[Turn] = []
        self.oldest_step: int | None = None
        """Least step among the sampled tokens' versions, and the weights that a turn in progress began with."""
        self._prompt_length = len(prompt_ids)
        self._mask: list[bool] = [False] * len(prompt_ids)
        self._logprobs: list[float] = [0.0] * len(prompt_ids)
        self._versions: list[int] = [NO_VERSION] * len(prompt_ids)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.token_ids)

    def begin_turn(self, version: int | None) -> None:
        """A turn is about to be sampled from the weights ``version`` (packed)."""
        if version is not None:
            self._see(version)

    def add_turn(
        self,
        sample: Sample,
        text: str,
        action: Action,
        query: str | None = None,
        passages: Sequence[PassageRecord] = (),
        search_s: float = 0.0,
    ) -> None:
        """Append one sampled turn and what came of it."""
        start = self.length
        self.token_ids += sample.token_ids
        self._mask += [True] * len(sample.token_ids)
        self._logprobs += [min(0.0, value) for value in sample.logprobs]
        self._versions += sample.versions
        self.texts.append(text)
        self.turns.append(
            Turn(start=start, end=self.length, action=action, query=query, passages=tuple(passages), search_s=search_s)
        )
        for version in set(sample.versions):
            self._see(version)

    def insert(self, token_ids: Sequence[int]) -> None:
        """Append tokens that nobody sampled."""
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [NO_VERSION] * len(token_ids)

    def finish(
        self,
        outcome: Outcome,
        reward: float | None,
        reward_parts: dict[str, float] | None = None,
        answer: str | None = None,
        fault: str | None = None,
        seconds: float = 0.0,
    ) -> Trajectory:
        """The trajectory of everything appended so far."""
        return Trajectory(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            loss_mask=np.array(self._mask, dtype=np.bool_),
            behaviour_logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int64),
            prompt_length=self._prompt_length,
            turns=tuple(self.turns),
            reward=reward,
            reward_parts=reward_parts or {},
            outcome=outcome,
            answer=answer,
            fault=fault,
            seconds=seconds,
        )

    def _see(self, version: int) -> None:
        step = PolicyVersion.unpack(version).step
        self.oldest_step = step if self.oldest_step is None else min(self.oldest_step, step)


def refused(fault: str) -> Trajectory:
    """The trajectory of an episode that could not begin, of which not a token was sampled."""
    return Episode([0]).finish("fault", None, fault=fault)
