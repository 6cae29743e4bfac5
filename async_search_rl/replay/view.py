"""The state as the live table shows it."""

from __future__ import annotations

from typing import Literal

from async_search_rl.replay.core import Core
from async_search_rl.replay.schema import Status

Phase = Literal["waiting for a learner", "running", "evaluating", "finished", "stopped"]


def status_of(core: Core, recent: dict[str, float], learner: dict[str, float], waiting_for: str, now: float) -> Status:
    """Everything about the run; ``now`` is the clock of the registry, in seconds."""
    state, load = core.state, core.load
    return Status(
        run=state.identity.run,
        state=phase_of(core),
        stop=state.stop if core.over() else None,
        incarnation=state.incarnation,
        step=state.step,
        buffered=load.buffered,
        running=load.running,
        training=load.training,
        filtered_in_row=state.filtered_in_row,
        waiting_for=waiting_for,
        counters=state.counters(),
        recent=recent,
        learner=learner,
        actors=core.registry.report(now),
        evaluations=state.evaluations.results,
        staleness=state.buffer.staleness,
        parked_questions=[core.train[question].id for question in state.ledger.parked],
    )


def phase_of(core: Core) -> Phase:
    """``evaluating`` only where nothing is trained meanwhile: before the first step and after the last."""
    state = core.state
    if core.over():
        return "finished" if state.stop is None else "stopped"
    if state.incarnation == 0 or state.policy is None or state.end is not None:
        return "waiting for a learner"
    if state.evaluations.open is not None and (state.step >= core.config.run.max_steps or state.buffer.next_cut == 0):
        return "evaluating"
    return "running"
