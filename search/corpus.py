"""A corpus of JSON lines ``{"id", "contents"}`` as an offset-indexed memory map: row i is line i, and no text is held in memory.

In: ``corpus.jsonl`` or ``corpus.jsonl.gz``. Beside it, in the folder ``<corpus>.index/`` (or another that is named), lie the
offsets of its lines, its digest, and the unpacked text of a ``.gz``: written once, 8 bytes a document, then mapped.
Opening costs neither time nor memory that grows with the text.
"""

from __future__ import annotations

import gzip
import hashlib
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from async_search_rl.errors import DataError
from async_search_rl.files import write_whole
from search.schema import WireDocument

_BLOCK_BYTES = 1 << 24
_OFFSETS = "offsets.npy"
_STAMP = "corpus.json"
_UNPACKED = "corpus.jsonl"
_DECODER = msgspec.json.Decoder(WireDocument)


class CorpusStamp(msgspec.Struct, frozen=True):
    """Which corpus an index was made from."""

    rows: int
    """Documents."""
    bytes: int
    """Size of the (unpacked) text."""
    sha256: str
    """Digest of the (unpacked) text."""
    source_bytes: int
    """Size of the corpus file itself."""
    source_mtime_ns: int
    """Its time of change when the offsets were made."""


class Corpus:
    """An opened corpus. Rows may be read from several threads at once."""

    def __init__(self, path: Path, text: Path, offsets: NDArray[np.int64], stamp: CorpusStamp) -> None:
        self.path = path
        self.stamp = stamp
        self._offsets = np.asarray(offsets)
        self._checked = bytearray(stamp.rows)
        with text.open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return self.stamp.rows

    def documents(self, rows: NDArray[np.int64]) -> list[bytes]:
        """The JSON objects of ``rows`` as they stand in the file.

        Raises:
            DataError: there is no such row, or its line is not ``{"id", "contents"}``.
        """
        if rows.size and not (rows.min() >= 0 and rows.max() < self.stamp.rows):
            raise DataError(f"rows must be between 0 and {self.stamp.rows - 1} in {self.path}, got {rows.min()} to {rows.max()}")
        text, checked = self._text, self._checked
        lines = []
        for row, start, end in zip(rows.tolist(), self._offsets[rows].tolist(), self._offsets[rows + 1].tolist(), strict=True):
            line = text[start:end]
            if not checked[row]:  # Once a row, so that a reply can carry the line as it stands.
                self._parse(line, row)
                checked[row] = 1
            lines.append(line)
        return lines

    def line(self, row: int) -> bytes:
        """Line ``row`` of the file, unchecked.

        Raises:
            DataError: there is no such row.
        """
        if not 0 <= row < self.stamp.rows:
            raise DataError(f"row must be between 0 and {self.stamp.rows - 1} in {self.path}, got {row}")
        return self._text[int(self._offsets[row]) : int(self._offsets[row + 1])]

    def contents(self, row: int) -> str:
        r"""``"Title"\ntext`` of ``row``."""
        return self._parse(self.line(row), row).contents

    def iter_contents(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
        """The contents of rows ``start`` to ``stop`` in order."""
        for row in range(start, len(self) if stop is None else stop):
            yield self.contents(row)

    def info(self) -> dict[str, Any]:
        """Path, rows, bytes and digest."""
        return {"path": str(self.path), "rows": self.stamp.rows, "bytes": self.stamp.bytes, "sha256": self.stamp.sha256}

    def close(self) -> None:
        """Unmap the text."""
        self._text.close()

    def _parse(self, line: bytes, row: int) -> WireDocument:
        try:
            return _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f'{self.path} line {row + 1} must be {{"id", "contents"}}: {error}') from error


def index_folder(corpus: str | Path) -> Path:
    """Where offsets and indexes of ``corpus`` lie unless the configuration names a folder."""
    path = Path(corpus)
    return path.with_name(path.name + ".index")


def open_corpus(corpus: str | Path, folder: Path | None = None, progress: Callable[[int, int], None] | None = None) -> Corpus:
    """Open ``corpus``; make its offsets in ``folder`` first where they are missing or of another text.

    ``progress(done_bytes, all_bytes)`` is called while the offsets are made.

    Raises:
        DataError: the file is missing, empty, not JSON lines, or not readable; or the folder cannot be written.
    """
    path = Path(corpus)
    folder = index_folder(path) if folder is None else folder
    if not path.is_file():
        raise DataError(f"retrieval.corpus must be a file of JSON lines, got {str(corpus)!r}, which is missing")
    try:
        stamp = _read_stamp(folder, path) or _scan(path, folder, progress)
        text = folder / _UNPACKED if _is_packed(path) else path
        offsets = _load_offsets(folder / _OFFSETS)
        if offsets.shape != (stamp.rows + 1,) or text.stat().st_size != stamp.bytes:
            raise DataError(f"{folder} must hold the offsets of {path}, got those of another file; remove the folder")
        return Corpus(path, text, offsets, stamp)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot open the corpus {path} with its offsets in {folder}: {error}") from error


def _is_packed(path: Path) -> bool:
    return path.suffix == ".gz"


def _read_stamp(folder: Path, path: Path) -> CorpusStamp | None:
    """The stamp of the offsets in ``folder`` if they are of ``path`` as it is now."""
    try:
        stamp = msgspec.json.decode((folder / _STAMP).read_bytes(), type=CorpusStamp)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    now = path.stat()
    return stamp if (stamp.source_bytes, stamp.source_mtime_ns) == (now.st_size, now.st_mtime_ns) else None


def _scan(path: Path, folder: Path, progress: Callable[[int, int], None] | None) -> CorpusStamp:
    """One pass over the text: offsets, digest, and the unpacked copy of a ``.gz``."""
    folder.mkdir(parents=True, exist_ok=True)
    source = path.stat()
    digest = hashlib.sha256()
    ends: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    size, last, packed = 0, b"", _is_packed(path)
    unpacked = folder / f".{_UNPACKED}.{os.getpid()}"
    with gzip.open(path, "rb") if packed else path.open("rb") as blocks, unpacked.open("wb") as copy:
        while block := blocks.read(_BLOCK_BYTES):
            digest.update(block)
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")).astype(np.int64) + (size + 1))
            size += len(block)
            last = block[-1:]
            if packed:
                copy.write(block)
            if progress:
                progress(min(size, source.st_size), source.st_size)
    offsets = np.concatenate(ends)
    if size and last != b"\n":
        offsets = np.append(offsets, np.int64(size))
    if len(offsets) < 2:
        raise DataError(f"{path} must hold at least one document, got an empty file")
    stamp = CorpusStamp(len(offsets) - 1, size, digest.hexdigest(), source.st_size, source.st_mtime_ns)
    _replace(folder / _OFFSETS, offsets)
    if packed:
        unpacked.replace(folder / _UNPACKED)
    else:
        unpacked.unlink()
    write_whole(folder / _STAMP, msgspec.json.encode(stamp))
    return stamp


def _load_offsets(path: Path) -> NDArray[np.int64]:
    try:
        offsets: NDArray[np.int64] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} must be an array of offsets: {error}; remove its folder") from error
    return offsets


def _replace(path: Path, array: NDArray[np.int64]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.npy")
    np.save(aside, array, allow_pickle=False)
    aside.replace(path)
