"""Where a search runs: in the event loop only where it is over at once and waits for nobody."""

import asyncio
import threading

import numpy as np
import pytest

from search.index import CorpusIndex, Hit, Ranking
from search.worker import Worker


class Rows:
    """Ranks row 0 first, in ``seconds`` of its own clock, and notes in which thread."""

    releases_gil = True

    def __init__(self, seconds):
        self.seconds, self.threads, self.now = seconds, [], 0.0

    def rank(self, queries, topk):
        self.threads.append(threading.current_thread())
        self.now += self.seconds
        return Ranking(np.zeros((len(queries), 1), np.int64), np.ones((len(queries), 1), np.float32))

    def info(self):
        return {}

    def close(self):
        pass


class Remote(Rows):
    """The same as an index that asks another server."""

    def search(self, queries, topk):
        self.threads.append(threading.current_thread())
        return [[Hit(b"{}", 1.0)] for _ in queries]


def searched_in_loop(index, rows, batches):
    """For each batch size of ``batches``, whether its search ran in the event loop's thread."""

    async def go():
        worker = Worker(lambda: index, clock=lambda: rows.now)
        await worker.start()
        for size in batches:
            answers = await worker.search(["q"] * size, 1)
            assert len(answers) == size
        await worker.stop()

    asyncio.run(go())
    return [thread is threading.main_thread() for thread in rows.threads]


def test_a_quick_search_runs_at_once_after_a_first_one_that_shows_that_it_is(make_corpus):
    rows = Rows(0.0)
    assert searched_in_loop(CorpusIndex(rows, make_corpus(3)), rows, [1, 1, 2]) == [False, True, True]


@pytest.mark.parametrize("seconds", [0.003, 0.02])
def test_a_slow_search_leaves_the_event_loop_alone(make_corpus, seconds):
    rows = Rows(seconds)
    assert searched_in_loop(CorpusIndex(rows, make_corpus(3)), rows, [1, 1, 64]) == [False, False, False]


def test_a_large_batch_of_quick_queries_leaves_the_event_loop_alone(make_corpus):
    rows = Rows(0.001)
    assert searched_in_loop(CorpusIndex(rows, make_corpus(3)), rows, [1, 64]) == [False, False]


def test_after_a_long_search_a_short_one_is_not_trusted_to_be_quick(make_corpus):
    class PerCall(Rows):
        def rank(self, queries, topk):
            self.seconds = 0.01 if len(queries) > 1 else 0.0
            return super().rank(queries, topk)

    rows = PerCall(0.0)
    assert searched_in_loop(CorpusIndex(rows, make_corpus(3)), rows, [64, 1, 1]) == [False, False, True]


def test_an_index_that_asks_others_never_runs_in_the_event_loop():
    remote = Remote(0.0)
    assert searched_in_loop(remote, remote, [1, 1, 1]) == [False, False, False]
