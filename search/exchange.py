"""One request to one replica over HTTP: the reply's bytes, or a typed error; and what it says of the replica.

In: an aiohttp session, a replica, a request. Out: the body of a reply of 200. The replica's counters and breaker are told of it.
"""

from __future__ import annotations

import asyncio
import io
import time
from typing import NamedTuple

import aiohttp

from async_search_rl.errors import SearchFailedError, ServiceError
from async_search_rl.http import OverloadedError, reply_error
from search.replica import Replica
from search.schema import TIMEOUT_HEADER

RETRIED = (aiohttp.ClientError, OSError, TimeoutError)
"""What may succeed at another attempt: no connection, no answer in time, 502, 503, 504."""
_RETRIED_STATUSES = (502, 503, 504)


class IndexFailedError(ServiceError):
    """The replica works, but its index failed at some query of the request."""


class Request(NamedTuple):
    """What goes to a replica, perhaps to several and several times."""

    body: bytes
    queries: int
    """Queries in ``body``."""
    deadline_s: float
    """On the monotonic clock."""
    first: bool = True
    """Whether it is no repetition of one that failed."""


async def exchange(session: aiohttp.ClientSession, replica: Replica, request: Request) -> bytes:
    """Send ``request``; the body of the answer.

    Raises:
        SearchFailedError: the server says that the request itself is wrong.
        IndexFailedError, OverloadedError, ServiceError, DeadlineError, aiohttp.ClientError, OSError, TimeoutError: see ``RETRIED``.
    """
    started_s = time.monotonic()
    left_s = max(0.001, request.deadline_s - started_s)
    headers = {"Content-Type": "application/json", TIMEOUT_HEADER: f"{left_s:.3f}"}
    replica.begin()
    try:
        async with session.post(replica.url + "/retrieve", data=io.BytesIO(request.body), headers=headers) as reply:
            if reply.status in _RETRIED_STATUSES:
                raise _retried(await reply_error(reply))
            if reply.status != 200:
                refusal = SearchFailedError(str(await reply_error(reply)))
                replica.succeed(time.monotonic() - started_s)
                raise refusal
            answer = await reply.read()
    except SearchFailedError:
        raise
    except IndexFailedError:
        # One query of many says nothing of the replica; one that fails alone counts, for all may fail, but only once.
        replica.fail(time.monotonic()) if request.queries == 1 and request.first else replica.abandon()
        raise
    except OverloadedError:
        replica.abandon()
        raise
    except RETRIED:
        replica.fail(time.monotonic())
        raise
    except asyncio.CancelledError:
        replica.abandon()
        raise
    replica.succeed(time.monotonic() - started_s)
    return answer


def _retried(error: Exception) -> Exception:
    return IndexFailedError(str(error)) if isinstance(error, SearchFailedError) else error
