"""A nice generator is nice towards the other sessions of its machine too."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts import generator
from rollouts.generator import yield_cores

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


class Autogroup:
    """The kernel's file, which answers each write with the next of ``errors`` first."""

    def __init__(self, errors):
        self.errors, self.value = list(errors), None

    def __str__(self):
        return "/proc/self/autogroup"

    def exists(self):
        return True

    def write_text(self, text, encoding):
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        self.value = text


@pytest.mark.parametrize(
    ("errors", "value", "said"),
    [
        ([errno.EAGAIN] * 3, "7", ""),
        ([errno.EAGAIN] * 1000, None, "cannot be written: Resource temporarily unavailable"),
        ([errno.EROFS] * 2, None, "cannot be written: Read-only file system"),
    ],
)
def test_a_group_that_cannot_be_made_nice_ends_no_generator(monkeypatch, caplog, errors, value, said):
    group, niced = Autogroup(errors), []
    monkeypatch.setattr(generator, "_AUTOGROUP", group)
    monkeypatch.setattr(generator, "_AUTOGROUP_PAUSE_S", 0.0)
    monkeypatch.setattr(generator.os, "nice", niced.append)
    yield_cores(7)
    assert niced == [7]
    assert group.value == value
    assert (said in caplog.text) if said else not caplog.records
