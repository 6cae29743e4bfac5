"""The replay service of a learner that was started by hand: the one at `replay.url`, or one of its own.

In: the configuration. Out: an address. A service started here is a child that ends with the learner, whatever ends that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from async_search_rl.config import Config
from async_search_rl.errors import DeadlineError, EngineError
from async_search_rl.launch import pieces
from async_search_rl.launch.process import LocalProcess
from async_search_rl.replay.serve import URL_FILE

_LOOK_S = 0.1


@contextmanager
def replay_address(config: Config) -> Iterator[str]:
    """Address of the replay service, which runs for as long as the block does.

    Raises:
        EngineError: when a service started here ends before it is ready.
        DeadlineError: when it is not ready within `launch.start_timeout_s`.
    """
    if config.replay.url:
        yield config.replay.url
        return
    folder = config.run.folder
    announced = folder / URL_FILE
    before = announced.stat().st_mtime_ns if announced.exists() else 0
    pieces.write_config(config)
    process = LocalProcess(pieces.replay(config), folder / "logs" / "replay.log")
    try:
        ends_at = time.monotonic() + config.launch.start_timeout_s
        while not announced.exists() or announced.stat().st_mtime_ns == before:
            if process.poll() is not None:
                raise EngineError(f"the replay service ended before it was ready: {process.error_line()}")
            if time.monotonic() > ends_at:
                raise DeadlineError(f"the replay service was not ready within {config.launch.start_timeout_s:g} s")
            time.sleep(_LOOK_S)
        yield announced.read_text(encoding="ascii").strip()
    finally:
        _end(process, config.launch.stop_timeout_s)


def _end(process: LocalProcess, timeout_s: float) -> None:
    process.stop()
    ends_at = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < ends_at:
        time.sleep(_LOOK_S)
    process.kill()
