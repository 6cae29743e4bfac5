"""Tokenised demonstrations: what the demonstrator hands to the supervised start.

All sequences lie end to end in flat arrays, so that hundreds of thousands of them cross a process boundary cheaply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from async_search_rl.errors import SchemaError


class SupervisedSet:
    """Token sequences with a mask of the tokens that are trained."""

    def __init__(self, tokens: NDArray[np.int32], trained: NDArray[np.bool_], lengths: NDArray[np.int64]) -> None:
        """``tokens`` and ``trained`` have shape (sum of ``lengths``,); ``lengths`` one entry a sequence.

        Raises:
            SchemaError: when the shapes do not fit together or a sequence is empty.
        """
        if tokens.shape != trained.shape or int(lengths.sum()) != len(tokens):
            raise SchemaError(f"tokens and trained must hold sum(lengths) = {lengths.sum()}, got {tokens.shape}, {trained.shape}")
        if len(lengths) == 0 or int(lengths.min()) < 1:
            raise SchemaError("a supervised set must hold sequences of at least one token, got none or an empty one")
        self.tokens, self.trained, self.lengths = tokens, trained, lengths
        self._ends = np.cumsum(lengths)

    @classmethod
    def from_sequences(cls, sequences: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> SupervisedSet:
        """A set of (token ids, trained mask) pairs."""
        pairs = list(sequences)
        return cls(
            np.concatenate([np.asarray(ids, np.int32) for ids, _ in pairs] or [np.zeros(0, np.int32)]),
            np.concatenate([np.asarray(mask, np.bool_) for _, mask in pairs] or [np.zeros(0, np.bool_)]),
            np.asarray([len(ids) for ids, _ in pairs], np.int64),
        )

    @classmethod
    def concatenate(cls, sets: Sequence[SupervisedSet]) -> SupervisedSet:
        """The sequences of all ``sets``, in order."""
        return cls(
            np.concatenate([part.tokens for part in sets]),
            np.concatenate([part.trained for part in sets]),
            np.concatenate([part.lengths for part in sets]),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids and trained mask of one sequence."""
        end = int(self._ends[index])
        piece = slice(end - int(self.lengths[index]), end)
        return self.tokens[piece], self.trained[piece]
