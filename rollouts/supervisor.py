"""`bin/actor`: keeps the generator processes of one node running, and leaves none behind.

In: the configuration, and the command that starts generator number i. Out: an exit when all have been told to stop, or an error
that says in one line why one could not start or kept dying. Each generator runs under a guard, which kills whatever the generator
started (vLLM's engine core and workers) when it ends, and all of it when this process ends by whatever cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_search_rl.config.schema import Config
from async_search_rl.errors import DeadlineError, EngineError
from async_search_rl.files import writable
from async_search_rl.http import stop_signal
from async_search_rl.launch.process import LocalProcess, Piece, meaningful_line, tail
from async_search_rl.launch.supervise import RestartBudget
from rollouts import devices
from rollouts.generator import check_actor

_POLL_S = 0.1
_KILL_WAIT_S = 20.0
_NO_CAUSE = "See root cause above"

_log = logging.getLogger(__name__)

Command = Callable[[int, str, Path], tuple[str, ...]]
"""(index, name, ready file) to the command line of a generator."""


@dataclass
class _Generator:
    """One generator and its present process."""

    piece: Piece
    ready_file: Path
    log: Path
    budget: RestartBudget
    start_at: float
    process: LocalProcess | None = None
    restarts: int = 0

    @property
    def ready(self) -> bool:
        return self.ready_file.exists()


async def supervise(config: Config, command: Command) -> None:
    """Start all generators, restart those that die, until every one has ended by itself or a signal asks for the end.

    Raises:
        ConfigError, DataError: what would fail in every generator, before one is started.
        EngineError: a generator could not start, or died too often; all others were stopped.
        DeadlineError: a generator was not ready in time; all others were stopped.
    """
    check_actor(config)
    with writable(config.run.folder / "logs"):
        pass
    stop = stop_signal()
    with tempfile.TemporaryDirectory(prefix="actor-") as folder:
        generators = _plan(config, command, Path(folder))
        try:
            going_on = [True]
            while any(going_on) and not stop.is_set():
                going_on = [_goes_on(generator, config) for generator in generators]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _POLL_S)
        finally:
            await _end(generators, config.launch.stop_timeout_s)


def _plan(config: Config, command: Command, folder: Path) -> list[_Generator]:
    """The generators of this node, none of them started."""
    environments = devices.assign(config.generator, devices.visible_devices(config.generator), os.cpu_count() or 1)
    delays = devices.start_after_s(config.generator, environments)
    now, node = time.monotonic(), f"{socket.gethostname()}-{os.getpid()}"
    generators = []
    for index, (environment, delay_s) in enumerate(zip(environments, delays, strict=True)):
        ready_file = folder / f"ready-{index}"
        piece = Piece(name=f"generator {index}", argv=command(index, f"{node}-{index}", ready_file), env=environment)
        log = config.run.folder / "logs" / f"generator-{os.getpid()}-{index}.log"
        budget = RestartBudget(config.generator.restart_limit, config.launch.restart_window_s)
        generators.append(_Generator(piece, ready_file, log, budget, now + delay_s))
    return generators


def _goes_on(generator: _Generator, config: Config) -> bool:
    """Look after one generator; false when it has ended well."""
    now = time.monotonic()
    if generator.process is None:
        if now >= generator.start_at:
            generator.process = LocalProcess(generator.piece, generator.log, restart=generator.restarts > 0)
            generator.start_at = now
        return True
    code = generator.process.poll()
    if code is None:
        if not generator.ready and now - generator.start_at > config.generator.start_timeout_s:
            raise DeadlineError(
                f"{generator.piece.name} must be ready within {config.generator.start_timeout_s:g} s "
                f"(generator.start_timeout_s), it is not; its log is {generator.log}"
            )
        return True
    if code == 0:
        return False
    _restart(generator, code, now)
    return True


def _restart(generator: _Generator, code: int, now: float) -> None:
    """Plan the next start of a generator that died."""
    why = f"exit status {code}: {_reason(generator)}; its log is {generator.log}"
    if not generator.ready:
        raise EngineError(f"{generator.piece.name} could not start ({why})")
    if not generator.budget.spend(now):
        raise EngineError(f"{generator.piece.name} died once more after {generator.restarts} restarts ({why})")
    _log.warning("%s died and is started again (%s)", generator.piece.name, why)
    generator.ready_file.unlink()
    generator.process, generator.start_at = None, now
    generator.restarts += 1


def _reason(generator: _Generator) -> str:
    """The line of its log that says best why it died; vLLM's own last word only points to an earlier one."""
    assert generator.process is not None
    line = generator.process.error_line()
    if _NO_CAUSE not in line:
        return line
    log = tail(generator.log)
    return meaningful_line("\n".join(row for row in log.splitlines() if _NO_CAUSE not in row and not row.startswith("actor: ")))


async def _end(generators: list[_Generator], timeout_s: float) -> None:
    """Ask all to end, then kill what has not."""
    processes = [generator.process for generator in generators if generator.process is not None]
    for process in processes:
        process.stop()
    if not await ended(processes, timeout_s):
        for process in processes:
            process.kill()
        await ended(processes, _KILL_WAIT_S)


async def ended(processes: list[LocalProcess], timeout_s: float) -> bool:
    """Wait until all have ended, at most ``timeout_s``; whether they have."""
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
