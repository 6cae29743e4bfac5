"""When an evaluation round opens and closes."""

from __future__ import annotations

from async_search_rl.replay.core import Core
from async_search_rl.replay.evaluation import Round, falls_due, summarise
from async_search_rl.replay.records import RoundClosed, RoundOpened
from async_search_rl.replay.schema import EvaluationResult


class Rounds:
    """Evaluation rounds of one run. ``now`` is the caller's clock in seconds."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._asked = min(len(core.evaluation), core.config.data.eval_questions)
        self._opened_at: float | None = None

    def falls_due(self, step: int) -> bool:
        """Whether the publication of ``step`` calls for a round."""
        config, state = self._core.config, self._core.state
        return self._asked > 0 and falls_due(
            step,
            state.evaluations.last_step,
            first=state.policy is None,
            at_start=config.replay.eval_at_start,
            every=config.replay.eval_every,
            max_steps=config.run.max_steps,
        )

    @property
    def busy(self) -> bool:
        """Whether a round is open or due."""
        evaluations = self._core.state.evaluations
        return evaluations.open is not None or evaluations.due

    def open_if_due(self, now: float) -> bool:
        """Open the due round with the newest announced version, unless one is open; whether it was opened."""
        state = self._core.state
        current = state.policy is not None and state.policy.version >> 32 == state.incarnation
        if not state.evaluations.due or state.evaluations.open is not None or state.policy is None or not current:
            return False
        self._core.commit(RoundOpened(round=state.evaluations.next_round, version=state.policy.version, asked=self._asked))
        self._opened_at = now
        return True

    def serves(self, version: int | None) -> bool:
        """Whether an actor whose engine runs ``version`` can take tickets of the open round: no engine goes back."""
        current = self._core.state.evaluations.open
        return current is not None and (version is None or version <= current.version)

    def is_over(self, now: float) -> bool:
        """Whether the open round has all its answers, ran out of time, or can get no more."""
        current = self._core.state.evaluations.open
        if current is None:
            return False
        if self._opened_at is None:
            self._opened_at = now
        timed_out = now - self._opened_at >= self._core.config.replay.eval_timeout_s
        return current.complete or timed_out or self._version_is_gone(current)

    def result(self, now: float) -> EvaluationResult | None:
        """What the open round came to; ``None`` if its version vanished before the first answer, so that it must be asked again."""
        state = self._core.state
        current = state.evaluations.open
        if current is None:
            return None
        superseded = state.policy is not None and state.policy.version > current.version
        if superseded and not current.answers and self._version_is_gone(current):
            return None
        return summarise(current, self._core.evaluation, now - (now if self._opened_at is None else self._opened_at))

    def close(self, result: EvaluationResult | None, now: float) -> None:
        """Close the open round with this result, and open the next one if it is due."""
        for ticket in [t.ticket for t in self._core.state.ledger.open.values() if t.round is not None]:
            self._core.leases.forget(ticket)
        self._core.commit(RoundClosed(result=result))
        self._opened_at = None
        self.open_if_due(now)

    def _version_is_gone(self, current: Round) -> bool:
        """Nobody works at the round, and every live actor's engine is past its version."""
        versions = self._core.registry.versions()
        tickets = [t.ticket for t in self._core.state.ledger.open.values() if t.round is not None]
        worked_at = any(self._core.leases.is_held(ticket) for ticket in tickets)
        return bool(versions) and not worked_at and all(v is not None and v > current.version for v in versions)
