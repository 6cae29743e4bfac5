"""What the launcher makes of services that break off, and how it ends when its last look fails."""

import asyncio
import io
import time

import pytest
from rich.console import Console

from async_search_rl.config import parse_config
from async_search_rl.errors import SearchRLError
from async_search_rl.http import client_session
from async_search_rl.launch import observe
from async_search_rl.launch.run import Launch
from async_search_rl.launch.screen import Screen
from async_search_rl.launch.supervise import Interrupts

CUT_SHORT = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this"
REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def serving(answer, use):
    """What ``use(url)`` returns while a server gives ``answer`` to every request and hangs up."""

    async def reply(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


class Members:
    """A fleet of names, which notes what it is asked to stop."""

    def __init__(self, *names):
        self.pieces, self.stopped = dict.fromkeys(names), []

    async def stop(self, names):
        self.stopped += names


@pytest.mark.parametrize(("ask", "nothing"), [(observe.status, None), (observe.search_metrics, {})])
def test_a_service_killed_in_the_middle_of_an_answer_does_not_answer(ask, nothing):
    async def use(url):
        async with client_session(None, 5.0) as session:
            return await ask(session, url)

    assert asyncio.run(serving(CUT_SHORT, use)) == nothing


def test_a_failed_last_look_does_not_keep_the_pieces_from_ending_in_order(tmp_path):
    members = Members("replay", "learner", "actor")

    async def use(url):
        config = parse_config({"run": {"dir": str(tmp_path), "name": "r"}, "replay": {"url": url}})
        async with client_session(None, 5.0) as session:
            screen = Screen(Console(file=io.StringIO()), 1.0)
            with pytest.raises(SearchRLError):
                await Launch(config, members, session, screen, Interrupts(), time.monotonic()).stop()

    asyncio.run(serving(REFUSED, use))
    assert members.stopped == ["actor", "learner", "replay"]
