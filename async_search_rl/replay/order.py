"""The order of the training questions: a seeded permutation, a new one each epoch.

A cursor counts questions from the run's beginning: epoch ``cursor // n``, place ``cursor % n``. It is all that has to be kept.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache

import numpy as np
import numpy.typing as npt


class QuestionOrder:
    """Which question (index into the file) comes at which cursor."""

    def __init__(self, questions: int, seed: int, shuffle: bool) -> None:
        self._questions = questions
        self._seed = seed
        self._shuffle = shuffle

    def at(self, cursor: int) -> int:
        """The question at ``cursor``."""
        epoch, place = divmod(cursor, self._questions)
        if not self._shuffle:
            return place
        return int(_permutation(self._questions, self._seed, epoch)[place])

    def next(self, cursor: int, leave_out: Container[int]) -> tuple[int, int] | None:
        """The first question from ``cursor`` on that is not left out, and the cursor after it; ``None`` if all are left out."""
        for position in range(cursor, cursor + 2 * self._questions):
            question = self.at(position)
            if question not in leave_out:
                return question, position + 1
        return None


@lru_cache(maxsize=4)
def _permutation(questions: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(questions)
