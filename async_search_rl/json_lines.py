"""Records as JSON lines: written one by one, read whole or while they are written.

In: maps of numbers, strings and lists, one a record. Out: a file with one object a line, appended and written at once, and the same
objects back. A line that a killed writer left unfinished is passed over. Nobody waits for anybody here.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class JsonLines:
    """Appends one JSON object a line to ``path``; whoever reads sees whole lines, and a killed writer spoils none but its last.

    Non-finite numbers become null. Each line gets ``time``, seconds since 1970. Not for use by several processes at once.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        if self._file.tell() and not _ends_with_newline(path):
            self._file.write(b"\n")

    def write(self, values: Mapping[str, Any]) -> None:
        """Append ``values`` (numbers, strings, lists and maps of these).

        Raises:
            OSError: the disk refused the line or a part of it.
        """
        line = json.dumps(_finite({"time": round(time.time(), 3), **values}), ensure_ascii=False, allow_nan=False)
        left = memoryview(line.encode() + b"\n")
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Close the file; further writes raise ValueError."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of ``path``, oldest first, without lines a killed writer left unfinished; none if there is no file."""
    path = Path(path)
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if (value := _object(line)) is not None:
                yield value


class JsonLinesTail:
    """Reads a growing file of JSON lines, each line once; a missing file is an empty one."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._at = 0

    def new(self) -> list[dict[str, Any]]:
        """The objects of the whole lines that were appended since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        return [value for line in whole.splitlines() if (value := _object(line)) is not None]


def surviving_steps(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the history that survived: a step that was trained again after a restart replaces it and all later ones."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row.get("step", -1):
            kept.pop()
        if "step" in row:
            kept.append(row)
    return kept


def _object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; ``None`` for the rest of a line that a killed writer left unfinished."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
