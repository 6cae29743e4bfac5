"""The questions that wait in a client, and how they are folded into requests. Pure but for the futures: time is passed in."""

from __future__ import annotations

import asyncio
from collections import deque

from async_search_rl.errors import SearchFailedError
from search.schema import Passage

MAX_FOLDED = 256
"""Most questions of one request."""
MAX_FOLDED_CHARS = 500_000
"""Characters after which a request is full."""


class Question:
    """One coroutine's query and whom to wake."""

    __slots__ = ("deadline_s", "done", "query", "topk")

    def __init__(self, query: str, topk: int, deadline_s: float, done: asyncio.Future[list[Passage]]) -> None:
        self.query = query
        self.topk = topk
        self.deadline_s = deadline_s
        self.done = done

    def answer(self, passages: list[Passage]) -> None:
        """Wake the caller, unless it has gone."""
        if not self.done.done():
            self.done.set_result(passages)

    def fail(self, error: BaseException) -> None:
        """Wake the caller with a SearchFailedError, unless it has gone."""
        if self.done.done():
            return
        reason = "the search client was closed" if isinstance(error, asyncio.CancelledError) else f"{type(error).__name__}: {error}"
        self.done.set_exception(error if isinstance(error, SearchFailedError) else SearchFailedError(reason))


class FoldingQueue:
    """First in, first out; bounded by the callers, each of which waits for one question."""

    def __init__(self) -> None:
        self._waiting: deque[Question] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, question: Question) -> None:
        """Let ``question`` wait for the next request."""
        self._waiting.append(question)

    def fold(self, now_s: float, most: int = MAX_FOLDED) -> list[Question]:
        """The next request: at most ``most`` of the oldest questions, of one top-k, without those whose caller has gone or whose
        time is up.
        """
        topk = self._waiting[0].topk
        folded: list[Question] = []
        characters = 0
        while (
            self._waiting
            and self._waiting[0].topk == topk
            and len(folded) < min(most, MAX_FOLDED)
            and characters < MAX_FOLDED_CHARS
        ):
            question = self._waiting.popleft()
            if question.deadline_s <= now_s:
                question.fail(SearchFailedError("no request could be sent before the search's deadline"))
            elif not question.done.done():
                folded.append(question)
                characters += len(question.query)
        return folded

    def fail_all(self, error: SearchFailedError) -> None:
        """Nobody waits any more."""
        while self._waiting:
            self._waiting.popleft().fail(error)
