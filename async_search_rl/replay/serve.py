"""The replay service as a process: read the questions, recover the log, bind, announce the address, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from async_search_rl.config import Config
from async_search_rl.errors import ConfigError
from async_search_rl.files import writable
from async_search_rl.http import announce, listening, make_app, port_is_free, read_token, require_safe_bind, stop_signal
from async_search_rl.questions import read_questions
from async_search_rl.replay.core import Core, identity_of
from async_search_rl.replay.journal import Journal
from async_search_rl.replay.outcomes import Outcomes
from async_search_rl.replay.service import MESSAGE_OVERHEAD_BYTES, ReplayService

URL_FILE = "replay.url"
_STOP_TIMEOUT_S = 5.0


def serve(config: Config) -> None:
    """Serve the run of ``config`` until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: an unsafe bind, a busy port, a folder in use or used before with ``run.resume = "never"``, or a log of another
            run; the message names the key.
        DataError: a question file cannot be used.
        LogCorruptError: the log is damaged.
        OverloadedError: the log, or the files of an evaluation, cannot be written any more.
    """
    token = read_token(config.security)
    require_safe_bind(config.replay.host, token)
    folder = config.run.folder
    with _only_user_of(folder / "replay"):
        core, journal = load(config)
        try:
            asyncio.run(_serve(core, journal, folder, token))
        finally:
            journal.close()


def load(config: Config) -> tuple[Core, Journal]:
    """The recovered service of ``config``, without network."""
    if not config.data.train:
        raise ConfigError("data.train must name a question file, got ''")
    train = read_questions(config.data.train)
    evaluation = read_questions(config.data.eval)[: config.data.eval_questions] if config.data.eval else []
    identity = identity_of(config, train, evaluation)
    journal = Journal.open(config.run.folder / "replay", config.replay.segment_mib << 20, identity)
    if config.run.resume == "never" and journal.state.incarnation > 0:
        raise ConfigError(
            f"run.resume = 'never' needs a folder no learner has used, got {config.run.folder}: choose another run.name, or 'auto'"
        )
    return Core(config=config, train=train, evaluation=evaluation, state=journal.state, commit=journal.commit), journal


async def _serve(core: Core, journal: Journal, folder: Path, token: str | None) -> None:
    replay = core.config.replay
    service = ReplayService(core, journal, Outcomes(folder, core.config.logging.keep_trajectories))
    app = make_app(token, (replay.max_group_mib << 20) + MESSAGE_OVERHEAD_BYTES)
    service.add_routes(app)
    stop = stop_signal()
    async with listening(app, replay.host, _port(replay.host, replay.port, folder), token, _STOP_TIMEOUT_S) as url:
        announce(folder / URL_FILE, url)
        try:
            while not stop.is_set():
                await service.tick()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), min(1.0, replay.lease_s / 4))
        finally:
            service.close()


def _port(host: str, configured: int, folder: Path) -> int:
    """The port to bind: where any will do, the one announced before a restart if it is still free, so that clients find it."""
    before = folder / URL_FILE
    if configured or not before.exists():
        return configured
    port = before.read_text(encoding="ascii", errors="replace").strip().rpartition(":")[2]
    return int(port) if re.fullmatch("[0-9]{1,5}", port) and port_is_free(host, int(port)) else 0


@contextlib.contextmanager
def _only_user_of(folder: Path) -> Iterator[None]:
    with writable(folder):
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another replay service already uses {folder}: run.name must differ, or that one must stop"
            ) from error
        yield
    finally:
        os.close(descriptor)
