"""Batches from a file of recorded groups, for tests, benchmarks and a look at a skipped step; no service, no actors.

In: a file of encoded groups (:func:`write_groups`). Out: the calls of a replay client that a learner makes, answered from the file:
batch ``n`` is the groups ``n B ... (n + 1) B - 1``, counted round the file's end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from async_search_rl.codec import encode_group
from async_search_rl.errors import DataError
from async_search_rl.replay.schema import (
    Ack,
    AcknowledgeRequest,
    CutReply,
    CutRequest,
    FinishReply,
    FinishRequest,
    PublishRequest,
    StartReply,
    StartRequest,
)
from async_search_rl.trajectory import Group

_LENGTH = struct.Struct("<Q")


def write_groups(path: Path, groups: Iterable[Group]) -> None:
    """Write ``groups`` to ``path``, each as its length (8 bytes, little endian) and its encoding."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for group in groups:
            data = encode_group(group)
            file.write(_LENGTH.pack(len(data)) + data)


def read_groups(path: Path) -> list[bytes]:
    """The encoded groups of ``path``.

    Raises:
        DataError: when the file is missing, empty or cut short.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"recorded groups must be readable, got {path}: {error.strerror}") from error
    groups, at = [], 0
    while at < len(data):
        size = _LENGTH.unpack_from(data, at)[0] if at + _LENGTH.size <= len(data) else len(data)
        start, at = at + _LENGTH.size, at + _LENGTH.size + size
        if at > len(data):
            raise DataError(f"{path} must hold whole groups, got one cut short at byte {start}")
        groups.append(data[start:at])
    if not groups:
        raise DataError(f"{path} must hold at least one group, got none")
    return groups


class RecordedCuts:
    """Answers a learner from recorded groups, at once."""

    def __init__(self, path: Path, batch_groups: int) -> None:
        self._groups = read_groups(path)
        self._batch_groups = batch_groups

    def start(self, request: StartRequest) -> StartReply:
        """Incarnation 1, always."""
        return StartReply(incarnation=1)

    def cut(self, request: CutRequest) -> CutReply:
        """Batch ``request.cut``."""
        first = request.cut * self._batch_groups
        return CutReply(groups=[self._groups[i % len(self._groups)] for i in range(first, first + self._batch_groups)])

    def publish(self, request: PublishRequest) -> Ack:
        """Accepted."""
        return Ack()

    def acknowledge(self, request: AcknowledgeRequest) -> Ack:
        """Accepted."""
        return Ack()

    def finish(self, request: FinishRequest) -> FinishReply:
        """There is nothing to wait for."""
        return FinishReply(done=True)

    def close(self) -> None:
        """Nothing to let go of."""
