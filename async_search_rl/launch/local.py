"""Placement on this machine: every piece is a child process under a guard, its output in the run's `logs` folder."""

from __future__ import annotations

import os
from pathlib import Path

from async_search_rl.config import Config
from async_search_rl.launch.guard import become_subreaper, descendants, kill_descendants
from async_search_rl.launch.process import Handle, LocalProcess, Piece


class LocalStarter:
    """A :class:`~async_search_rl.launch.supervise.Starter` for this machine."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: list[LocalProcess] = []
        become_subreaper()
        self._strangers = set(descendants(os.getpid()))

    async def prepare(self, config: Config) -> Config:
        """Nothing is needed; every address stays as it is."""
        return config

    async def start(self, piece: Piece, restart: bool) -> Handle:
        """Start ``piece`` as a child process, after the orphans of earlier ones are gone (a killed guard leaves some)."""
        self._started = [process for process in self._started if process.poll() is None]
        kill_descendants(spare=self._strangers | {process.pid for process in self._started})
        process = LocalProcess(piece, self._logs / f"{piece.name}.log", restart=restart)
        self._started.append(process)
        return process

    async def close(self) -> None:
        """Kill whatever is left."""
        kill_descendants(spare=self._strangers)
