"""A nice generator is nice towards the other sessions of its machine too."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import os
from pathlib import Path
from rollouts.generator import yield_cores
yield_cores(7)
group = Path("/proc/self/autogroup")
print(os.nice(0), group.read_text().split()[-1] if group.exists() else "none")
"""


def test_a_generator_yields_its_cores_with_its_whole_session() -> None:
    command = [sys.executable, "-c", PROGRAM]
    out = subprocess.run(command, cwd=ROOT, start_new_session=True, capture_output=True, text=True, check=True, timeout=60).stdout
    nice, group = out.split()
    assert int(nice) == os.nice(0) + 7
    assert group in ("7", "none")
