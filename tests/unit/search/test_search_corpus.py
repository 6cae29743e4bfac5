"""The corpus: row i is line i, plain or packed, and a wrong file is refused by name."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from async_search_rl.errors import DataError
from search.corpus import Corpus, index_folder, open_corpus
from search.schema import join_contents, split_contents

LINES = [
    {"id": "a", "contents": '"Ä"\nfirst 🙂'},
    {"id": 7, "contents": "no title"},
    {"id": "c", "contents": '"T"\nlast', "url": "u"},
]


def text(last_newline: bool = True) -> bytes:
    return "\n".join(json.dumps(line, ensure_ascii=False) for line in LINES).encode() + (b"\n" if last_newline else b"")


@pytest.mark.parametrize("last_newline", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_row_i_is_line_i(tmp_path: Path, last_newline: bool, packed: bool) -> None:
    path = tmp_path / ("corpus.jsonl.gz" if packed else "corpus.jsonl")
    path.write_bytes(gzip.compress(text(last_newline)) if packed else text(last_newline))
    for _ in range(2):  # The second time from the offsets on disk.
        corpus = open_corpus(path)
        assert len(corpus) == 3
        assert [json.loads(line) for line in corpus.documents(np.array([2, 0, 1]))] == [LINES[2], LINES[0], LINES[1]]
        assert list(corpus.iter_contents()) == [line["contents"] for line in LINES]
        corpus.close()


def test_stamp_is_of_the_text_not_of_the_packing(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_bytes(text())
    packed.write_bytes(gzip.compress(text()))
    assert open_corpus(plain).stamp.sha256 == open_corpus(packed).stamp.sha256


def test_a_changed_corpus_gets_new_offsets(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(text())
    open_corpus(path).close()
    path.write_bytes(text() + text())
    os.utime(path, ns=(1, 1))
    assert len(open_corpus(path)) == 6


def test_rows_outside_are_refused(make_corpus: Callable[[int], Corpus]) -> None:
    corpus = make_corpus(3)
    for row in (-1, 3):
        with pytest.raises(DataError, match="row"):
            corpus.contents(row)
        with pytest.raises(DataError, match="row"):
            corpus.documents(np.array([0, row]))


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(text() + b'{"id": "x"}\n')
    corpus = open_corpus(path)
    with pytest.raises(DataError, match="line 4"):
        corpus.documents(np.array([3]))


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        open_corpus(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="empty"):
        open_corpus(tmp_path / "empty.jsonl")
    assert not (index_folder(tmp_path / "empty.jsonl") / "corpus.json").exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(text())[:-12])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz"):
        open_corpus(cut)
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(text())
    open_corpus(path).close()
    (index_folder(path) / "offsets.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"offsets\.npy must be an array"):
        open_corpus(path)


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Title"\ntext', "Title", "text"),
        ("Title\ntext\nmore", "Title", "text\nmore"),
        ('"A "quoted" title"\nt', 'A "quoted" title', "t"),
        ("only text", "", "only text"),
        ('"\nx', '"', "x"),
        ("", "", ""),
    ],
)
def test_split_contents(contents: str, title: str, text: str) -> None:
    assert split_contents(contents) == (title, text)


def test_join_is_the_inverse_of_split() -> None:
    assert split_contents(join_contents('a "b"', "c\nd")) == ('a "b"', "c\nd")
