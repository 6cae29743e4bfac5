"""How a run ends or turns back: the last checkpoint, the last evaluation, the exported policy, the guard's verdicts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from async_search_rl.config import Config
from async_search_rl.errors import RunStoppedError
from async_search_rl.replay.schema import FinishRequest
from learner.assemble import Learner
from learner.checkpoint import list_checkpoints, step_of
from learner.export import write_model_folder
from learner.feed import LONGEST_POLL_S
from learner.guard import Verdict
from learner.loading import DTYPES, check_model_folder
from learner.record import checkpoint, note_evaluations

_log = logging.getLogger(__name__)
_COPY_TIMEOUT_S = 600.0
_LAST_ROUNDS = 2.0
"""Evaluations that may still be due at the end, each of at most `replay.eval_timeout_s`: one under way and the last one."""
EXPORT_FOLDER = "model"


def finish(learner: Learner, complete: bool, stopping: Callable[[], bool]) -> None:
    """Checkpoint; and where the run is ``complete``, export the policy and wait for the last evaluation. Collective.

    A run that is cut short outside the guard's bounds keeps its last good checkpoint as the newest one, if it has any.
    ``stopping()`` on rank 0 ends the wait.
    """
    found = list_checkpoints(learner.checkpoints.folder)
    worth_keeping = complete or learner.guard.healthy
    if not found or (worth_keeping and step_of(found[-1]) != learner.step):
        checkpoint(learner)
    if complete and learner.config.checkpoint.export_at_end:
        export(learner)
    if complete and learner.source is not None:
        wait_for_last_evaluation(learner, stopping)
    learner.ranks.barrier()
    learner.checkpoints.wait_for_copies(_COPY_TIMEOUT_S)


def export(learner: Learner) -> None:
    """Write the policy as a transformers folder, ``model`` under the run's folder."""
    weights = learner.publisher.collect()
    if learner.ranks.first:
        source = check_model_folder(learner.config.model.path, "model.path")
        write_model_folder(weights, source, learner.config.run.folder / EXPORT_FOLDER, DTYPES[learner.config.model.dtype])


def wait_for_last_evaluation(learner: Learner, stopping: Callable[[], bool]) -> None:
    """Keep serving the last weights until the service says that nothing is left to evaluate, or ``stopping()``."""
    assert learner.source is not None
    within_s = last_evaluation_s(learner.config)
    ends_at = time.monotonic() + within_s
    poll_s = min(learner.config.replay.poll_s, LONGEST_POLL_S)
    while not stopping():
        if time.monotonic() > ends_at:
            _log.warning("the last evaluation did not end within %g s", within_s)
            return
        reply = learner.source.finish(FinishRequest(incarnation=learner.incarnation, step=learner.step, wait_s=poll_s))
        note_evaluations(learner, reply.evaluations)
        if reply.done:
            return


def last_evaluation_s(config: Config) -> float:
    """Seconds that rank 0 waits for the last evaluation at most, and the other ranks for rank 0."""
    return _LAST_ROUNDS * config.replay.eval_timeout_s


def carry_out(learner: Learner, verdict: Verdict) -> str:
    """Stop, or go back to the newest checkpoint's weights and optimiser and on with new batches; why to stop. Collective.

    Step and batch numbers go on: the batches since that checkpoint stay behind, for they are what led out of the bounds.

    Raises:
        RunStoppedError: for a rollback without a checkpoint; a restart would come to the same point again.
    """
    if verdict.action == "stop":
        return verdict.reason
    found = list_checkpoints(learner.checkpoints.folder)
    if not found:
        raise RunStoppedError(f"{verdict.reason}: a rollback needs a checkpoint, got none under {learner.checkpoints.folder}")
    learner.checkpoints.load(found[-1])
    if learner.ranks.first:
        _log.warning("%s: back to the weights of %s", verdict.reason, found[-1].name)
    return ""
