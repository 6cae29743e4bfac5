"""What the trajectory log holds: one record for each change of the service's durable state, in the order they happened.

A record says what was decided, never how: applying it needs no configuration and no clock, so replaying the records of a log
gives the very state the live service had. ``Snapshot`` starts every segment, so that earlier segments can be deleted.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from async_search_rl.replay.schema import EvaluationResult, PutResult


class Location(NamedTuple):
    """Where a record lies: segment number, byte offset of its frame, bytes of the whole frame."""

    segment: int
    offset: int
    length: int


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the service keeps in memory of a group whose bytes are in the log.

    ``members`` and ``valid`` count trajectories; ``reward``, ``parts``, ``searches``, ``length`` (tokens, prompt included) and
    ``seconds`` (wall time) are means over the valid ones, 0 if there is none; ``tokens`` and ``sampled`` are sums over all;
    ``oldest_step`` is the least step among the trainable tokens of valid members.
    """

    members: int
    valid: int
    reward: float
    parts: dict[str, float]
    searches: float
    length: float
    seconds: float
    tokens: int
    sampled: int
    oldest_step: int | None


class Issued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Attempt ``attempt`` at ``ticket`` was given to ``actor``.

    ``question`` is an index into the training questions, or into the evaluation questions for a ticket of ``round``.
    ``cursor`` is the question cursor afterwards; ``None`` for another attempt, an evaluation, or a question that came back.
    """

    ticket: int
    attempt: int
    actor: str
    question: int
    round: int | None = None
    cursor: int | None = None


class Put(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A group came and was answered ``result``. ``final``: a failed attempt that was the last one, which ends the ticket."""

    ticket: int
    attempt: int
    actor: str
    digest: bytes
    result: PutResult
    reason: str
    facts: GroupFacts
    final: bool = False
    group: bytes = b""


class Expired(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The lease of the last permitted attempt ran out: the ticket failed."""

    ticket: int


class Cancelled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A running group can no longer be trained within the bound: the ticket ends stale, its question comes back."""

    ticket: int


class Stale(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Buffered groups were over the bound when the batch of ``step`` was cut."""

    step: int
    tickets: list[int]


class Cut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Batch number ``cut``, for the step that starts at learner step ``step``."""

    cut: int
    step: int
    tickets: list[int]


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A learner started from a checkpoint of ``step`` that holds the first ``cut`` batches."""

    incarnation: int
    step: int
    cut: int
    weights_url: str


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The weights of ``step``, which hold the first ``cut`` batches, are offered. ``evaluate``: a round became due with them."""

    incarnation: int
    step: int
    cut: int
    evaluate: bool


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No checkpoint that is kept needs a batch before ``oldest_cut``."""

    oldest_cut: int


class RoundOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Evaluation round ``round`` asks the first ``asked`` evaluation questions of the packed version ``version``."""

    round: int
    version: int
    asked: int


class RoundClosed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The open round is over. ``result`` is ``None`` if its version vanished before any answer: then it is asked again."""

    result: EvaluationResult | None


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run must stop, for this reason."""

    reason: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last batch is trained and evaluated."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The whole durable state (:class:`async_search_rl.replay.state.State`, encoded) before the records that follow."""

    state: bytes


Change: TypeAlias = (
    Issued
    | Put
    | Expired
    | Cancelled
    | Stale
    | Cut
    | Started
    | Published
    | Acknowledged
    | RoundOpened
    | RoundClosed
    | Stopped
    | Finished
)
Record: TypeAlias = Change | Snapshot

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """A record as bytes."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """Inverse of :func:`encode_record`.

    Raises:
        msgspec.ValidationError: for bytes that are no record of this release.
    """
    return _decoder.decode(data)
