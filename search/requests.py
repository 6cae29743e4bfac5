"""The request parser of `/retrieve`: pure, total, and the only place where a caller's JSON is looked at.

In: the body's bytes. Out: a :class:`RetrieveRequest` whose every field is in range, or a SchemaError that names the field.
Besides Search-R1's ``{"queries", "topk", "return_scores"}``, one question may come as ``{"query"}``, and the number of passages
as ``top_k``. Unknown keys are ignored, as Search-R1's own server does.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from async_search_rl.errors import SchemaError, TooLargeError

_MAX_SHOWN = 60
_TYPE_NAMES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class RequestLimits(msgspec.Struct, frozen=True):
    """What a request may ask for."""

    topk: int
    """Passages a query when the request names none."""
    max_topk: int
    """Largest topk."""
    max_query_chars: int
    """Longer queries are cut."""
    max_queries: int = 4096
    """Most queries in one request."""


class RetrieveRequest(msgspec.Struct, frozen=True):
    """A checked request."""

    queries: tuple[str, ...]
    """Queries, whitespace at the ends removed and cut to the limit; an empty one has no passages."""
    topk: int
    """Passages a query, 1 to ``max_topk``."""
    return_scores: bool
    """Whether the reply carries scores."""
    cut: tuple[int, ...]
    """Positions of the queries that were cut."""


def parse_request(body: bytes, limits: RequestLimits) -> RetrieveRequest:
    """Check a request's body.

    Raises:
        SchemaError: the body is not JSON, a field is missing, of the wrong type or out of range; the message names it.
        TooLargeError: more queries than ``limits.max_queries``.
    """
    fields = _decode(body)
    queries = _queries(fields)
    if len(queries) > limits.max_queries:
        raise TooLargeError(f"queries must hold at most {limits.max_queries} strings, got {len(queries)}")
    stripped = [query.strip() for query in queries]
    cut = tuple(i for i, query in enumerate(stripped) if len(query) > limits.max_query_chars)
    return RetrieveRequest(
        queries=tuple(query[: limits.max_query_chars] for query in stripped),
        topk=_topk(fields, limits),
        return_scores=_return_scores(fields),
        cut=cut,
    )


def _decode(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"the body must be a JSON object: {error}") from error
    if not isinstance(decoded, dict):
        raise SchemaError(f"the body must be a JSON object, got {_kind(decoded)}")
    return decoded


def _queries(fields: dict[str, Any]) -> list[str]:
    if "queries" in fields and "query" in fields:
        raise SchemaError("queries and query must not both be given")
    if "queries" in fields:
        queries = fields["queries"]
        if not isinstance(queries, list):
            raise SchemaError(f"queries must be a list of strings, got {_kind(queries)}")
        for i, query in enumerate(queries):
            if not isinstance(query, str):
                raise SchemaError(f"queries[{i}] must be a string, got {_kind(query)}")
        return queries
    if "query" in fields:
        query = fields["query"]
        if not isinstance(query, str):
            raise SchemaError(f"query must be a string, got {_kind(query)}")
        return [query]
    raise SchemaError("queries must be given: a list of strings (or query: one string)")


def _topk(fields: dict[str, Any], limits: RequestLimits) -> int:
    given = [name for name in ("topk", "top_k") if fields.get(name) is not None]
    if not given:
        return limits.topk
    if len(given) == 2 and fields["topk"] != fields["top_k"]:
        raise SchemaError("topk and top_k must not both be given with different values")
    name = given[0]
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise SchemaError(f"{name} must be an integer, got {_kind(value)}")
    if not 1 <= value <= limits.max_topk:
        raise SchemaError(f"{name} must be between 1 and {limits.max_topk}, got {value}")
    return value


def _return_scores(fields: dict[str, Any]) -> bool:
    value = fields.get("return_scores")
    if value is None:
        return False
    if not isinstance(value, bool):
        raise SchemaError(f"return_scores must be true or false, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=True, default=str)
    if len(shown) > _MAX_SHOWN:
        shown = shown[:_MAX_SHOWN] + "..."
    return f"{_TYPE_NAMES.get(type(value), type(value).__name__)} {shown}"
