"""Keeping the processes of a run alive: readiness with a deadline, restarts within a limit, an orderly end.

In: pieces to start and a function that starts one somewhere (:mod:`local` or :mod:`ray`). Out: the pieces running, or one error
that says which could not and why. `bin/launch` waits here for its children; the children never wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from async_search_rl.config import Config
from async_search_rl.errors import DeadlineError, EngineError, RunStoppedError
from async_search_rl.launch.process import Handle, Piece

_POLL_S = 0.1
_KILL_WAIT_S = 30.0

ON_PURPOSE = 3
"""Exit status of a process that stopped the run for a reason which a restart would not change (`RunStoppedError`)."""

_STOPPED = "stopped: "
"""How its last line then begins; torchrun hides its workers' exit status."""


class RunInterruptedError(RunStoppedError):
    """Ctrl-C or SIGTERM came while the run was starting or going on."""


class Interrupts:
    """Counts Ctrl-C, SIGTERM and SIGHUP; the first asks for a clean stop, the second for an end at once."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def caught(self) -> Iterator[Interrupts]:
        """Take the signals over from their defaults inside the block; needs a running event loop."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._count)
        try:
            yield self
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def check(self) -> None:
        """Raise :class:`RunInterruptedError` once a signal has come."""
        if self.count:
            raise RunInterruptedError("interrupted")

    def _count(self) -> None:
        self.count += 1


