"""State and log kept together: a change is applied and queued for the log in one step, and is durable after a group commit.

Live: ``commit(record)`` at once, then ``await durable()`` before anything that follows from it is answered. Many callers wait for
the same sync. After a restart :meth:`Journal.open` builds the state from the log.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from async_search_rl.errors import ConfigError, LogCorruptError
from async_search_rl.http import OverloadedError
from async_search_rl.replay.log import Log
from async_search_rl.replay.records import Change, Location, Put, Snapshot, decode_record, encode_record
from async_search_rl.replay.state import Identity, State


class Journal:
    """The durable state of one run; use :meth:`open`."""

    def __init__(self, log: Log, state: State) -> None:
        self.state = state
        self._log = log
        self._appended = 0
        self._durable = 0
        self._flushing: asyncio.Task[None] | None = None
        self._failure: OSError | None = None

    @classmethod
    def open(cls, folder: Path, segment_bytes: int, identity: Identity) -> Journal:
        """Recover the state of ``folder``, or begin there.

        Raises:
            LogCorruptError: the log is damaged, or was written by another release.
            ConfigError: the log is of another run, question order or question file; the message names the key.
        """
        log = Log(folder, segment_bytes)
        state = _replay(log.recover(), folder)
        if state is None:
            return cls(log, State(identity=identity))
        _require_same(state.identity, identity, folder)
        return cls(log, state)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for the disk."""
        return self._log.queued_bytes

    @property
    def segments(self) -> list[int]:
        """Numbers of the log's segments on disk, ascending."""
        return self._log.segments()

    def commit(self, record: Change) -> None:
        """Change the state, and queue the record for the log."""
        if self._log.full:
            self._log.roll(encode_record(Snapshot(state=msgspec.msgpack.encode(self.state))))
        location = self._log.append(encode_record(record))
        self._appended += 1
        self.state.apply(record, location)

    def flush(self) -> None:
        """Make everything committed so far durable, in this thread."""
        self._log.flush()

    async def durable(self) -> None:
        """Wait until everything committed so far is on disk.

        Raises:
            OverloadedError: the disk refused. The service must end, for its state is ahead of the log; callers try again later.
        """
        wanted = self._appended
        while self._durable < wanted:
            if self._failure is not None:
                raise OverloadedError(f"the trajectory log cannot be written: {self._failure.strerror}") from self._failure
            if self._flushing is None:
                self._flushing = asyncio.create_task(self._flush())
            await asyncio.shield(self._flushing)

    def read_group(self, location: Location) -> bytes:
        """The encoded group of a durable put."""
        record = decode_record(self._log.read(location))
        if not isinstance(record, Put):
            raise LogCorruptError(f"the record at {location} must be a put, got {type(record).__name__}")
        return record.group

    def prune(self) -> None:
        """Delete segments that neither a restart nor a later cut will read."""
        needed = min((location.segment for location in self.state.locations()), default=None)
        segments = self.segments
        if segments:
            self._log.delete_before(segments[-1] if needed is None else needed)

    def close(self) -> None:
        """Write what is queued and close the files."""
        if self._failure is None:
            self._log.close()

    async def _flush(self) -> None:
        target = self._appended
        try:
            await asyncio.to_thread(self._log.flush)
            self._durable = target
        except OSError as error:
            self._failure = error
        finally:
            self._flushing = None


def _replay(records: list[tuple[bytes, Location]], folder: Path) -> State | None:
    state: State | None = None
    try:
        for payload, location in records:
            record = decode_record(payload)
            if isinstance(record, Snapshot):
                state = msgspec.msgpack.decode(record.state, type=State)
            elif state is None:
                raise LogCorruptError(f"the segment of {folder} must start with a snapshot, got {type(record).__name__}")
            else:
                state.apply(record, location)
    except (msgspec.ValidationError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise LogCorruptError(f"the log in {folder} does not fit this release: {error!r}") from error
    return state


def _require_same(logged: Identity, configured: Identity, folder: Path) -> None:
    keys = {
        "run": "run.name",
        "seed": "run.seed",
        "shuffle": "data.shuffle",
        "train": "data.train",
        "evaluation": "data.eval (with data.eval_questions)",
    }
    for field, key in keys.items():
        before, now = getattr(logged, field), getattr(configured, field)
        if before != now:
            what = f"the file with digest {before}" if field in ("train", "evaluation") else repr(before)
            raise ConfigError(f"{key} must be {what}, with which the log in {folder} began, got {now!r}")
