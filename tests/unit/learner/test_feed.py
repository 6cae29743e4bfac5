import threading
import time

import pytest
import torch

from async_search_rl.codec import encode_group
from async_search_rl.errors import DeadlineError, ServiceError
from async_search_rl.replay.schema import CutReply, EvaluationResult
from learner.feed import _PAUSE_S, Feed, Prefetch
from learner.ranks import Ranks
from tests.learner_cases import groups

ALONE = Ranks(0, 1, torch.device("cpu"), None)
ENCODED = [encode_group(g) for g in groups(2)]
EVALUATION = EvaluationResult(round=0, version=1, asked=1, questions=1, means={}, by_source={}, seconds=1.0)


class Source:
    """Serves what it is given, in order, once its gate is open."""

    def __init__(self, *replies):
        self.replies, self.asked, self.gate = list(replies), [], threading.Event()
        self.gate.set()

    def cut(self, request):
        assert self.gate.wait(10)
        self.asked.append(request.cut)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


def feed(source, last_cut=9, timeout_s=10.0):
    prefetch = Prefetch(source, incarnation=1, poll_s=0.01)
    return Feed(ALONE, prefetch, last_cut, timeout_s), prefetch


def test_the_next_batch_is_fetched_while_the_current_one_is_trained():
    source = Source(CutReply(groups=ENCODED, counters={"buffered": 3.0}))
    batches, prefetch = feed(source, last_cut=1)
    first = batches.next(0, lambda: False)
    assert [g.ticket for g in first.batch.groups] == [0, 1]
    assert first.buffered == 3.0
    prefetch._thread.join(10)
    assert source.asked == [0, 1], "batch 1 was asked for before anybody wanted it"
    batches.next(1, lambda: False)
    prefetch.close()
    assert source.asked == [0, 1], "there is no batch after the last one"


def test_polls_without_groups_are_repeated_and_their_evaluations_kept():
    waiting = CutReply(waiting_for="2 groups", evaluations=[EVALUATION])
    batches, prefetch = feed(Source(waiting, waiting, CutReply(groups=ENCODED)), last_cut=0)
    delivery = batches.next(0, lambda: False)
    assert delivery.batch is not None
    assert delivery.evaluations == (EVALUATION, EVALUATION)
    prefetch.close()


def test_a_service_that_answers_at_once_is_not_asked_without_end():
    source = Source(CutReply(waiting_for="2 groups"))
    batches, prefetch = feed(source, timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="waiting for 2 groups"):
        batches.next(0, lambda: False)
    prefetch.close()
    assert len(source.asked) <= (time.monotonic() - began) / _PAUSE_S + 1


def test_a_stop_of_the_service_comes_through_with_its_reason():
    batches, prefetch = feed(Source(CutReply(stop="every group is filtered")))
    delivery = batches.next(0, lambda: False)
    assert (delivery.batch, delivery.stop) == (None, "every group is filtered")
    prefetch.close()


def test_a_stop_asked_of_the_process_ends_the_wait():
    source = Source(CutReply(waiting_for="groups"))
    batches, prefetch = feed(source)
    looks = iter([False, False, False])
    delivery = batches.next(0, lambda: next(looks, True))
    assert (delivery.batch, delivery.stop) == (None, "")
    prefetch.close()


def test_a_wait_that_is_too_long_says_for_what():
    batches, prefetch = feed(Source(CutReply(waiting_for="2 of 2 groups: no actor is alive")), timeout_s=0.01)
    with pytest.raises(DeadlineError, match="no actor is alive"):
        batches.next(0, lambda: False)
    prefetch.close()


def test_a_deadline_that_the_fetch_missed_is_raised_at_once_and_not_waited_out():
    batches, prefetch = feed(Source(DeadlineError("POST /cut was not answered within 300 s")), timeout_s=0.5)
    with pytest.raises(DeadlineError, match="POST /cut was not answered"):
        batches.next(0, lambda: False)
    prefetch.close()


def test_an_error_of_the_service_is_raised_where_the_batch_is_taken():
    batches, prefetch = feed(Source(ServiceError("the log is full")))
    with pytest.raises(ServiceError, match="the log is full"):
        batches.next(0, lambda: False)
    prefetch.close()
