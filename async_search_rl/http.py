"""What every aiohttp service and client of this project shares: who may call, how large, and how errors travel.

A service is ``make_app(token, max_body_bytes)`` plus routes, run inside ``async with listening(app, host, port, token) as url``
until ``stop_signal()`` is set. A handler raises an error of :mod:`async_search_rl.errors`; the middleware turns it into a status
and a body ``{"error": class name, "message": sentence}``, as JSON, or as msgpack where the caller sent or accepts msgpack.
A client is ``client_session(token, timeout_s)``; ``reply_error(reply)`` turns such a body back into a typed error.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
from aiohttp import web

from async_search_rl.config.run import SecuritySection
from async_search_rl.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    SchemaError,
    SearchFailedError,
    SearchRLError,
    ServiceError,
    TooLargeError,
)
from async_search_rl.files import write_whole

TOKEN_VARIABLE = "ASYNC_SEARCH_RL_TOKEN"
MSGPACK = "application/msgpack"
_WILDCARDS = ("0.0.0.0", "::", "")
_MAX_ERROR_CHARS = 2000
_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OverloadedError(ServiceError):
    """The service's bounded queue is full; answered as 503 with ``Retry-After: retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnauthorizedError(ServiceError):
    """The bearer token is missing or wrong; answered as 401."""


def read_token(security: SecuritySection) -> str | None:
    """The bearer token of every service: from ``security.token_file``, else the variable ``ASYNC_SEARCH_RL_TOKEN``, else none.

    Raises:
        ConfigError: the token file cannot be read or is empty.
    """
    if not security.token_file:
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None
    try:
        token = Path(security.token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"security.token_file must be a readable ASCII file, got {security.token_file!r}: {error}") from error
    if not token:
        raise ConfigError(f"security.token_file must hold a token, got an empty file {security.token_file!r}")
    return token


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address) is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_safe_bind(host: str, token: str | None) -> None:
    """Refuse to serve other machines without a token.

    Raises:
        ConfigError: ``host`` is not a loopback address and there is no token.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"a bind to {host!r} needs a token in security.token_file or {TOKEN_VARIABLE}; without one only 127.0.0.1 is served"
        )


def make_app(token: str | None, max_body_bytes: int, open_paths: Collection[str] = ("/health",)) -> web.Application:
    """An application that demands the token (``open_paths`` aside), caps bodies, and answers errors by their type."""

    @web.middleware
    async def authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and request.path not in open_paths:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode()):
                raise UnauthorizedError("Authorization must be the bearer token of this run, got none or another")
        return await handler(request)

    return web.Application(middlewares=[_answer_errors, authorise], client_max_size=max_body_bytes)


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, token: str | None, stop_timeout_s: float = 5.0, backlog: int = 1024
) -> AsyncIterator[str]:
    """Serve ``app`` on ``host:port`` (0: a free one) inside the block; yields its address, ``http://host:port``.

    Leaving the block stops accepting, gives running requests ``stop_timeout_s``, and runs the application's clean-up.

    Raises:
        ConfigError: the bind is unsafe (see :func:`require_safe_bind`), or the address cannot be bound, e.g. a busy port.
    """
    require_safe_bind(host, token)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=stop_timeout_s)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=backlog).start()
        except OSError as error:
            raise ConfigError(f"cannot bind {host}:{port}: {os.strerror(error.errno) if error.errno else error}") from error
        bound = runner.addresses[0]
        yield f"http://{_reachable(host)}:{bound[1]}"
    finally:
        await runner.cleanup()


def announce(path: Path, url: str) -> None:
    """Write ``url`` as one line to ``path``, whole or not at all; readers poll for the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{url}\n".encode("ascii"))


def announced_url(path: Path) -> str | None:
    """The address that a service announced in ``path``; ``None`` before."""
    with suppress(FileNotFoundError):
        return path.read_text(encoding="ascii").strip() or None
    return None


def port_is_free(host: str, port: int) -> bool:
    """Whether ``host:port`` can be bound now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return True


def stop_signal() -> asyncio.Event:
    """An event of the running loop that SIGTERM and Ctrl-C set, in place of ending the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def client_session(token: str | None, timeout_s: float, max_connections: int = 100) -> aiohttp.ClientSession:
    """A session that sends the token with every request; no request outlives ``timeout_s`` unless it names its own deadline.

    Must be made inside a running event loop and closed there.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=max_connections))


async def reply_error(reply: aiohttp.ClientResponse) -> SearchRLError:
    """The typed error of a reply whose status is 400 or more: what the service raised, with who said it."""
    body = await reply.read()
    kind, message = "", ""
    try:
        decoded: Any = msgpack.unpackb(body) if reply.content_type == MSGPACK else json.loads(body)
        kind, message = str(decoded["error"]), str(decoded["message"])
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        message = body[:_MAX_ERROR_CHARS].decode("utf-8", "replace").strip() or str(reply.reason)
    sentence = f"{reply.url.origin()}{reply.url.path} answered {reply.status}: {message}"
    if reply.status == 503:
        return OverloadedError(sentence, _retry_after_s(reply.headers.get("Retry-After", "")))
    if reply.status == 401:
        return UnauthorizedError(sentence)
    if reply.status == 413:
        return TooLargeError(sentence)
    if reply.status == 504 or kind == "DeadlineError":
        return DeadlineError(sentence)
    if kind == "SearchFailedError":
        return SearchFailedError(sentence)
    return SchemaError(sentence) if 400 <= reply.status < 500 else ServiceError(sentence)


def error_response(
    request: web.Request, status: int, kind: str, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    """``{"error": kind, "message": message}`` in the caller's format."""
    body = {"error": kind, "message": message[:_MAX_ERROR_CHARS]}
    wants_msgpack = MSGPACK in (request.content_type, request.headers.get("Accept", ""))
    if wants_msgpack:
        return web.Response(status=status, body=msgpack.packb(body), content_type=MSGPACK, headers=headers)
    return web.json_response(body, status=status, headers=headers)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return error_response(request, 413, "TooLargeError", f"the body must be at most {request.client_max_size} bytes")
    except web.RequestPayloadError as error:
        return error_response(request, 400, "SchemaError", f"the body must arrive whole and in its Content-Encoding: {error}")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(request, error.status, "HTTPError", f"{request.method} {request.path}: {error.reason}")
    except OverloadedError as error:
        return error_response(request, 503, "OverloadedError", str(error), {"Retry-After": f"{max(1, round(error.retry_after_s))}"})
    except SearchRLError as error:
        return error_response(request, _status_of(error), type(error).__name__, str(error))
    except Exception as error:
        if isinstance(error, ConnectionResetError) and (request.transport is None or request.transport.is_closing()):
            _log.info("%s %s: the caller hung up", request.method, request.path)
            return error_response(request, 400, "SchemaError", "the body must arrive whole")
        _log.exception("%s %s failed", request.method, request.path)
        return error_response(request, 500, type(error).__name__, f"{request.method} {request.path} failed inside the service")


def _status_of(error: SearchRLError) -> int:
    if isinstance(error, TooLargeError):
        return 413
    if isinstance(error, SchemaError | DataError):
        return 400
    if isinstance(error, UnauthorizedError):
        return 401
    if isinstance(error, DeadlineError):
        return 504
    return 502 if isinstance(error, ServiceError) else 500


def _reachable(host: str) -> str:
    name = socket.gethostname() if host in _WILDCARDS else host
    return f"[{name}]" if ":" in name else name


def _retry_after_s(header: str) -> float:
    try:
        return max(0.0, float(header))
    except ValueError:
        return 1.0
