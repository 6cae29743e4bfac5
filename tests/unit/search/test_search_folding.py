"""Folding: every waiting question goes into exactly one request, in order, or fails."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.errors import SearchFailedError
from search import folding
from search.folding import FoldingQueue, Question

WAITING = st.lists(st.tuples(st.text(max_size=5), st.integers(1, 2), st.integers(0, 20), st.booleans()), max_size=40)


@given(WAITING)
def test_each_question_is_folded_once_or_failed(waiting: list[tuple[str, int, int, bool]]) -> None:
    async def scenario() -> None:
        queue = FoldingQueue()
        questions = [
            Question(query, topk, deadline, asyncio.get_running_loop().create_future()) for query, topk, deadline, _ in waiting
        ]
        for question, (*_, gone) in zip(questions, waiting, strict=True):
            queue.add(question)
            if gone:
                question.done.cancel()
        requests = []
        while queue:
            requests.append(queue.fold(now_s=10))
        expected = [q for q, (*_, deadline, gone) in zip(questions, waiting, strict=True) if deadline > 10 and not gone]
        assert [question for request in requests for question in request] == expected
        assert all(len({question.topk for question in request}) <= 1 for request in requests)
        for question, (*_, deadline, gone) in zip(questions, waiting, strict=True):
            if deadline <= 10 and not gone:
                assert isinstance(question.done.exception(), SearchFailedError)

    asyncio.run(scenario())


def test_requests_are_bounded() -> None:
    async def scenario() -> None:
        queue = FoldingQueue()
        for i in range(600):
            queue.add(Question("x" * (1 if i < 300 else 200_000), 3, 100.0, asyncio.get_running_loop().create_future()))
        sizes = []
        while queue:
            sizes.append(len(queue.fold(0.0)))
        assert sizes[:2] == [folding.MAX_FOLDED, 44 + 3]
        assert set(sizes[2:-1]) == {3}
        assert sum(sizes) == 600
        queue.fail_all(SearchFailedError("closed"))

    asyncio.run(scenario())
