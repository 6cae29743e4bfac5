"""Run one command so that nothing it starts can outlive the run. A program of its own, on the standard library only.

    python -P -S guard.py PARENT_PID COMMAND [ARGUMENT ...]

It sits between `bin/launch` and each process of a run. SIGTERM and SIGINT are passed on to the command. SIGUSR1, and the death of
PARENT_PID by whatever cause, kill the command and all its descendants at once, also those in sessions of their own (torchrun's
workers, vLLM's engine cores): the guard is their subreaper, so an orphan becomes its child. When the command ends, what it left
behind is killed too. Exit status: the command's; 128 + n if signal n ended it; 127 if it could not be executed. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_DEADLINE_S = 20.0


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_at_parents_death(number: int) -> None:
    """Have the kernel send ``number`` to this process when the thread that forked it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def descendants(pid: int, spare: Collection[int] = ()) -> list[int]:
    """Process ids of the live descendants of ``pid`` as /proc shows them now; without zombies, ``spare`` and what is below it."""
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(parent), []).append(int(entry))
        if state in (b"Z", b"X"):
            zombies.add(int(entry))
    found: list[int] = []
    queue = [pid]
    while queue:
        queue += (born := [child for child in children.get(queue.pop(), []) if child not in spare])
        found += [child for child in born if child not in zombies]
    return found


def kill_descendants(spare: Collection[int] = (), deadline_s: float = _SWEEP_DEADLINE_S) -> list[int]:
    """Kill this process's descendants, the subtrees of ``spare`` aside, until none is left.

    Returns those that did not die by the deadline, being in the kernel's hands.
    """
    give_up = time.monotonic() + deadline_s
    while left := descendants(os.getpid(), spare):
        if time.monotonic() > give_up:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return []


def _reap() -> dict[int, int]:
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def main(argv: list[str]) -> int:
    """Run ``argv[1:]`` guarded; ``argv[0]`` is the expected parent's process id."""
    handled = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    become_subreaper()
    signal_at_parents_death(signal.SIGUSR1)
    if os.getppid() != int(argv[0]):
        return 128 + signal.SIGUSR1
    guard = os.getpid()
    command = os.fork()
    if command == 0:
        _become(argv[1:], guard)
    code = 128 + signal.SIGKILL
    while True:
        number = signal.sigwait(handled)
        if number == signal.SIGCHLD:
            ended = _reap()
            if command in ended:
                code = ended[command]
                break
        elif number == signal.SIGUSR1:
            break
        else:
            os.kill(command, number)
    return 1 if kill_descendants() else code


def _become(argv: list[str], guard: int) -> None:
    signal_at_parents_death(signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(128 + signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"error: cannot execute {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
