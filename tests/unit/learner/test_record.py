"""What the loop does between steps: announcements, and the waits of the end."""

import pytest
import torch

from async_search_rl.config import parse_config
from async_search_rl.errors import DeadlineError
from async_search_rl.replay.schema import Ack, CutReply, FinishReply
from learner.assemble import Learner
from learner.feed import Feed, Prefetch
from learner.guard import Guard
from learner.loop import train
from learner.ranks import Ranks
from learner.record import announce_if_due

ALONE = Ranks(0, 1, torch.device("cpu"), None)


class Service:
    """The learner's calls, noted; there is never a batch."""

    def __init__(self):
        self.announced = []

    def cut(self, request):
        return CutReply(waiting_for="groups")

    def publish(self, request):
        self.announced.append((request.incarnation, request.step, request.cut))
        return Ack()

    def finish(self, request):
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
    assert resumed.source.announced == [(2, 5, 5)]


@pytest.mark.parametrize(("step", "due"), [(4, True), (5, False), (9, True)])
def test_later_announcements_are_every_second_step_and_the_last(step, due):
    trained, figures = learner(step, weights={"publish_every": 2}, replay={"max_staleness": 2}), {}
    assert announce_if_due(trained, figures) == ""
    assert trained.source.announced == ([(2, step, step)] if due else [])
    assert figures["publish_stall_s"] == (0.25 if due else 0.0)
