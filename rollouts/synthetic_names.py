"""Made-up names and values, built from a tokenizer's own pieces.

Why: a tiny policy must learn to *copy* what it reads rather than to recall it, and with tied embeddings a token that is never
emitted in training is pushed down until it cannot be copied. Renaming the entities of demonstrations with these names makes
every word piece of the vocabulary occur in answers and queries.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterable

MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
_ONSETS = sorted((*"bcdfghjklmnprstvwz", "br", "dr", "gr", "kh", "sh", "st", "tr"))
_SYLLABLES = [
    onset + vowel + coda
    for onset in _ONSETS
    for vowel in ("a", "e", "i", "o", "u", "ai", "ou")
    for coda in ("", "", "n", "r", "l", "s")
]


class SyntheticNames:
    """Draws names and values; ``refused(text)`` tells which must not come out (the held-out entities')."""

    def __init__(self, pieces: Iterable[str], refused: Callable[[str], bool]) -> None:
        pieces = list(pieces)
        self._first = [piece[1:] for piece in pieces if re.fullmatch(r" [^\W\d_]+", piece) and piece[1].isupper()]
        self._inner_capital = [piece for piece in pieces if re.fullmatch(r"[^\W\d_]+", piece) and piece[0].isupper()]
        self._rest = [piece for piece in pieces if re.fullmatch(r"[^\W\d_]+", piece) and piece.islower()]
        self._lower = [piece[1:] for piece in pieces if re.fullmatch(r" [^\W\d_]+", piece) and piece.islower()]
        self._refused = refused

    def name(self, rng: random.Random, words: int = 0) -> str:
        """A capitalised name of ``words`` words (0: one to three)."""
        while True:
            drawn = " ".join(self._word(rng) for _ in range(words or rng.choice((1, 1, 1, 2, 2, 3))))
            if not self._refused(drawn):
                return drawn

    def value(self, relation: str, like: str, rng: random.Random) -> str:
        """A value that could stand in the place of ``like`` as the object of ``relation``."""
        if relation in ("born", "died", "year"):
            return str(rng.randint(1000, 2020))
        if relation == "independence_date":
            return f"{rng.randint(1, 31)} {rng.choice(MONTHS)} {rng.randint(1700, 2015)}"
        if relation == "internet_code":
            return "." + rng.choice(string.ascii_lowercase) + rng.choice(string.ascii_lowercase)
        if relation in ("export", "currency"):
            words = [rng.choice(self._lower) for _ in range(rng.choice((1, 2, 2, 3)))]
            if relation == "currency" and rng.random() < 0.3:
                words[0] = self.name(rng, 1)
            return " ".join(words)
        return self.name(rng, min(4, max(1, len(like.split()) + rng.choice((-1, 0, 0, 0, 1)))))

    def _word(self, rng: random.Random) -> str:
        if rng.random() < 0.3:
            return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((1, 2, 2, 3)))).capitalize()
        word = rng.choice(self._first) + "".join(rng.choice(self._rest) for _ in range(rng.choice((0, 0, 1, 1, 2, 3))))
        if self._inner_capital and rng.random() < 0.06:
            return word + rng.choice("-'") + rng.choice(self._inner_capital)
        return word
