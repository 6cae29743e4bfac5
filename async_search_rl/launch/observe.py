"""What the launcher sees of the services: are they up, what do they report. Every request has a deadline of seconds."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from async_search_rl.codec import decode_message
from async_search_rl.http import reply_error
from async_search_rl.replay.schema import Status

_STATUS_MAX_BYTES = 16 << 20
_UNREACHABLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.TimeoutError)


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether ``url`` answers a GET with 200."""
    try:
        async with session.get(url) as reply:
            return reply.status == 200
    except _UNREACHABLE:
        return False


async def status(session: aiohttp.ClientSession, replay_url: str) -> Status | None:
    """The replay service's status; ``None`` while it does not answer, as during a restart.

    Raises:
        SearchRLError: it answered something else, for example that the token is wrong.
    """
    try:
        async with session.get(f"{replay_url}/status") as reply:
            if reply.status != 200:
                raise await reply_error(reply)
            return decode_message(await reply.read(), Status, _STATUS_MAX_BYTES)
    except _UNREACHABLE:
        return None


def nodes(status: Status) -> int:
    """On how many nodes actors are live. `bin/actor` names the generators of its node NODE-0, NODE-1, and so on."""
    return len({actor.actor.rpartition("-")[0] for actor in status.actors})


async def search_metrics(session: aiohttp.ClientSession, search_url: str) -> dict[str, float]:
    """The search service's own metrics, by name without their prefix; empty while it does not answer or has none."""
    try:
        async with session.get(f"{search_url}/metrics") as reply:
            return parse_prometheus(await reply.text(), "async_search_rl_search_") if reply.status == 200 else {}
    except _UNREACHABLE:
        return {}


def parse_prometheus(text: str, prefix: str) -> dict[str, float]:
    """Unlabelled samples of Prometheus text whose names start with ``prefix``, which is cut off."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name.startswith(prefix) and "{" not in name:
            with contextlib.suppress(ValueError):
                found[name.removeprefix(prefix)] = float(value)
    return found
