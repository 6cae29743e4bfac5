"""What the main loop does after each step: offer the weights, keep a checkpoint, write the figures down.

In: the learner after a step. Out: calls to the replay service, files under the run's folder. The functions are collective where
they gather or save; talking and writing is rank 0's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from async_search_rl.replay.schema import AcknowledgeRequest, EvaluationResult, PublishRequest
from async_search_rl.version import PolicyVersion
from learner.assemble import Learner
from learner.batch import Batch
from learner.feed import Delivery
from learner.metrics import batch_figures
from learner.recorded import write_groups


def announce(learner: Learner, figures: dict[str, Any]) -> str:
    """Stage the weights and tell the service; why the run must stop, if the service says so.

    ``publish_stall_s`` is added to ``figures``. Every start announces, whatever its step: actors wait for the weights of the new
    incarnation, and the learner for their groups.
    """
    figures["publish_stall_s"] = learner.publisher.stage(learner.version)
    reason = ""
    if learner.source is not None:
        numbers = {name: float(v) for name, v in figures.items() if isinstance(v, int | float) and math.isfinite(v)}
        request = PublishRequest(incarnation=learner.incarnation, step=learner.step, cut=learner.step, metrics=numbers)
        reason = learner.source.publish(request).stop or ""
    return learner.ranks.broadcast(reason.encode() if learner.ranks.first else None).decode()


def announce_if_due(learner: Learner, figures: dict[str, Any]) -> str:
    """:func:`announce` every `weights.publish_every` steps and after the last one."""
    figures["publish_stall_s"] = 0.0
    due = learner.step % learner.config.weights.publish_every == 0 or learner.step == learner.config.run.max_steps
    return announce(learner, figures) if due else ""


def checkpoint(learner: Learner) -> float:
    """Write a checkpoint and acknowledge what it holds; the seconds it took."""
    began = time.monotonic()
    oldest_cut = learner.checkpoints.save(learner.step, learner.step, learner.incarnation)
    learner.guard.checkpointed()
    if learner.source is not None:
        learner.source.acknowledge(
            AcknowledgeRequest(incarnation=learner.incarnation, step=learner.step, cut=learner.step, oldest_cut=oldest_cut)
        )
    return time.monotonic() - began


def checkpoint_if_due(learner: Learner) -> float:
    """A checkpoint every `checkpoint.every` steps, not while the guard counts; the seconds it took."""
    every = learner.config.checkpoint.every
    due = every > 0 and learner.step % every == 0 and learner.step < learner.config.run.max_steps
    return checkpoint(learner) if due and learner.guard.healthy else 0.0


def record(learner: Learner, delivery: Delivery, figures: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
    """Write the step's figures, and note the evaluations that came with its batch.

    Args:
        learner: after the step.
        delivery: what it was trained on.
        figures: of the step.
        seconds: ``train_s``, ``checkpoint_s`` and ``step_s``.
    """
    if learner.metrics is None or delivery.batch is None:
        return
    note_evaluations(learner, delivery.evaluations)
    learner.metrics.write(
        {
            "step": learner.step,
            "cut": learner.step - 1,
            "incarnation": learner.incarnation,
            "version": str(learner.version),
            **figures,
            **batch_figures(delivery.batch, learner.step - 1),
            **learner.speed.of(delivery.batch, seconds["train_s"]),
            **learner.publisher.figures(),
            **seconds,
            "wait_s": delivery.wait_s,
            "idle_share": delivery.wait_s / seconds["step_s"],
            "buffered": delivery.buffered,
        }
    )


def note_evaluations(learner: Learner, results: tuple[EvaluationResult, ...] | list[EvaluationResult]) -> None:
    """Hand finished evaluation rounds to the metrics, and to the choice of the best checkpoint."""
    for result in results:
        if learner.metrics is not None:
            learner.metrics.evaluation(result)
        if "exact_match" in result.means:
            learner.checkpoints.note_score(PolicyVersion.unpack(result.version).step, result.means["exact_match"])


def save_skipped(learner: Learner, batch: Batch, step: int) -> None:
    """Keep the groups of a step that was not finite, for a look: ``skipped/step-00000012.groups``, readable with `--recorded`."""
    if learner.ranks.first:
        write_groups(learner.config.run.folder / "skipped" / f"step-{step:08d}.groups", batch.groups)
