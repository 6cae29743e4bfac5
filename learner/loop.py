"""The learner's main loop: fetch a batch, train, checkpoint, publish, acknowledge.

In: a configuration, under torchrun or alone. Out: checkpoints, published weights, metrics, and at the end the exported policy.
Rank 0 waits for the replay service, at most `learner.batch_timeout_s`; the other ranks wait for rank 0; nobody waits for us.
"""

from __future__ import annotations

import time
from pathlib import Path

from async_search_rl.config import Config
from async_search_rl.errors import RunStoppedError
from learner.assemble import Learner, assemble
from learner.closing import carry_out, finish, last_evaluation_s
from learner.ranks import join_ranks
from learner.record import announce, announce_if_due, checkpoint_if_due, record, save_skipped
from learner.signals import StopFlag

COLLECTIVE_GRACE_S = 600.0
"""Seconds a rank may be late at a collective beyond rank 0's longest wait."""


def run(config: Config, recorded: Path | None = None) -> None:
    """Train until `run.max_steps`, or until there is a reason to stop.

    SIGTERM and Ctrl-C end the run after the step under way. Every end has its checkpoint (:func:`finish`), but for errors and for
    a rollback that finds none to go back to. ``recorded`` is a file of groups to train on instead of the replay service's.

    Raises:
        RunStoppedError: the run must stop, with the reason.
        DeadlineError: no batch came in time.
    """
    ranks = join_ranks(collective_deadline_s(config))
    try:
        with StopFlag() as stop, assemble(config, ranks, recorded) as learner:
            reason = train(learner, stop)
            finish(learner, learner.step == config.run.max_steps and not reason, lambda: stop.is_set)
        if reason:
            raise RunStoppedError(reason)
    finally:
        ranks.close()


def collective_deadline_s(config: Config) -> float:
    """Deadline of a collective: rank 0 comes late to one while it waits for a batch, or for the last evaluation."""
    return max(config.learner.batch_timeout_s, last_evaluation_s(config)) + COLLECTIVE_GRACE_S


def train(learner: Learner, stop: StopFlag) -> str:
    """The loop itself. Why the run must stop; empty where it came to its end or was interrupted."""
    reason = announce(learner, {})
    while learner.step < learner.config.run.max_steps and not reason:
        began = time.monotonic()
        delivery = learner.feed.next(learner.step, lambda: stop.is_set)
        if delivery.batch is None:
            return delivery.stop
        trained_from = time.monotonic()
        figures = learner.trainer.train(delivery.batch, learner.step)
        train_s = time.monotonic() - trained_from
        learner.step += 1
        if figures["skipped"]:
            save_skipped(learner, delivery.batch, learner.step)
        verdict = learner.guard.judge(figures)
        reason = carry_out(learner, verdict) if verdict is not None else ""
        checkpoint_s = checkpoint_if_due(learner) if verdict is None else 0.0
        reason = announce_if_due(learner, figures) or reason
        seconds = {"train_s": train_s, "checkpoint_s": checkpoint_s, "step_s": time.monotonic() - began}
        record(learner, delivery, figures, seconds)
    return reason
