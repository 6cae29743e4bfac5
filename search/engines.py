"""The web search APIs behind the back end `online`: for each one, its request and what its documented reply means.

Pure: no I/O. A reply that is not what the API documents raises; "nothing found" is only what the API itself calls so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from async_search_rl.errors import ConfigError, SchemaError


class WebRequest(msgspec.Struct, frozen=True):
    """One request of an engine."""

    method: str
    url: str
    headers: dict[str, str] = {}
    params: dict[str, str] = {}
    json: dict[str, Any] | None = None


class WebResult(msgspec.Struct, frozen=True):
    """One result: a page's address, title, and an extract."""

    url: str
    title: str
    text: str


class Engine(msgspec.Struct, frozen=True):
    """How one API is asked and read."""

    name: str
    url: str
    """Address of the API."""
    keys: tuple[str, ...]
    """Environment variables that must be set."""
    max_results: int
    """Most results of one request."""
    request: Callable[[str, Mapping[str, str], str, int], WebRequest]
    """From (url, keys, query, results) to the request."""
    parse: Callable[[Any], list[WebResult]]
    """From the decoded reply to its results, best first."""


def engine_keys(engine: Engine, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The engine's keys.

    Raises:
        ConfigError: one is not set; the message names it, never a value.
    """
    for key in engine.keys:
        if not environment.get(key):
            raise ConfigError(
                f"the environment variable {key} must hold a key for retrieval.online_engine {engine.name!r}, got none"
            )
    return {key: environment[key] for key in engine.keys}


def _serper_request(url: str, keys: Mapping[str, str], query: str, results: int) -> WebRequest:
    return WebRequest("POST", url, {"X-API-KEY": keys["SERPER_API_KEY"]}, json={"q": query, "num": results})


def _serper_parse(reply: Any) -> list[WebResult]:
    return [_result(item, "link", "title", "snippet") for item in _list(reply, "organic")]


def _serpapi_request(url: str, keys: Mapping[str, str], query: str, results: int) -> WebRequest:
    params = {"engine": "google", "q": query, "num": str(results), "api_key": keys["SERPAPI_API_KEY"]}
    return WebRequest("GET", url, params=params)


def _serpapi_parse(reply: Any) -> list[WebResult]:
    error = _object(reply).get("error")
    if error is not None:
        if "hasn't returned any results" in str(error):
            return []
        raise SchemaError(f"SerpAPI answered with an error: {error}")
    return [_result(item, "link", "title", "snippet") for item in _list(reply, "organic_results")]


def _google_request(url: str, keys: Mapping[str, str], query: str, results: int) -> WebRequest:
    params = {"key": keys["GOOGLE_API_KEY"], "cx": keys["GOOGLE_CSE_ID"], "q": query, "num": str(results)}
    return WebRequest("GET", url, params=params)


def _google_parse(reply: Any) -> list[WebResult]:
    if _object(reply).get("kind") != "customsearch#search":
        raise SchemaError(f"kind must be 'customsearch#search', got {reply.get('kind')!r}")
    if "items" not in reply:  # Google leaves the key out when nothing matches.
        return []
    return [_result(item, "link", "title", "snippet") for item in _list(reply, "items")]


def _brave_request(url: str, keys: Mapping[str, str], query: str, results: int) -> WebRequest:
    headers = {"X-Subscription-Token": keys["BRAVE_API_KEY"], "Accept": "application/json"}
    return WebRequest("GET", url, headers, {"q": query, "count": str(results)})


def _brave_parse(reply: Any) -> list[WebResult]:
    if _object(reply).get("type") != "search":
        raise SchemaError(f"type must be 'search', got {reply.get('type')!r}")
    if "web" not in reply:  # Brave leaves the section out when nothing matches.
        return []
    return [_result(item, "url", "title", "description") for item in _list(reply["web"], "results")]


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("serper", "https://google.serper.dev/search", ("SERPER_API_KEY",), 100, _serper_request, _serper_parse),
        Engine("serpapi", "https://serpapi.com/search.json", ("SERPAPI_API_KEY",), 100, _serpapi_request, _serpapi_parse),
        Engine(
            "google",
            "https://www.googleapis.com/customsearch/v1",
            ("GOOGLE_API_KEY", "GOOGLE_CSE_ID"),
            10,
            _google_request,
            _google_parse,
        ),
        Engine("brave", "https://api.search.brave.com/res/v1/web/search", ("BRAVE_API_KEY",), 20, _brave_request, _brave_parse),
    )
}
"""The engines by name."""


def _object(reply: Any) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise SchemaError(f"the reply must be a JSON object, got {type(reply).__name__}")
    return reply


def _list(reply: Any, name: str) -> list[Any]:
    items = _object(reply).get(name)
    if not isinstance(items, list):
        raise SchemaError(f"{name} must be a list, got {type(items).__name__}")
    return items


def _result(item: Any, url: str, title: str, text: str) -> WebResult:
    fields = _object(item)
    if not isinstance(fields.get(url), str):
        raise SchemaError(f"{url} of a result must be a string, got {fields.get(url)!r}")
    return WebResult(fields[url], str(fields.get(title) or ""), str(fields.get(text) or ""))
