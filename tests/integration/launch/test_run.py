"""Whole launches of small stand-in programs: real processes, real sockets, the real launcher in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_search_rl.launch.guard import descendants
from async_search_rl.launch.process import tail

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[3]

SERVICE = """
import asyncio, sys
from pathlib import Path
from aiohttp import web
sys.path.insert(0, {root!r})
from async_search_rl.codec import encode_message
from async_search_rl.config import load_config
from async_search_rl.errors import SearchRLError
from async_search_rl.http import announce, listening, make_app, stop_signal
from async_search_rl.replay.schema import ActorStatus, EvaluationResult, Status

config = load_config(sys.argv[1])
folder, name = config.run.folder, {name!r}
section = config.replay if name == "replay" else config.retrieval

def number(file):
    path = folder / file
    return int(path.read_text() or 0) if path.exists() else 0

def evaluation(round, step, em):
    means = {{"exact_match": em, "reward": em, "searches": 1 + em}}
    by_source = {{"facts_2hop": {{**means, "questions": 6.0}}}}
    return EvaluationResult(round=round, version=step, asked=10, questions=10, means=means, by_source=by_source, seconds=1.0)

async def status(request):
    step, stop = number("step"), (folder / "stop").exists()
    gauges = {{"busy_s": 1.0 + step, "idle_s": 0.1, "stall_s": 0.0, "tokens_generated": 100.0 * step,
              "weight_updates": float(step), "in_flight_updates": 3.0 * step}}
    live = (folder / "actor").exists()
    actors = [ActorStatus(actor="a0", version=step, running=2, seen_s_ago=0.1, gauges=gauges)] if live else []
    evaluations = [evaluation(0, 0, 0.25)] + ([evaluation(1, 3, 0.75)] if step >= 3 else [])
    body = Status(run="r", state="stopped" if stop else "running", stop="every group is filtered" if stop else None,
        incarnation=number("starts"), step=step, buffered=1, running=2, training=0,
        counters={{"groups_accepted": 4.0, "groups_trained": 3.0, "max_lag": 1.0}}, recent={{}}, filtered_in_row=0, waiting_for="",
        learner={{"reward_mean": 0.5, "step_s": 1.0, "wait_s": 0.25}} if step else {{}}, actors=actors,
        evaluations=evaluations, staleness={{"0": 2, "1": 1}}, parked_questions=[])
    return web.Response(body=encode_message(body), content_type="application/msgpack")

async def ok(request):
    return web.Response(text="async_search_rl_search_busy_s 1.5\\n")

async def main():
    app = make_app(None, 1 << 20)
    app.router.add_get("/status", status)
    for path in ("/health", "/ready", "/metrics"):
        app.router.add_get(path, ok)
    stop = stop_signal()
    async with listening(app, section.host, section.port, None) as url:
        announce(folder / (name + ".url"), url)
        await stop.wait()
    with open(folder / "ended", "a") as ended:
        ended.write(name + "\\n")

try:
    asyncio.run(main())
except SearchRLError as error:
    sys.exit(f"error: {{error}}")
"""

WORKER = """
import os, signal, sys, time, tomllib
from pathlib import Path
config = tomllib.loads(Path(sys.argv[1]).read_text())
folder = Path(config["run"]["dir"]) / config["run"]["name"]
assert config["replay"]["url"].startswith("http://127.0.0.1:"), config["replay"]
assert config["retrieval"]["url"].startswith("http://127.0.0.1:"), config["retrieval"]
def end(*_):
    with open(folder / "ended", "a") as ended:
        ended.write(Path(sys.argv[0]).name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
def until(condition):
    while not condition():
        time.sleep(0.02)
"""

ACTOR = WORKER + "(folder / 'actor').touch()\nwhile True: time.sleep(1)\n"

LEARNER = (
    WORKER
    + """
starts = folder / "starts"
count = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(count))
until((folder / "actor").exists)
"""
)
THREE_STEPS = "for step in (1, 2, 3):\n    (folder / 'step').write_text(str(step))\n    time.sleep(0.4)\ntime.sleep(0.8)\n"
FOR_EVER = "(folder / 'step').write_text('1')\nwhile True: time.sleep(1)\n"
DIES_ONCE = (
    "if count == 1:\n    time.sleep(1.5); os._exit(9)\nassert sys.argv[2:] == ['--set', 'run.resume=auto'], sys.argv\n"
    + THREE_STEPS
)
IS_STOPPED = "time.sleep(0.5)\n(folder / 'stop').touch()\nsys.exit('error: told to stop')\n"
CANNOT_START = "import sys\nprint('loading weights')\nsys.exit('error: the model folder must have config.json, got none')\n"

DRIVER = """
import asyncio, sys
from pathlib import Path
from rich.console import Console
from async_search_rl.config import load_config
from async_search_rl.errors import SearchRLError
from async_search_rl.launch import pieces
from async_search_rl.launch.process import process_started_at
from async_search_rl.launch.run import launch
from async_search_rl.launch.supervise import RunInterruptedError
pieces.BIN = Path(sys.argv[1])
try:
    asyncio.run(launch(load_config(sys.argv[2]), process_started_at(), Console()))
except RunInterruptedError:
    sys.exit(130)
except SearchRLError as error:
    sys.exit(f"error: {error}")
