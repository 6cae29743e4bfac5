"""The worker extension outside vLLM: where it receives weights, and its end with its owner."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts import vllm_worker
from rollouts.vllm_worker import WeightExtension

ROOT = Path(__file__).resolve().parents[3]
SECOND_WORKER = """
import os
import subprocess
import sys
from rollouts.vllm_worker import _end_with

core = subprocess.Popen([sys.executable, "-c", ""])
core.wait()
owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
handle = os.pidfd_open(owner.pid)
owner.kill()
_end_with(handle, core.pid)
"""


class Worker(WeightExtension):
    """What vLLM mixes the extension into."""

    device, rank = "cpu", 1


@pytest.mark.parametrize("staging", ["device", "host"])
def test_a_worker_receives_into_the_configured_memory_as_its_own_rank(monkeypatch, staging):
    made, began = [], []

    class Member:
        def __init__(self, *args):
            made.append(args)

        def begin(self, offer, worker):
            began.append((offer, worker))

    monkeypatch.setattr(vllm_worker, "WeightMember", Member)
    worker = Worker()
    worker.weights_begin(b"first", staging)
    worker.weights_begin(b"second", staging)
    assert made == [("cpu", staging)]
    assert began == [(b"first", 1), (b"second", 1)]


def test_a_worker_ends_with_its_owner_also_where_another_has_ended_their_core():
    done = subprocess.run([sys.executable, "-c", SECOND_WORKER], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
