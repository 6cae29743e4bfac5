"""What an actor produces and the learner consumes: trajectories, and groups of them.

A trajectory is one episode of one question: prompt, then turns of sampled tokens, each followed by inserted tokens (passages, or
the message after an invalid action). Token ids are what the engine sampled and what was appended, never text encoded again.
Invariants are checked once, here, at construction; whoever holds a :class:`Trajectory` or :class:`Group` may rely on them.

Legend: T tokens of one trajectory, G trajectories of one group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from async_search_rl.errors import SchemaError
from async_search_rl.version import PolicyVersion, lag

Action = Literal["search", "answer", "invalid", "length"]
"""How a turn ended: a complete search or answer tag, a turn without an action, or no context left."""

Outcome = Literal["answered", "no_answer", "length", "fault"]
"""How an episode ended. `fault` (a failed search, a dead engine) makes the trajectory invalid; the others are valid."""

NO_VERSION = -1
"""Version of tokens that no policy sampled."""

_ARRAY_DTYPES = {
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "behaviour_logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int64),
}
_LOGPROB_ROUNDING = 1e-3


class PassageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One retrieved passage as the trajectory remembers it."""

    id: str
    title: str
    text: str
    score: float


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: sampled tokens ``[start, end)`` and what came of them.

    ``query`` and ``passages`` are set for ``action == "search"``; ``search_s`` is the wait for retrieval in seconds.
    """

    start: int
    end: int
    action: Action
    query: str | None = None
    passages: tuple[PassageRecord, ...] = ()
    search_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trajectory:
    """One episode.

    Attributes:
        token_ids: int32 [T], prompt included.
        loss_mask: bool [T], true exactly on the sampled tokens (the union of the turns' ranges).
        behaviour_logprobs: float32 [T], natural logarithm, of each sampled token under the weights and temperature that sampled
            it; 0 elsewhere.
        versions: int64 [T], packed :class:`PolicyVersion` of the weights that computed each sampled token's logits;
            ``NO_VERSION`` elsewhere.
        prompt_length: tokens of the prompt, 1 <= prompt_length <= T.
        turns: in order, not overlapping.
        reward: final reward; ``None`` exactly when the outcome is ``fault``.
        reward_parts: each part before weighting, for example ``{"exact_match": 1.0, "f1": 1.0}``.
        outcome: how the episode ended.
        answer: text of the last answer, or ``None``.
        fault: what went wrong, set exactly when the outcome is ``fault``.
        seconds: wall time of the episode.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behaviour_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    prompt_length: int
    turns: tuple[Turn, ...]
    reward: float | None
    outcome: Outcome
    reward_parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    fault: str | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._check_arrays()
        self._check_turns()
        self._check_outcome()
        for name in _ARRAY_DTYPES:
            getattr(self, name).flags.writeable = False

    @property
    def valid(self) -> bool:
        """Whether the episode ended by the policy's own doing; invalid ones take part in nothing."""
        return self.outcome != "fault"

    @property
    def length(self) -> int:
        """T."""
        return int(self.token_ids.size)

    @property
    def searches(self) -> int:
        """Searches that were carried out."""
        return sum(turn.action == "search" for turn in self.turns)

    @property
    def trainable_tokens(self) -> int:
        """Sampled tokens."""
        return int(self.loss_mask.sum())

    def _check_arrays(self) -> None:
        # Runs for every trajectory on its way through the replay service: messages are made only where a check fails.
        length = self.token_ids.shape
        for name, dtype in _ARRAY_DTYPES.items():
            array = getattr(self, name)
            if array.ndim != 1 or array.dtype != dtype:
                raise SchemaError(f"{name} must be {dtype} [T], got '{array.dtype} {array.shape}'")
            if array.shape != length:
                raise SchemaError(f"{name} must be as long as token_ids ({length[0]}), got {array.shape[0]}")
        if not 1 <= self.prompt_length <= length[0]:
            raise SchemaError(f"prompt_length must be in [1, {length[0]}], got {self.prompt_length!r}")
        sampled, inserted, logprobs = self.loss_mask, ~self.loss_mask, self.behaviour_logprobs
        _require(int(self.token_ids.min()) >= 0, "token_ids must be >= 0", "a smaller id")
        _require(bool(np.isfinite(logprobs).all()), "behaviour_logprobs must be finite", "NaN or infinity")
        _require(bool((logprobs <= _LOGPROB_ROUNDING).all()), "behaviour_logprobs must be <= 0", "a larger value")
        _require(not logprobs[inserted].any(), "behaviour_logprobs must be 0 where nothing was sampled", "other values")
        _require(bool((self.versions[sampled] >= 0).all()), "versions must be >= 0 on sampled tokens", "a smaller value")
        _require(bool((self.versions[inserted] == NO_VERSION).all()), "versions must be -1 elsewhere", "other values")

    def _check_turns(self) -> None:
        ranges = np.zeros(self.length, dtype=np.bool_)
        previous = self.prompt_length
        for i, turn in enumerate(self.turns):
            ordered = previous <= turn.start <= turn.end <= self.length
            _require(ordered, f"turns[{i}] must lie in [{previous}, {self.length}]", f"[{turn.start}, {turn.end})")
            _require(turn.action in get_args(Action), f"turns[{i}].action must be one of {get_args(Action)}", turn.action)
            _require((turn.query is not None) == (turn.action == "search"), f"turns[{i}].query goes with a search", turn.action)
            ranges[turn.start : turn.end] = True
            previous = turn.end
        _require(bool((ranges == self.loss_mask).all()), "loss_mask must be true exactly on the turns' tokens", "another mask")

    def _check_outcome(self) -> None:
        _require(self.outcome in get_args(Outcome), f"outcome must be one of {get_args(Outcome)}", self.outcome)
        _require((self.reward is None) == (self.outcome == "fault"), "reward must be None exactly for a fault", self.reward)
        _require((self.fault is None) == (self.outcome != "fault"), "fault must be set exactly for the outcome fault", self.fault)
        _require(self.reward is None or math.isfinite(self.reward), "reward must be finite", self.reward)
        _require(all(map(math.isfinite, self.reward_parts.values())), "reward_parts must be finite", self.reward_parts)
        _require(0 <= self.seconds < math.inf, "seconds must be finite and >= 0", self.seconds)
        _require(not self.valid or bool(self.loss_mask.any()), "a valid trajectory must have sampled tokens", 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Group:
    """All trajectories of one attempt at one ticket.

    Attributes:
        ticket: id of the ticket; also the group's id in every later place.
        attempt: attempt at the ticket, from 1.
        question_id: id of the question.
        actor: name of the generator process that made it.
        trajectories: G of them, G >= 1.
        evaluation: evaluation round it belongs to, or ``None`` for training.
    """

    ticket: int
    attempt: int
    question_id: str
    actor: str
    trajectories: tuple[Trajectory, ...]
    evaluation: int | None = None

    def __post_init__(self) -> None:
        _require(self.ticket >= 0, "ticket must be >= 0", self.ticket)
        _require(self.attempt >= 1, "attempt must be >= 1", self.attempt)
        _require(len(self.trajectories) >= 1, "trajectories must not be empty", 0)

    @cached_property
    def rewards_G(self) -> npt.NDArray[np.float64]:
        """Final rewards, NaN for invalid members."""
        return np.array([np.nan if t.reward is None else t.reward for t in self.trajectories], dtype=np.float64)

    @cached_property
    def valid_G(self) -> npt.NDArray[np.bool_]:
        """Which members are valid."""
        return np.array([t.valid for t in self.trajectories], dtype=np.bool_)

    @cached_property
    def oldest_version(self) -> PolicyVersion | None:
        """The version of least step among the trainable tokens of valid members; ``None`` if there is none."""
        packed = [int(v) for t in self.trajectories if t.valid for v in np.unique(t.versions[t.loss_mask])]
        return min((PolicyVersion.unpack(v) for v in packed), key=lambda v: v.step, default=None)

    @property
    def uniform(self) -> bool:
        """Whether all valid members have the same reward, so that group-relative advantages are all zero."""
        rewards = self.rewards_G[self.valid_G]
        return bool(rewards.size and (rewards == rewards[0]).all())

    @property
    def tokens(self) -> int:
        """Tokens of all members, prompts included."""
        return sum(t.length for t in self.trajectories)

    def lag(self, learner_step: int) -> int:
        """Staleness at the start of step ``learner_step``, in trained batches."""
        return 0 if self.oldest_version is None else lag(learner_step, self.oldest_version.pack())


def _require(condition: bool, must: str, got: Any) -> None:
    if not condition:
        raise SchemaError(f"{must}, got {got!r}")
