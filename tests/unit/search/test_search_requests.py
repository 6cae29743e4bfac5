"""The parser of `/retrieve`: documented dialects, and a typed error or a checked request for anything else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.errors import SchemaError, TooLargeError
from search.requests import RequestLimits, RetrieveRequest, parse_request

LIMITS = RequestLimits(topk=3, max_topk=100, max_query_chars=50, max_queries=8)


def parse(**fields: object) -> RetrieveRequest:
    return parse_request(json.dumps(fields).encode(), LIMITS)


def test_search_r1_request() -> None:
    request = parse(queries=["who?", " what? "], topk=5, return_scores=True)
    assert request == RetrieveRequest(("who?", "what?"), 5, True, ())


def test_defaults_are_search_r1s() -> None:
    assert parse(queries=["q"]) == RetrieveRequest(("q",), 3, False, ())
    assert parse(queries=["q"], topk=None, return_scores=None) == RetrieveRequest(("q",), 3, False, ())


def test_one_query_and_top_k_dialects() -> None:
    assert parse(query="q", top_k=2) == RetrieveRequest(("q",), 2, False, ())
    assert parse(queries=["q"], topk=2, top_k=2).topk == 2


def test_unknown_keys_are_ignored() -> None:
    assert parse(queries=[], page=4).queries == ()


def test_over_long_query_is_cut_and_named() -> None:
    request = parse(queries=["short", "🙂" * 100_000])
    assert request.queries[1] == "🙂" * 50
    assert request.cut == (1,)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b'"queries"', "body"),
        (b"\xff\xfe", "body"),
        (b'{"queries": ["\\ud800"]}', "body"),
        (b"[" * 100_000, "body"),
        (b"{}", "queries"),
        (b'{"queries": "q"}', "queries"),
        (b'{"queries": [1]}', "queries[0]"),
        (b'{"queries": ["a", null]}', "queries[1]"),
        (b'{"query": ["q"]}', "query"),
        (b'{"query": "a", "queries": ["b"]}', "query"),
        (b'{"queries": ["a"], "topk": 0}', "topk"),
        (b'{"queries": ["a"], "topk": -1}', "topk"),
        (b'{"queries": ["a"], "topk": 1000000000}', "topk"),
        (b'{"queries": ["a"], "topk": 101}', "topk"),
        (b'{"queries": ["a"], "topk": 1e400}', "body"),
        (b'{"queries": ["a"], "topk": 3.0}', "topk"),
        (b'{"queries": ["a"], "topk": "3"}', "topk"),
        (b'{"queries": ["a"], "topk": true}', "topk"),
        (b'{"queries": ["a"], "top_k": 99999999999999999999999}', "top_k"),
        (b'{"queries": ["a"], "topk": 1, "top_k": 2}', "topk"),
        (b'{"queries": ["a"], "return_scores": "yes"}', "return_scores"),
    ],
)
def test_wrong_requests_name_the_field(body: bytes, named: str) -> None:
    with pytest.raises(SchemaError, match=named.replace("[", r"\[")):
        parse_request(body, LIMITS)


def test_too_many_queries() -> None:
    with pytest.raises(TooLargeError, match="queries"):
        parse(queries=["q"] * 9)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = st.sampled_from(["queries", "query", "topk", "top_k", "return_scores", "other"])


@given(st.dictionaries(KEYS, JSON | st.lists(st.text(), max_size=10)) | JSON)
def test_any_json_is_checked_or_refused(value: object) -> None:
    body = json.dumps(value).encode()
    try:
        request = parse_request(body, LIMITS)
    except SchemaError:
        return
    assert isinstance(value, dict)
    given_queries = value["queries"] if "queries" in value else [value["query"]]
    assert len(request.queries) == len(given_queries) <= LIMITS.max_queries
    assert all(len(query) <= LIMITS.max_query_chars and query == query.strip()[:50] for query in request.queries)
    assert 1 <= request.topk <= LIMITS.max_topk


@given(st.binary(max_size=200))
def test_any_bytes_are_checked_or_refused(body: bytes) -> None:
    try:
        request = parse_request(body, LIMITS)
    except SchemaError:
        return
    assert request.topk >= 1
