"""The worker extension outside vLLM: its end with its owner."""

import signal
import subprocess
import sys
from pathlib import Path

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


def test_a_worker_ends_with_its_owner_also_where_another_has_ended_their_core():
    done = subprocess.run([sys.executable, "-c", SECOND_WORKER], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
