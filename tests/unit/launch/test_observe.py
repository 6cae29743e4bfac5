"""What the launcher makes of services that break off, and how it ends when its last look fails."""

import asyncio
import io
import time

import pytest
from rich.console import Console

from async_search_rl.codec import encode_message
from async_search_rl.config import parse_config
from async_search_rl.errors import SearchRLError
from async_search_rl.http import client_session
from async_search_rl.json_lines import read_json_lines
from async_search_rl.launch import observe
from async_search_rl.launch.run import Launch
from async_search_rl.launch.screen import Screen
from async_search_rl.launch.supervise import Interrupts
from async_search_rl.replay.schema import ActorStatus, Status

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


def answer_of(*actors):
    """The status of a run with live ``actors``, as an HTTP answer."""
    live = [ActorStatus(actor=name, version=0, running=1, seen_s_ago=0.0, gauges={}) for name in actors]
    nothing = {"counters": {}, "recent": {}, "learner": {}, "evaluations": [], "staleness": {}, "parked_questions": []}
    counts = dict.fromkeys(("incarnation", "step", "buffered", "running", "training", "filtered_in_row"), 0)
    body = encode_message(Status(run="r", state="running", stop=None, waiting_for="", actors=live, **counts, **nothing))
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)


class Members:
    """A fleet of names, which notes what it is asked to stop and told to be ready."""

    def __init__(self, *names):
        self.pieces, self.stopped, self.those_ready = dict.fromkeys(names), [], []

    def ready(self, name):
        self.those_ready.append(name)

    def cpu_s(self):
        return dict.fromkeys(self.pieces, 0.0)

    async def stop(self, names):
        self.stopped += names


@pytest.mark.parametrize(("ask", "nothing"), [(observe.status, None), (observe.search_metrics, {})])
def test_a_service_killed_in_the_middle_of_an_answer_does_not_answer(ask, nothing):
    async def use(url):
        async with client_session(None, 5.0) as session:
            return await ask(session, url)

    assert asyncio.run(serving(CUT_SHORT, use)) == nothing


def look_once(folder, answer, members, age_s=0.0, **launch):
    """A launch that began ``age_s`` seconds ago takes its last look."""

    async def use(url):
        config = parse_config({"run": {"dir": str(folder), "name": "r"}, "replay": {"url": url}, "launch": launch})
        async with client_session(None, 5.0) as session:
            screen = Screen(Console(file=io.StringIO()), 1.0)
            await Launch(config, members, session, screen, Interrupts(), time.monotonic() - age_s).stop()

    asyncio.run(serving(answer, use))


def test_the_timeline_goes_on_where_an_earlier_launch_ended(tmp_path):
    for age_s in (100.0, 10.0, 1.0):
        look_once(tmp_path, answer_of("n-1-0"), Members("learner"), age_s)
    first, second, third = (row["t"] for row in read_json_lines(tmp_path / "r" / "metrics" / "timeline.jsonl"))
    assert 100.0 <= first < 105.0
    assert first + 10.0 <= second < first + 15.0
    assert second + 1.0 <= third < second + 6.0


@pytest.mark.parametrize(
    ("names", "ready"),
    [
        ((), []),
        (("one-node-7-0", "one-node-7-1", "one-node-7-2"), []),
        (("one-node-7-0", "other-9-0"), ["actor-0", "actor-1"]),
    ],
)
def test_actors_are_ready_once_each_node_has_one_however_many_generators_a_node_has(tmp_path, names, ready):
    members = Members("actor-0", "actor-1")
    look_once(tmp_path, answer_of(*names), members, actor_nodes=2)
    assert members.those_ready == ready


def test_a_failed_last_look_does_not_keep_the_pieces_from_ending_in_order(tmp_path):
    members = Members("replay", "learner", "actor")
    with pytest.raises(SearchRLError):
        look_once(tmp_path, REFUSED, members)
    assert members.stopped == ["actor", "learner", "replay"]