"""


class Launched:
    """A launcher at work in ``folder`` on stand-in entrypoints."""

    def __init__(self, folder, learner, extra=""):
        self.run = folder / "runs" / "r"
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        programs: dict[str, str] = {name: SERVICE.format(root=str(ROOT), name=name) for name in ("search", "replay")}
        for name, text in {**programs, "actor": ACTOR, "learner": learner}.items():
            (bin_folder / name).write_text(text)
        config = folder / "config.toml"
        config.write_text(
            f'[run]\nname = "r"\ndir = "{folder}/runs"\nmax_steps = 3\n[launch]\nstop_timeout_s = 5.0\nrestart_limit = 1\n{extra}'
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(bin_folder), str(config)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, condition, timeout_s=20.0):
        give_up = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < give_up, "condition did not come true in time"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def end(self):
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err

    def log(self, name):
        return tail(self.run / "logs" / f"{name}.log")


@pytest.fixture
def launched(tmp_path):
    started = []

    def start(learner, extra=""):
        started.append(Launched(tmp_path, learner if learner is CANNOT_START else LEARNER + learner, extra))
        return started[-1]

    before = set(descendants(os.getpid()))
    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
    assert set(descendants(os.getpid())) <= before


def test_a_run_ends_by_itself_in_order_with_summary_and_page(launched):
    one = launched(THREE_STEPS)
    code, out, err = one.end()
    assert (code, err) == (0, "")
    assert "step 3/3" in out
    summary = json.loads((one.run / "summary.json").read_text())
    wanted = {
        "outcome": "finished",
        "steps": 3,
        "em_start": 0.25,
        "em_end": 0.75,
        "searches_start": 1.25,
        "searches_end": 1.75,
        "n_eval": 10,
        "max_lag": 1,
        "weight_updates": 3,
        "in_flight_updates": 9,
        "groups_accepted": 4,
        "groups_trained": 3,
        "groups_dropped": 0,
    }
    assert {name: summary[name] for name in wanted} == wanted
    assert 2.0 < summary["wall_s"] < 30
    assert summary["versions"]["python"]
    assert (one.run / "index.html").is_file()
    assert (one.run / "ended").read_text().split() == ["actor", "search", "replay"]
    timeline = [json.loads(line) for line in (one.run / "metrics" / "timeline.jsonl").read_text().splitlines()]
    assert timeline[-1]["step"] == 3
    assert timeline[-1]["search"] == {"busy_s": 1.5}
    assert set(timeline[-1]["cpu_s"]) == {"search", "replay", "learner", "actor"}


def test_a_dead_learner_is_restarted_and_told_to_resume(launched):
    one = launched(DIES_ONCE)
    code, out, err = one.end()
    assert (code, err) == (0, "")
    assert "warning: learner ended with exit status 9" in out
    assert json.loads((one.run / "summary.json").read_text())["restarts"]["learner"] == 1


def test_ctrl_c_stops_everything_in_order(launched):
    one = launched(FOR_EVER)
    one.until(lambda: (one.run / "actor").exists() and (one.run / "step").exists())
    one.process.send_signal(signal.SIGINT)
    code, _, err = one.end()
    assert (code, err) == (130, "")
    assert (one.run / "ended").read_text().split() == ["actor", "learner", "search", "replay"]
    assert json.loads((one.run / "summary.json").read_text())["outcome"] == "interrupted"


def test_a_second_ctrl_c_does_not_wait_for_a_stubborn_learner(launched):
    one = launched("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOR_EVER, extra="")
    one.until(lambda: (one.run / "actor").exists() and (one.run / "step").exists())
    one.process.send_signal(signal.SIGINT)
    one.until(lambda: "actor" in ((one.run / "ended").read_text() if (one.run / "ended").exists() else ""))
    before = time.monotonic()
    one.process.send_signal(signal.SIGINT)
    assert one.end()[0] == 130
    assert time.monotonic() - before < 4.5


def test_a_killed_launcher_leaves_nothing_running(launched):
    one = launched(FOR_EVER)
    one.until(lambda: (one.run / "actor").exists())
    children = descendants(one.process.pid)
    assert len(children) >= 8
    one.process.kill()
    one.process.communicate()
    give_up = time.monotonic() + 10
    while any(
        Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
        for pid in children
    ):
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_learner_that_cannot_start_is_one_clear_line(launched):
    one = launched(CANNOT_START)
    code, _, err = one.end()
    assert code == 1
    assert err == "error: learner could not start (exit status 1): the model folder must have config.json, got none\n"
    assert "loading weights" in one.log("learner")


def test_a_busy_port_is_one_clear_line(launched):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = launched(FOR_EVER, extra=f"[replay]\nport = {port}\n").end()
    assert code == 1
    assert err.startswith(f"error: replay could not start (exit status 1): cannot bind 127.0.0.1:{port}: ")
    assert err.count("\n") == 1


def test_a_service_that_never_answers_is_given_up(launched):
    one = launched(FOR_EVER, extra='start_timeout_s = 1.5\nstart_search = false\n[retrieval]\nurl = "http://127.0.0.1:9"\n')
    (one.run.parent.parent / "bin" / "replay").write_text("import time\ntime.sleep(600)\n")
    code, _, err = one.end()
    assert code == 1
    assert err.startswith("error: replay must be ready in time")


def test_a_run_that_must_stop_says_why_and_is_not_restarted(launched):
    one = launched(IS_STOPPED)
    code, out, err = one.end()
    assert code == 1
    assert err == "error: every group is filtered\n"
    assert "restarted" not in out
