"""A run's folder: who may use it, and whether what is in it permits a start."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

from async_search_rl.config import Config
from async_search_rl.errors import ConfigError, RunStoppedError
from async_search_rl.files import writable

_OURS = {".lock", "logs"}


@contextlib.contextmanager
def claimed(config: Config) -> Iterator[Path]:
    """The run's folder, made if need be, for this process alone inside the block.

    Raises:
        ConfigError: it cannot be written, another launch uses it, or `run.resume` is `never` and it has been used.
        RunStoppedError: the run in it has finished and `run.max_steps` asks for no more.
    """
    with writable(config.run.folder) as folder:
        lock = (folder / ".lock").open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} must not be in use, got another bin/launch at work in it") from error
        if config.run.resume == "never" and {path.name for path in folder.iterdir()} - _OURS:
            raise ConfigError(f"{folder} must be empty with run.resume = 'never', got the files of an earlier run")
        _refuse_finished(folder, config.run.max_steps)
        yield folder


def _refuse_finished(folder: Path, max_steps: int) -> None:
    summary = folder / "summary.json"
    if not summary.is_file():
        return
    with contextlib.suppress(ValueError):
        done = json.loads(summary.read_text(encoding="utf-8"))
        if done.get("outcome") == "finished" and done.get("steps", 0) >= max_steps:
            raise RunStoppedError(
                f"{folder} holds a finished run of {done['steps']} steps; look at it with bin/view {folder}, raise run.max_steps "
                "to go on with it, or give the new run another run.name"
            )
