"""One process of a run on this machine: started under a guard, its output in a log file, ended politely or at once.

In: a :class:`Piece`, which says what to run. Out: a :class:`LocalProcess`, which whoever supervises polls; nothing here waits.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from async_search_rl.errors import EngineError
from async_search_rl.launch import guard

_TAIL_BYTES = 64 << 10
_MAX_LINE_CHARS = 400
_OURS = re.compile(r"^(?:error|search|replay|actor|learner): (?:error: )?")
_ERROR = re.compile(r"(?i)\b(error|fatal|refused|cannot)\b[^:]*: .*\S")
_EXCEPTION = re.compile(r"^(?:[a-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Stopped|Interrupt|Exit): \S")
_PREFIX = re.compile(
    r"^(?:\([\w=,. /-]+\)\s*|\[[\w:]*rank\d+\]:\s*|(?:ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d\s*|\[\S+\.py:\d+\]\s*)+"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What to start: one entrypoint with its arguments.

    Attributes:
        name: unique in the run; also names the log file.
        argv: the command.
        env: variables added to the environment.
        restart_argv: appended to ``argv`` at every start but the first.
        gpus: devices it needs (Ray places by them).
        cpus: cores it needs (Ray places by them).
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    restart_argv: tuple[str, ...] = ()
    gpus: float = 0
    cpus: float = 1


class Handle(Protocol):
    """One started process, wherever it runs."""

    def poll(self) -> int | None:
        """Its exit status, or ``None`` while it runs."""

    def stop(self) -> None:
        """Ask it to end. Does nothing when it has ended."""

    def kill(self) -> None:
        """End it and all it started at once."""

    def error_line(self) -> str:
        """The line of its output that says best why it ended."""

    def cpu_s(self) -> float:
        """Processor seconds that it and its live descendants have used; 0 where that is not known."""


class LocalProcess:
    """A :class:`Handle` of a process of this machine."""

    def __init__(self, piece: Piece, log: Path, *, restart: bool = False) -> None:
        argv = [*piece.argv, *(piece.restart_argv if restart else ())]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
            self._log, self._log_start = log, output.tell()
            guarded = [sys.executable, "-P", "-S", guard.__file__, str(os.getpid()), *argv]
            try:
                self._process = subprocess.Popen(
                    guarded,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **piece.env},
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(f"{piece.name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def poll(self) -> int | None:
        """See :class:`Handle`."""
        return self._process.poll()

    def stop(self) -> None:
        """SIGTERM to the process."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the process and all its descendants, by way of the guard."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def error_line(self) -> str:
        """See :func:`meaningful_line`; of the output since this start."""
        return meaningful_line(tail(self._log, self._log_start))

    def cpu_s(self) -> float:
        """Processor seconds of the process tree, children that have ended included."""
        return sum(_cpu_s(pid) for pid in guard.descendants(self.pid))


def tail(log: Path, start: int = 0) -> str:
    """The last 64 KiB of ``log``, nothing before the byte ``start``."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        return file.read().decode("utf-8", "replace")


def meaningful_line(text: str) -> str:
    """The line of a dead process's output that says best why it died.

    A line that begins with ``error:`` or an entrypoint's name is what our own entrypoints say; after it the last exception's line,
    then the last line with an error word, then the last line at all.
    """
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines() if line.strip()]
    for matches in (_OURS.match, _EXCEPTION.match, _ERROR.search, bool):
        for line in reversed(lines):
            if matches(line):
                return _OURS.sub("", line)[:_MAX_LINE_CHARS]
    return "no output"


def _cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def process_started_at() -> float:
    """When this process was started, as a reading of ``time.monotonic()``; before its imports, to a hundredth of a second."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s
