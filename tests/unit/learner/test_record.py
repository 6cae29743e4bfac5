"""What the loop does between steps: announcements, and the waits of the end."""

import pytest
import torch

from async_search_rl.config import parse_config
from async_search_rl.errors import DeadlineError, RunStoppedError
from async_search_rl.replay.schema import Ack, CutReply, FinishReply
from learner.assemble import Learner
from learner.checkpoint import Checkpoints
from learner.closing import carry_out, last_evaluation_s, wait_for_last_evaluation
from learner.feed import Feed, Prefetch
from learner.guard import Guard, Verdict
from learner.loop import collective_deadline_s, train
from learner.ranks import Ranks
from learner.record import announce_if_due

ALONE = Ranks(0, 1, torch.device("cpu"), None)


class Service:
    """The learner's calls, noted; there is never a batch."""

    def __init__(self):
        self.announced, self.finishes = [], 0

    def cut(self, request):
        return CutReply(waiting_for="groups")

    def publish(self, request):
        self.announced.append((request.incarnation, request.step, request.cut))
        return Ack()

    def finish(self, request):
        self.finishes += 1
        return FinishReply(done=False)


class Publisher:
    """Stages nothing."""

    def stage(self, version):
        return 0.25


class Flag:
    """A stop that has been asked for, or not."""

    def __init__(self, is_set=False):
        self.is_set = is_set


def learner(step, **sections):
    """A learner without networks, resumed at ``step``."""
    config = parse_config({"run": {"max_steps": 9}, **sections})
    service = Service()
    feed = Feed(ALONE, Prefetch(service, incarnation=2, poll_s=0.01), last_cut=8, timeout_s=0.01)
    parts = dict.fromkeys(("policy", "critic", "trainer", "checkpoints", "metrics", "speed"))
    return Learner(
        config=config,
        ranks=ALONE,
        publisher=Publisher(),
        feed=feed,
        source=service,
        guard=Guard(config.guard),
        incarnation=2,
        step=step,
        **parts,
    )


def test_a_learner_that_resumes_between_two_publications_announces_its_weights_all_the_same():
    resumed = learner(5, weights={"publish_every": 2}, replay={"max_staleness": 2})
    with pytest.raises(DeadlineError, match="groups"):
        train(resumed, Flag())
    resumed.feed._prefetch.close()
    assert resumed.source.announced == [(2, 5, 5)]


@pytest.mark.parametrize(("step", "due"), [(4, True), (5, False), (9, True)])
def test_later_announcements_are_every_second_step_and_the_last(step, due):
    trained, figures = learner(step, weights={"publish_every": 2}, replay={"max_staleness": 2}), {}
    assert announce_if_due(trained, figures) == ""
    assert trained.source.announced == ([(2, step, step)] if due else [])
    assert figures["publish_stall_s"] == (0.25 if due else 0.0)


def test_a_stop_ends_the_wait_for_the_last_evaluation():
    ended = learner(9)
    looks = iter([False, False])
    wait_for_last_evaluation(ended, lambda: next(looks, True))
    assert ended.source.finishes == 2


def test_the_wait_for_the_last_evaluation_has_a_deadline_and_says_so(caplog):
    ended = learner(9, replay={"eval_timeout_s": 1e-9})
    wait_for_last_evaluation(ended, lambda: False)
    assert "the last evaluation did not end within" in caplog.text


def test_the_other_ranks_wait_as_long_as_rank_0_may():
    config = parse_config({"learner": {"batch_timeout_s": 5.0}, "replay": {"eval_timeout_s": 1000.0}})
    assert collective_deadline_s(config) > last_evaluation_s(config) == 2000.0
    assert collective_deadline_s(parse_config({"learner": {"batch_timeout_s": 5000.0}})) > 5000.0


def test_a_rollback_without_a_checkpoint_stops_the_run_for_good(tmp_path):
    gone_wrong = learner(3, run={"dir": str(tmp_path), "name": "r", "max_steps": 9})
    gone_wrong.checkpoints = Checkpoints(gone_wrong.config, {}, ALONE)
    with pytest.raises(RunStoppedError, match="entropy is low: a rollback needs a checkpoint"):
        carry_out(gone_wrong, Verdict("rollback", "entropy is low"))
