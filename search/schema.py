r"""What travels between the retrieval service and its clients: Search-R1's documented request and reply.

Request: ``POST /retrieve {"queries": [str], "topk": int?, "return_scores": bool = false}``.
Reply: ``{"result": [[{"document": {"id", "contents", ...}, "score": float}, ...], ...]}``, one list a query, best first; bare
documents where scores were not asked for. ``contents`` is ``"Title"\ntext``. An empty list means that nothing was found.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from async_search_rl.errors import SchemaError

TIMEOUT_HEADER = "Request-Timeout"
"""Request header: seconds after which the caller no longer wants the answer."""


class Passage(msgspec.Struct, frozen=True):
    """One retrieved passage."""

    id: str
    """The document's id in its corpus."""
    title: str
    """First line of ``contents`` without its quotes."""
    text: str
    """The rest of ``contents``."""
    score: float
    """Score of the back end; comparable only among the passages of one query."""


class WireDocument(msgspec.Struct):
    """A document as it travels; further keys are ignored."""

    id: str | int
    contents: str


class WireHit(msgspec.Struct):
    """A document with its score."""

    document: WireDocument
    score: float


class WireReply(msgspec.Struct):
    """The reply to a request with ``return_scores = true``."""

    result: list[list[WireHit]]


_REPLY_DECODER = msgspec.json.Decoder(WireReply)


def split_contents(contents: str) -> tuple[str, str]:
    r"""``"Title"\ntext`` as (title, text), without the quotes around the title; one line alone is a text without a title."""
    first, newline, rest = contents.partition("\n")
    if not newline:
        return "", contents.strip()
    title = first.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title.strip(), rest.strip()


def join_contents(title: str, text: str) -> str:
    """Inverse of :func:`split_contents`."""
    return f'"{title}"\n{text}'


def encode_request(queries: Sequence[str], topk: int) -> bytes:
    """The body of a request that asks for scores."""
    return msgspec.json.encode({"queries": queries, "topk": topk, "return_scores": True})


def decode_reply(body: bytes, queries: int) -> list[list[Passage]]:
    """The passages of a reply with scores: one list for each of the ``queries`` queries, in their order.

    Raises:
        SchemaError: not such a reply, or not as many lists as queries; a caller must treat it as a failed search.
    """
    try:
        reply = _REPLY_DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError(str(error)) from error
    if len(reply.result) != queries:
        raise SchemaError(f"result must hold {queries} lists, one a query, got {len(reply.result)}")
    return [[_passage(hit) for hit in hits] for hits in reply.result]


def _passage(hit: WireHit) -> Passage:
    title, text = split_contents(hit.document.contents)
    return Passage(str(hit.document.id), title, text, hit.score)