class RestartBudget:
    """At most ``limit`` restarts within any ``window_s`` seconds. Has no clock of its own."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._spent: list[float] = []

    def spend(self, now_s: float) -> bool:
        """Take one restart at time ``now_s``; false if none is left."""
        self._spent = [at for at in self._spent if now_s - at < self._window_s]
        if len(self._spent) >= self._limit:
            return False
        self._spent.append(now_s)
        return True


class Starter(Protocol):
    """Starts a piece somewhere."""

    async def prepare(self, config: Config) -> Config:
        """Take what the whole run needs; the configuration with the addresses that the places of its pieces call for."""

    async def start(self, piece: Piece, restart: bool) -> Handle:
        """Start ``piece``; ``restart`` at every start but the first."""

    async def close(self) -> None:
        """Give back what placement took."""


@dataclass
class Supervised:
    """A piece with its present process."""

    piece: Piece
    handle: Handle
    budget: RestartBudget
    ready_by_s: float
    ready: bool = False
    restarts: int = 0
    cpu_of_the_dead_s: float = 0.0
    cpu_s: float = 0.0


class Fleet:
    """All pieces of a run, in the order in which they were started. Made by :func:`fleet`."""

    def __init__(
        self, starter: Starter, interrupts: Interrupts, restart_limit: int, restart_window_s: float, stop_timeout_s: float
    ) -> None:
        self._starter = starter
        self._interrupts = interrupts
        self._restart_limit, self._restart_window_s = restart_limit, restart_window_s
        self._stop_timeout_s = stop_timeout_s
        self.pieces: dict[str, Supervised] = {}

    async def prepare(self, config: Config) -> Config:
        """See :meth:`Starter.prepare`."""
        return await self._starter.prepare(config)

    async def start(self, piece: Piece, ready_within_s: float) -> None:
        """Start ``piece``, which must be ready within ``ready_within_s`` seconds."""
        handle = await self._starter.start(piece, restart=False)
        budget = RestartBudget(self._restart_limit, self._restart_window_s)
        self.pieces[piece.name] = Supervised(piece, handle, budget, time.monotonic() + ready_within_s)

    def ready(self, name: str) -> None:
        """From now on ``name`` is restarted when it dies."""
        self.pieces[name].ready = True

    def all_ready(self) -> bool:
        """Whether every piece has been ready."""
        return all(supervised.ready for supervised in self.pieces.values())

    async def await_ready(self, name: str, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Wait until ``is_ready()``.

        Raises:
            EngineError: the piece ended first; the message has the line that says why.
            DeadlineError: it was not ready in time.
            RunInterruptedError: a signal came.
        """
        while not await is_ready():
            self._interrupts.check()
            self._check_start(self.pieces[name])
            await asyncio.sleep(_POLL_S)
        self.ready(name)

    async def mend(self, finished: Sequence[str] = ()) -> list[str]:
        """Restart what has died, ``finished`` pieces aside; returns a sentence for each restart.

        Raises:
            EngineError: a piece died before it was ever ready, or more often than the limit permits.
            DeadlineError: a piece is not ready in time.
            RunStoppedError: a piece ended on purpose, for a reason that a restart would not change.
        """
        notes = []
        for name, supervised in self.pieces.items():
            if not supervised.ready:
                self._check_start(supervised)
            code = supervised.handle.poll()
            if code is None or name in finished:
                continue
            line = supervised.handle.error_line()
            if code == ON_PURPOSE or line.startswith(_STOPPED):
                raise RunStoppedError(f"{name} stopped the run: {line.removeprefix(_STOPPED)}")
            why = f"{name} {_how_it_ended(code, line)}"
            if not supervised.budget.spend(time.monotonic()):
                raise EngineError(f"{why} (after {supervised.restarts} restarts; launch.restart_limit = {self._restart_limit})")
            supervised.cpu_of_the_dead_s, supervised.cpu_s = supervised.cpu_of_the_dead_s + supervised.cpu_s, 0.0
            supervised.handle = await self._starter.start(supervised.piece, restart=True)
            supervised.restarts += 1
            notes.append(f"{why}; restarted")
        return notes

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds used so far by each piece, its earlier processes included."""
        for supervised in self.pieces.values():
            supervised.cpu_s = max(supervised.cpu_s, supervised.handle.cpu_s())
        return {name: piece.cpu_of_the_dead_s + piece.cpu_s for name, piece in self.pieces.items()}

    def has_dead(self) -> bool:
        """Whether a piece has ended."""
        return any(supervised.handle.poll() is not None for supervised in self.pieces.values())

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts of each piece."""
        return {name: supervised.restarts for name, supervised in self.pieces.items()}

    def exit_code(self, name: str) -> int | None:
        """Exit status of a piece; ``None`` while it runs."""
        return self.pieces[name].handle.poll()

    async def stop(self, names: Sequence[str]) -> None:
        """Ask ``names`` to end, one after the other, and kill each that has not ended after the stop timeout.

        From the second signal on everything is killed at once.
        """
        for name in [name for name in names if name in self.pieces]:
            handle = self.pieces[name].handle
            handle.stop()
            if not await self._ended([handle], self._stop_timeout_s):
                handle.kill()
                await self._ended([handle], _KILL_WAIT_S, until_second_signal=False)

    async def kill(self) -> None:
        """End everything at once."""
        handles = [supervised.handle for supervised in self.pieces.values()]
        for handle in handles:
            handle.kill()
        await self._ended(handles, _KILL_WAIT_S, until_second_signal=False)

    @staticmethod
    def _check_start(supervised: Supervised) -> None:
        name, code = supervised.piece.name, supervised.handle.poll()
        if code is not None:
            line = supervised.handle.error_line()
            how = _how_it_ended(code, line) if _signal_name(code) else f"could not start (exit status {code}): {line}"
            raise EngineError(f"{name} {how}")
        if time.monotonic() > supervised.ready_by_s:
            raise DeadlineError(f"{name} must be ready in time (launch.start_timeout_s), got silence; its log is logs/{name}.log")

    async def _ended(self, handles: list[Handle], timeout_s: float, *, until_second_signal: bool = True) -> bool:
        give_up = time.monotonic() + timeout_s
        while any(handle.poll() is None for handle in handles):
            if time.monotonic() > give_up or (until_second_signal and self._interrupts.count > 1):
                return False
            await asyncio.sleep(_POLL_S)
        return True


def _how_it_ended(code: int, line: str) -> str:
    """A killed process has no last words worth showing."""
    name = _signal_name(code)
    return f"was killed by {name}" if name else f"ended with exit status {code}: {line}"


def _signal_name(code: int) -> str:
    number = code - 128 if code > 128 else -code
    return signal.Signals(number).name if number in {each.value for each in signal.Signals} else ""


@contextlib.asynccontextmanager
async def fleet(
    starter: Starter, interrupts: Interrupts, *, restart_limit: int, restart_window_s: float, stop_timeout_s: float
) -> AsyncIterator[Fleet]:
    """A :class:`Fleet` of which nothing is left running when the block is left, however it is left."""
    pieces = Fleet(starter, interrupts, restart_limit, restart_window_s, stop_timeout_s)
    try:
        yield pieces
    finally:
        await pieces.kill()
        await starter.close()
