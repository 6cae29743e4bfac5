"""The trajectory log on disk: segments of framed, checksummed records.

A frame is ``magic, payload length, checksum of the payload, offset of its batch, checksum of these`` and the payload. A *batch* is
what one sync made durable; the next one is written only after it. So a bad frame with a later batch behind it is damage, while one
without is the torn end of the last, never answered write. Every segment starts with a snapshot record, given by the caller.

Appending only queues: :meth:`Log.flush` writes and syncs everything queued so far, from any one thread at a time.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from async_search_rl.errors import LogCorruptError
from async_search_rl.files import sync
from async_search_rl.replay.records import Location

_MAGIC = b"ASRL"
_HEADER = struct.Struct("<4sQIQ")
_CHECK = struct.Struct("<I")
FRAME_BYTES = _HEADER.size + _CHECK.size
"""Bytes of a frame beside its payload."""


class _Frame(NamedTuple):
    payload: bytes
    offset: int
    end: int
    batch: int


class Log:
    """The segments of one folder, for one process.

    ``segment_bytes``: size after which :attr:`full` asks for a new segment (its snapshot not counted). Call :meth:`recover` once
    before anything else.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._queue: list[tuple[int, bytes]] = []
        self._queued_bytes = 0
        self._segment = 0
        self._size = 0
        self._records_from = 0
        self._batch = 0
        self._file: tuple[int, int] | None = None

    @property
    def full(self) -> bool:
        """Whether the next record should start a new segment; always true for an empty log."""
        return self._segment == 0 or self._size - self._records_from >= self._segment_bytes

    @property
    def queued_bytes(self) -> int:
        """Bytes appended and not yet synced."""
        return self._queued_bytes

    def recover(self) -> list[tuple[bytes, Location]]:
        """Check every segment, cut off a torn end, and return the records of the last segment, its snapshot first.

        Raises:
            LogCorruptError: for damage before the end, or a missing segment.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        numbers = self.segments()
        if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise LogCorruptError(f"segments of {self._folder} must follow one another, got {numbers}")
        for number in numbers[:-1]:
            self._check_whole(number)
        while numbers:
            records = self._recover_last(numbers[-1])
            if records:
                return records
            self._path(numbers.pop()).unlink()
        return []

    def roll(self, snapshot: bytes) -> None:
        """Start a new segment with ``snapshot``."""
        with self._lock:
            self._segment += 1
            self._size = self._batch = 0
        self.append(snapshot)
        self._records_from = self._size

    def append(self, payload: bytes) -> Location:
        """Queue one record; it is durable after the next :meth:`flush`."""
        with self._lock:
            header = _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload), self._batch)
            frame = header + _CHECK.pack(zlib.crc32(header)) + payload
            location = Location(self._segment, self._size, len(frame))
            self._queue.append((self._segment, frame))
            self._queued_bytes += len(frame)
            self._size += len(frame)
        return location

    def flush(self) -> None:
        """Write and sync everything queued.

        Raises:
            OSError: the disk refused; what was queued is lost and the log must not be used any more.
        """
        with self._writing:
            with self._lock:
                queue, self._queue = self._queue, []
                self._batch = self._size
            start = 0
            while start < len(queue):
                segment = queue[start][0]
                end = start
                while end < len(queue) and queue[end][0] == segment:
                    end += 1
                self._write(segment, b"".join(frame for _, frame in queue[start:end]))
                start = end
            with self._lock:
                self._queued_bytes -= sum(len(frame) for _, frame in queue)

    def read(self, location: Location) -> bytes:
        """The payload of a record that was flushed.

        Raises:
            LogCorruptError: it is gone or damaged.
        """
        path = self._path(location.segment)
        try:
            with path.open("rb") as file:
                file.seek(location.offset)
                data = file.read(location.length)
        except OSError as error:
            raise LogCorruptError(f"cannot read {path}: {error.strerror}") from error
        frame = _frame_at(data, 0)
        if frame is None or frame.end != location.length:
            raise LogCorruptError(f"{path} is damaged at byte {location.offset}")
        return frame.payload

    def segments(self) -> list[int]:
        """Numbers of the segments on disk, ascending."""
        return sorted(int(path.stem.rpartition("-")[2]) for path in self._folder.glob("segment-*.log"))

    def delete_before(self, segment: int) -> None:
        """Delete whole segments older than ``segment``; the newest on disk always stays."""
        for number in self.segments()[:-1]:
            if number < segment:
                self._path(number).unlink()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        if self._file is not None:
            os.close(self._file[1])
            self._file = None

    def _path(self, segment: int) -> Path:
        return self._folder / f"segment-{segment:08d}.log"

    def _write(self, segment: int, data: bytes) -> None:
        if self._file is None or self._file[0] != segment:
            if self._file is not None:
                os.close(self._file[1])
            self._file = (segment, os.open(self._path(segment), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
            sync(self._folder)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file[1], view) :]
        os.fdatasync(self._file[1])

    def _check_whole(self, segment: int) -> None:
        data = self._path(segment).read_bytes()
        end = 0
        for frame in _frames(data):
            end = frame.end
        if end != len(data):
            raise LogCorruptError(f"{self._path(segment)} is damaged at byte {end}, and later segments follow it")

    def _recover_last(self, segment: int) -> list[tuple[bytes, Location]]:
        path = self._path(segment)
        data = path.read_bytes()
        frames = list(_frames(data))
        end = frames[-1].end if frames else 0
        if end < len(data):
            if any(frame.batch > end for frame in _scan(data, end + 1)):
                raise LogCorruptError(f"{path} is damaged at byte {end}, and later records follow it")
            os.truncate(path, end)
        if not frames:
            return []
        self._segment, self._size, self._batch, self._records_from = segment, end, end, frames[0].end
        return [(f.payload, Location(segment, f.offset, f.end - f.offset)) for f in frames]


def _frames(data: bytes) -> Iterator[_Frame]:
    offset = 0
    while (frame := _frame_at(data, offset)) is not None:
        yield frame
        offset = frame.end


def _scan(data: bytes, start: int) -> Iterator[_Frame]:
    """Whole frames that begin anywhere from ``start`` on."""
    while (start := data.find(_MAGIC, start)) >= 0:
        frame = _frame_at(data, start)
        if frame is not None:
            yield frame
        start = frame.end if frame is not None else start + 1


def _frame_at(data: bytes, offset: int) -> _Frame | None:
    """The whole, undamaged frame at ``offset``, or ``None``."""
    begin = offset + FRAME_BYTES
    if begin > len(data):
        return None
    magic, length, checksum, batch = _HEADER.unpack_from(data, offset)
    header_ok = magic == _MAGIC and _CHECK.unpack_from(data, offset + _HEADER.size)[0] == zlib.crc32(
        data[offset : begin - _CHECK.size]
    )
    if not header_ok or begin + length > len(data):
        return None
    payload = data[begin : begin + length]
    return _Frame(payload, offset, begin + length, batch) if zlib.crc32(payload) == checksum else None
