"""A small corpus of made-up places, for the tests of retrieval."""

from collections.abc import Callable
from pathlib import Path

import pytest

from search.corpus import Corpus, open_corpus
from tests.search_data import documents, write_corpus


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[[int], Corpus]:
    """Makes a corpus of so many documents in the test's folder."""

    def make(count: int) -> Corpus:
        return open_corpus(write_corpus(tmp_path / "corpus.jsonl", documents(count)))

    return make
