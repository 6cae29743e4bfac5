"""Text to terms for the lexical back ends: bm25s' own tokenizer with English stop words and the Snowball stemmer.

The same analysis serves documents and queries; its name stands in every lexical manifest.
"""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import Stemmer

ANALYZER = "bm25s-word2+en-stopwords+snowball-english"

_stemmer = Stemmer.Stemmer("english")


def terms(texts: Sequence[str]) -> list[list[str]]:
    """The terms of each text, in order, repeats kept; an empty list where none is left."""
    if not texts:
        return []
    tokenized = bm25s.tokenize(list(texts), stopwords="en", stemmer=_stemmer, return_ids=False, show_progress=False)
    return [list(words) for words in tokenized]
