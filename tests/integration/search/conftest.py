"""A small served corpus, for this folder's tests."""

from pathlib import Path

import pytest

from async_search_rl.config.retrieval import RetrievalSection
from tests.search_data import documents, write_corpus


@pytest.fixture
def settings(tmp_path: Path) -> RetrievalSection:
    """Settings of a service over 300 made-up documents."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents(300))
    return RetrievalSection(corpus=str(corpus), backend="tantivy", threads=2)
