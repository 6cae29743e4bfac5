"""A stopped and a finished run launched again: the real launcher and replay service, stand-ins for learner and actor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_search_rl.questions import Question, write_questions

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

DRIVER = """
import asyncio, sys
from pathlib import Path
from rich.console import Console
from async_search_rl.config import load_config
from async_search_rl.errors import SearchRLError
from async_search_rl.launch import pieces
from async_search_rl.launch.process import process_started_at
from async_search_rl.launch.run import launch
pieces.BIN = Path(sys.argv[1])
try:
    asyncio.run(launch(load_config(sys.argv[2], sys.argv[3:]), process_started_at(), Console()))
except SearchRLError as error:
    sys.exit(f"error: {error}")
"""

COMMON = f"""
import asyncio, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from async_search_rl.config import load_config
from async_search_rl.replay.client import ReplayClient
from async_search_rl.replay.schema import FinishRequest, LeaseRequest, PublishRequest, StartRequest
config = load_config(sys.argv[1])
timeline = config.run.folder / "metrics" / "timeline.jsonl"
def samples():
    return len(timeline.read_text().splitlines()) if timeline.exists() else 0
"""

ACTOR = (
    COMMON
    + """
async def main():
    known = None
    async with ReplayClient(config.replay.url) as client:
        while True:
            asked = LeaseRequest(actor="n-1-0", running=[], want=1, want_evaluations=0, wait_s=0.5, known_policy=known)
            reply = await client.lease(asked)
            known = reply.policy.version if reply.policy else known
            if reply.stop:
                return
asyncio.run(main())
"""
)

LEARNER = (
    COMMON
    + """
async def launcher_looks_twice():
    before, deadline = samples(), time.monotonic() + 30
    while samples() < before + 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
async def main():
    async with ReplayClient(config.replay.url) as client:
        await launcher_looks_twice()
        while not (await client.status()).actors:
            await asyncio.sleep(0.05)
        stops, last = config.replay.max_attempts == 1, config.run.max_steps
        step = 0 if stops else last  # As if from a checkpoint of the last step.
        begun = StartRequest(run=config.run.name, step=step, cut=0, weights_url="w")
        incarnation = (await client.start(begun)).incarnation
        await launcher_looks_twice()
        await client.publish(PublishRequest(incarnation=incarnation, step=step, cut=0))
        if stops:
            await asyncio.sleep(60)  # The launcher ends the run.
        finished = FinishRequest(incarnation=incarnation, step=last, wait_s=5.0)
        while not (await client.finish(finished)).done:
            pass
asyncio.run(main())
"""
)


@pytest.fixture
def launch(tmp_path):
    """Launches the run: exit status, error, outcome, steps, restarts of the actor.

    ``max_attempts`` 1 lets it stop at first, for its only question's only lease runs out.
    """
    programs = {
        "replay": f"import runpy\nrunpy.run_path({str(ROOT / 'bin' / 'replay')!r}, run_name='__main__')\n",
        "actor": ACTOR,
        "learner": LEARNER,
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
    write_questions(tmp_path / "train.jsonl", [Question(id="q", question="Q?", answers=("a",))])
    (tmp_path / "config.toml").write_text(
        f'[run]\nname = "r"\ndir = "{tmp_path}/runs"\n[data]\ntrain = "{tmp_path}/train.jsonl"\n'
        '[retrieval]\nurl = "http://127.0.0.1:9"\n[replay]\nlease_s = 1.0\n[launch]\nstop_timeout_s = 5.0\n'
    )

    def run(**keys):
        overrides = [part for key, value in keys.items() for part in [f"{key.replace('__', '.')}={value}"]]
        argv = [sys.executable, "-c", DRIVER, str(tmp_path / "bin"), str(tmp_path / "config.toml"), *overrides]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ended = subprocess.run(
            argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
        return ended.returncode, ended.stderr, summary["outcome"], summary["steps"], summary["restarts"].get("actor")

    return run


def test_a_stopped_run_goes_on(launch):
    code, err, *_ = launch(run__max_steps=3, replay__max_attempts=1)
    assert code == 1
    assert err.startswith("error: all 1 training questions are parked")
    assert launch(run__max_steps=3, replay__max_attempts=9) == (0, "", "finished", 3, 0)


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(launch):
    assert launch(run__max_steps=3) == (0, "", "finished", 3, 0)
    assert launch(run__max_steps=5) == (0, "", "finished", 5, 0)
