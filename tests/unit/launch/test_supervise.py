"""Supervision, with real child processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from async_search_rl.errors import DeadlineError, EngineError, RunStoppedError
from async_search_rl.launch import guard
from async_search_rl.launch.local import LocalStarter
from async_search_rl.launch.process import LocalProcess, Piece, meaningful_line
from async_search_rl.launch.supervise import Interrupts, RestartBudget, RunInterruptedError, fleet

GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
STUBBORN = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w').close(); time.sleep(600)"
)
POLITE = """
import signal, sys, time
def end(*_):
    open(sys.argv[2], "a").write(sys.argv[3] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def python(name, code, *args, restart_argv=()):
    return Piece(name=name, argv=(sys.executable, "-S", "-c", code, *map(str, args)), restart_argv=tuple(map(str, restart_argv)))


def until(condition, timeout_s=10.0):
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "condition did not come true in time"
        time.sleep(0.01)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def written(path):
    async def check():
        return path.exists() and (path.stat().st_size > 0 or path.suffix == ".ready")

    return check


@contextlib.asynccontextmanager
async def started(tmp_path, interrupts=None, limit=3, stop_timeout_s=5.0):
    starter = LocalStarter(tmp_path / "logs")
    async with fleet(
        starter, interrupts or Interrupts(), restart_limit=limit, restart_window_s=60.0, stop_timeout_s=stop_timeout_s
    ) as pieces:
        yield pieces


def test_leaving_the_fleet_kills_grandchildren_in_sessions_of_their_own(tmp_path):
    async def scenario():
        async with started(tmp_path) as pieces:
            await pieces.start(python("a", GRANDCHILD, tmp_path / "pid"), 30)
            await pieces.await_ready("a", written(tmp_path / "pid"))
            pid = int((tmp_path / "pid").read_text())
            assert alive(pid)
            return pid

    assert not alive(asyncio.run(scenario()))


def test_a_killed_guard_leaves_no_orphans_after_the_restart(tmp_path):
    async def scenario():
        async with started(tmp_path) as pieces:
            await pieces.start(python("a", GRANDCHILD, tmp_path / "pid"), 30)
            await pieces.await_ready("a", written(tmp_path / "pid"))
            first = int((tmp_path / "pid").read_text())
            os.kill(pieces.pieces["a"].handle.pid, signal.SIGKILL)
            until(lambda: pieces.exit_code("a") is not None)
            notes = await pieces.mend()
            assert len(notes) == 1
            assert notes[0] == "a was killed by SIGKILL; restarted"
            assert not alive(first)

    asyncio.run(scenario())


def test_the_death_of_the_launcher_kills_everything(tmp_path):
    launcher = f"""
import sys, time
from pathlib import Path
from async_search_rl.launch.process import LocalProcess, Piece
piece = Piece(name="a", argv=(sys.executable, "-S", "-c", {GRANDCHILD!r}, {str(tmp_path / "pid")!r}))
process = LocalProcess(piece, Path({str(tmp_path / "a.log")!r}))
print(process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        guard_pid = int(process.stdout.readline())
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        grandchild = int((tmp_path / "pid").read_text())
        process.kill()
    until(lambda: not alive(guard_pid) and not alive(grandchild))


def test_pieces_are_stopped_politely_and_in_order(tmp_path):
    async def scenario():
        async with started(tmp_path) as pieces:
            for name in ("learner", "actor"):
                await pieces.start(python(name, POLITE, tmp_path / f"{name}.ready", tmp_path / "order", name), 30)
                await pieces.await_ready(name, written(tmp_path / f"{name}.ready"))
            await pieces.stop(["actor", "learner", "absent"])
            assert [pieces.exit_code(name) for name in ("actor", "learner")] == [0, 0]

    asyncio.run(scenario())
    assert (tmp_path / "order").read_text().split() == ["actor", "learner"]


def test_a_piece_that_ignores_the_signal_is_killed_after_the_timeout(tmp_path):
    async def scenario():
        async with started(tmp_path, stop_timeout_s=0.3) as pieces:
            await pieces.start(python("a", STUBBORN, tmp_path / "a.ready"), 30)
            await pieces.await_ready("a", written(tmp_path / "a.ready"))
            await pieces.stop(["a"])
            return pieces.exit_code("a")

    assert asyncio.run(scenario()) == 128 + signal.SIGKILL


def test_the_second_signal_ends_the_wait_for_a_clean_stop(tmp_path):
    async def scenario():
        interrupts = Interrupts()
        async with started(tmp_path, interrupts, stop_timeout_s=600) as pieces:
            with interrupts.caught():
                await pieces.start(python("a", STUBBORN, tmp_path / "a.ready"), 30)
                await pieces.await_ready("a", written(tmp_path / "a.ready"))
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0)
                stopping = asyncio.create_task(pieces.stop(["a"]))
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.wait_for(stopping, 10)
                return interrupts.count, pieces.exit_code("a")

    assert asyncio.run(scenario()) == (2, 128 + signal.SIGKILL)


def test_a_signal_ends_the_wait_for_readiness(tmp_path):
    async def never():
        return False

    async def scenario():
        interrupts = Interrupts()
        async with started(tmp_path, interrupts) as pieces:
            with interrupts.caught():
                await pieces.start(python("a", "import time; time.sleep(600)"), 30)
                os.kill(os.getpid(), signal.SIGTERM)
                with pytest.raises(RunInterruptedError):
                    await pieces.await_ready("a", never)

    asyncio.run(scenario())


def test_a_piece_that_cannot_start_is_named_with_its_error_and_exit_status(tmp_path):
    async def never():
        return False

    async def scenario():
        async with started(tmp_path) as pieces:
            await pieces.start(python("search", "import sys; print('error: cannot bind 127.0.0.1:80: busy'); sys.exit(3)"), 30)
            await pieces.await_ready("search", never)

    with pytest.raises(EngineError, match=r"^search could not start \(exit status 3\): cannot bind 127\.0\.0\.1:80: busy$"):
        asyncio.run(scenario())


def test_a_command_that_does_not_exist_is_one_line(tmp_path):
    process = LocalProcess(Piece(name="a", argv=("/nowhere/python",)), tmp_path / "a.log")
    until(lambda: process.poll() is not None)
    assert process.poll() == 127
    assert process.error_line() == "cannot execute /nowhere/python: No such file or directory"


def test_a_piece_that_is_not_ready_in_time_is_named(tmp_path):
    async def never():
        return False

    async def scenario():
        async with started(tmp_path) as pieces:
            await pieces.start(python("replay", "import time; time.sleep(600)"), 0.2)
            await pieces.await_ready("replay", never)

    with pytest.raises(DeadlineError, match=r"replay must be ready in time .*logs/replay\.log"):
        asyncio.run(scenario())


def test_restarts_stop_at_the_limit_and_get_their_own_arguments(tmp_path):
    code = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '.\\n'); raise ValueError('broken on purpose')"

    async def always():
        return True

    async def scenario():
        async with started(tmp_path, limit=2) as pieces:
            await pieces.start(python("learner", code, tmp_path / "runs", restart_argv=("again",)), 30)
            await pieces.await_ready("learner", always)
            for _ in range(3):
                until(lambda: pieces.exit_code("learner") is not None)
                await pieces.mend()

    with pytest.raises(EngineError, match=r"learner ended with exit status 1: ValueError: broken on purpose \(after 2 restarts"):
        asyncio.run(scenario())
    assert (tmp_path / "runs").read_text().splitlines() == [".", "again.", "again."]


@pytest.mark.parametrize(
    "code", ["print('error: every group is filtered'); sys.exit(3)", "sys.exit('learner: stopped: every group is filtered')"]
)
def test_a_piece_that_stops_the_run_on_purpose_is_not_restarted(tmp_path, code):
    async def always():
        return True

    async def scenario():
        async with started(tmp_path) as pieces:
            await pieces.start(python("learner", f"import sys; {code}"), 30)
            await pieces.await_ready("learner", always)
            until(lambda: pieces.exit_code("learner") is not None)
            await pieces.mend()

    with pytest.raises(RunStoppedError, match=r"^learner stopped the run: every group is filtered$"):
        asyncio.run(scenario())


def test_a_piece_that_dies_before_it_is_ready_is_not_restarted(tmp_path):
    async def scenario():
        async with started(tmp_path) as pieces:
            await pieces.start(python("actor", "import sys; sys.exit('error: no weights')"), 30)
            until(lambda: pieces.exit_code("actor") is not None)
            await pieces.mend()

    with pytest.raises(EngineError, match=r"^actor could not start \(exit status 1\): no weights$"):
        asyncio.run(scenario())


def test_processor_seconds_include_grandchildren(tmp_path):
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'while True: pass'])"

    async def scenario():
        async with started(tmp_path) as pieces:
            await pieces.start(python("a", burn), 30)
            until(lambda: pieces.cpu_s()["a"] > 0.2)
            return pieces.cpu_s()["a"]

    assert 0.2 < asyncio.run(scenario()) < 10


def test_a_finished_piece_is_not_restarted(tmp_path):
    async def always():
        return True

    async def scenario():
        async with started(tmp_path) as pieces:
            await pieces.start(python("learner", "pass"), 30)
            await pieces.await_ready("learner", always)
            until(lambda: pieces.exit_code("learner") is not None)
            return await pieces.mend(finished=["learner"]), pieces.exit_code("learner")

    assert asyncio.run(scenario()) == ([], 0)


def test_restart_budget_forgets_old_restarts():
    budget = RestartBudget(limit=2, window_s=10.0)
    assert [budget.spend(at) for at in (0.0, 1.0, 2.0, 10.5, 10.9, 11.5)] == [True, True, False, True, False, True]


def test_strangers_of_the_launcher_are_spared(tmp_path):
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as stranger:

        async def scenario():
            async with started(tmp_path) as pieces:
                await pieces.start(python("a", "import time; time.sleep(600)"), 30)

        asyncio.run(scenario())
        assert stranger.poll() is None
        assert stranger.pid in guard.descendants(os.getpid())
        stranger.kill()


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", "no output"),
        (
            "loading\nerror: the model folder must have tokenizer.json, got none\nbye\n",
            "the model folder must have tokenizer.json, got none",
        ),
        ("Traceback (most recent call last):\n  File x\nValueError: no good\n", "ValueError: no good"),
        (
            "(EngineCore pid=12) ERROR 11-30 09:10:11 [core.py:100] RuntimeError: no memory\nINFO shutting down\n",
            "RuntimeError: no memory",
        ),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory\n", "torch.OutOfMemoryError: CUDA out of memory"),
        ("starting\nlast words\n\n", "last words"),
    ],
)
def test_the_line_that_says_why(output, line):
    assert meaningful_line(output) == line
