r"""Passages of a corpus: a title and a text, in the JSON lines that retrieval services of this kind read.

Out: lines `{"id": "0", "contents": "\"Title\"\ntext"}`; the id is the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Passage(NamedTuple):
    """One document."""

    title: str
    """Title without double quotes."""
    text: str
    """Text on one line."""


def write_corpus(path: Path, passages: Iterable[Passage]) -> None:
    """Write ``passages`` as JSON lines."""
    with path.open("w", encoding="utf-8") as out:
        for row, passage in enumerate(passages):
            line = {"id": str(row), "contents": f'"{passage.title}"\n{passage.text}'}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_corpus(path: Path) -> Iterator[Passage]:
    """The passages of a file that :func:`write_corpus` wrote, in order."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            title, _, text = json.loads(line)["contents"].partition("\n")
            yield Passage(title.strip('"'), text)
