"""What the actors' side and the learner's side of the service share: state, leases, questions, and the way to change them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from async_search_rl.config import Config
from async_search_rl.questions import Question
from async_search_rl.replay.leases import Leases
from async_search_rl.replay.order import QuestionOrder
from async_search_rl.replay.pacing import Load, min_step, room
from async_search_rl.replay.records import Change
from async_search_rl.replay.registry import Registry
from async_search_rl.replay.state import Identity, State


@dataclass
class Core:
    """The service without its network: everything that decides.

    ``commit`` applies a record to ``state`` and logs it. Leases and registry live in memory only.
    """

    config: Config
    train: Sequence[Question]
    evaluation: Sequence[Question]
    state: State
    commit: Callable[[Change], None]
    leases: Leases = field(init=False)
    registry: Registry = field(init=False)
    order: QuestionOrder = field(init=False)
    learner_seen: bool = field(init=False, default=False)
    """Whether a learner has spoken to this process."""
    ended_before: bool = field(init=False)
    """Whether the log told of an end when this process began."""

    def __post_init__(self) -> None:
        self.ended_before = self.state.end is not None
        self.leases = Leases(self.config.replay.lease_s)
        self.registry = Registry(self.config.replay.lease_s)
        self.order = QuestionOrder(len(self.train), self.config.run.seed, self.config.data.shuffle)

    def over(self, joined: bool = False) -> str | None:
        """:attr:`State.end`, as far as it counts.

        An end that this process found in the log counts once a learner has spoken to it: a learner about to start will lift it, and
        newcomers wait for that. Whoever had ``joined`` the run before its end is told at once.
        """
        return self.state.end if self.learner_seen or joined or not self.ended_before else None

    @property
    def load(self) -> Load:
        """Groups by place."""
        state = self.state
        buffer = state.buffer
        return Load(step=state.step, training=buffer.training, buffered=buffer.buffered, running=state.ledger.running)

    @property
    def room(self) -> int:
        """New training tickets that may be issued now; none before there are weights to use, or after a stop."""
        if self.state.policy is None or self.state.end is not None:
            return 0
        replay = self.config.replay
        return room(
            self.load,
            batch_groups=replay.batch_groups,
            max_staleness=replay.max_staleness,
            max_inflight=replay.max_inflight,
            max_steps=self.config.run.max_steps,
        )

    def min_step(self, again: bool = False) -> int:
        """Oldest step the next ticket may start with, or a ticket that is issued ``again``."""
        replay, load = self.config.replay, self.load
        others = msgspec.structs.replace(load, running=load.running - again)
        return min_step(others, batch_groups=replay.batch_groups, max_staleness=replay.max_staleness)

    def too_old(self, oldest_step: int | None) -> bool:
        """Whether a group with such a token is over the bound in every batch that can still be cut."""
        return oldest_step is not None and self.state.next_step - oldest_step > self.config.replay.max_staleness


def identity_of(config: Config, train: Sequence[Question], evaluation: Sequence[Question]) -> Identity:
    """What the log must agree with."""
    return Identity(
        run=config.run.name,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        train=_digest(train),
        evaluation=_digest(evaluation),
    )


def _digest(questions: Sequence[Question]) -> str:
    return hashlib.blake2b(msgspec.json.encode(list(questions)), digest_size=8).hexdigest()
