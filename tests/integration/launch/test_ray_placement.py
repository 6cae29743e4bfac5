"""Placement over a real one-node Ray cluster, with small commands in place of the entrypoints."""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_search_rl.config import parse_config
from async_search_rl.errors import ConfigError, DeadlineError
from async_search_rl.launch import pieces
from async_search_rl.launch.process import Piece
from async_search_rl.launch.ray import LOST, RayStarter
from async_search_rl.launch.supervise import Interrupts, RunInterruptedError, fleet

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    **os.environ,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Address of a Ray cluster of this machine with 8 CPUs and no GPU."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    folder = tmp_path_factory.mktemp("ray")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--node-ip-address=127.0.0.1",
        "--num-cpus=8",
    ]
    options = [
        "--num-gpus=0",
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--object-store-memory=100000000",
        f"--temp-dir={folder}",
    ]
    log_file = folder / "ray.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen([*ray, *options], stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT, start_new_session=True)
        try:
            give_up = time.monotonic() + 120
            while "Ray runtime started" not in log_file.read_text():
                assert process.poll() is None, log_file.read_text()
                assert time.monotonic() < give_up, log_file.read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def config_of(tmp_path, address, **launch):
    return parse_config(
        {"run": {"dir": str(tmp_path)}, "launch": {"placement": "ray", "ray_address": address, "ray_gpus": False, **launch}}
    )


@pytest.fixture(autouse=True)
def entrypoints(tmp_path, monkeypatch):
    for name in ("search", "replay", "learner", "actor"):
        (tmp_path / name).touch()
    monkeypatch.setattr(pieces, "BIN", tmp_path)


def python(name, code, *args):
    return Piece(name=name, argv=(sys.executable, "-S", "-c", code, *map(str, args)), restart_argv=("again",))


def ended(pid):
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


async def until(condition, timeout_s=30.0):
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "condition did not come true in time"
        await asyncio.sleep(0.05)


def members(config, tmp_path, interrupts=None):
    interrupts = interrupts or Interrupts()
    starter = RayStarter(config, tmp_path / "logs", interrupts)
    return fleet(starter, interrupts, restart_limit=2, restart_window_s=600, stop_timeout_s=5)


def test_pieces_run_under_ray_are_restarted_and_leave_nothing(tmp_path, cluster):
    marks = tmp_path / "marks"
    code = "import sys, os; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '.'); sys.exit('error: once')"

    async def scenario():
        config = config_of(tmp_path, cluster)
        async with members(config, tmp_path) as fleet_of_ray:
            assert await fleet_of_ray.prepare(config) == config
            await fleet_of_ray.start(python("learner", code, marks), 60)
            fleet_of_ray.ready("learner")
            await until(lambda: fleet_of_ray.exit_code("learner") == 1)
            notes = await fleet_of_ray.mend()
            assert notes == ["learner ended with exit status 1: once; restarted"]
            await until(lambda: marks.read_text() == ".again.")
            await fleet_of_ray.start(python("actor", GRANDCHILD, tmp_path / "pid"), 60)
            await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
            assert not ended(int((tmp_path / "pid").read_text()))
            assert fleet_of_ray.cpu_s()["actor"] >= 0
        await until(lambda: ended(int((tmp_path / "pid").read_text())))

    asyncio.run(scenario())


def test_a_lost_ray_worker_counts_as_a_dead_piece_and_is_replaced(tmp_path, cluster):
    async def scenario():
        config = config_of(tmp_path, cluster)
        async with members(config, tmp_path) as fleet_of_ray:
            await fleet_of_ray.prepare(config)
            await fleet_of_ray.start(python("actor", GRANDCHILD, tmp_path / "pid"), 60)
            fleet_of_ray.ready("actor")
            await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
            grandchild = int((tmp_path / "pid").read_text())
            (tmp_path / "pid").unlink()
            os.kill(worker_of(grandchild), signal.SIGKILL)
            await until(lambda: fleet_of_ray.exit_code("actor") == LOST)
            await until(lambda: ended(grandchild))
            assert "restarted" in (await fleet_of_ray.mend())[0]
            await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")

    asyncio.run(scenario())


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def worker_of(pid):
    """The Ray worker above a process: the first ancestor that is not one of ours."""
    while b"ray::" not in (Path(f"/proc/{pid}/cmdline").read_bytes()):
        pid = parent_of(pid)
        assert pid > 1
    return pid


def test_more_gpus_than_there_are_end_at_the_deadline(tmp_path, cluster):
    async def scenario():
        config = config_of(tmp_path, cluster, ray_gpus=True, learner_ranks=3, start_timeout_s=2.0)
        async with members(config, tmp_path) as fleet_of_ray:
            await fleet_of_ray.prepare(config)

    with pytest.raises(DeadlineError, match=r"asked for \d+ CPU and 4 GPU in 4 pieces, it has 8 CPU and 0 GPU in all"):
        asyncio.run(scenario())


async def after_ctrl_c(waiting):
    """What is raised by ``waiting``, which waits for ever, soon after a signal."""
    task = asyncio.create_task(waiting)
    done, _ = await asyncio.wait([task], timeout=1.5)
    assert not done
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(RunInterruptedError):
        await asyncio.wait_for(task, 10)


def test_ctrl_c_ends_the_wait_for_room(tmp_path, cluster):
    async def scenario():
        config = config_of(tmp_path, cluster, ray_gpus=True, learner_ranks=3, start_timeout_s=600.0)
        interrupts = Interrupts()
        with interrupts.caught():
            async with members(config, tmp_path, interrupts) as fleet_of_ray:
                await after_ctrl_c(fleet_of_ray.prepare(config))

    asyncio.run(scenario())


def test_ctrl_c_ends_the_wait_for_a_runner_that_does_not_answer(tmp_path, cluster):
    async def scenario():
        config = config_of(tmp_path, cluster, start_timeout_s=600.0)
        interrupts = Interrupts()
        with interrupts.caught():
            async with members(config, tmp_path, interrupts) as fleet_of_ray:
                await fleet_of_ray.prepare(config)
                await fleet_of_ray.start(python("actor", GRANDCHILD, tmp_path / "pid"), 60)
                fleet_of_ray.ready("actor")
                await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
                grandchild = int((tmp_path / "pid").read_text())
                worker = worker_of(grandchild)
                os.kill(parent_of(grandchild), signal.SIGKILL)
                await until(lambda: fleet_of_ray.exit_code("actor") is not None)
                os.kill(worker, signal.SIGSTOP)
                try:
                    await after_ctrl_c(fleet_of_ray.mend())
                finally:
                    os.kill(worker, signal.SIGCONT)

    asyncio.run(scenario())


def test_an_address_without_a_cluster_is_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"launch\.ray_address must be that of a running Ray cluster, got '127\.0\.0\.1:1'"):
        RayStarter(config_of(tmp_path, "127.0.0.1:1"), tmp_path, Interrupts())
