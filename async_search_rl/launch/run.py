"""One run from start to end: `bin/launch`.

Search and replay come first; when both answer, their addresses go into the run's configuration file, and learner and actors start.
Then a look each second: restart what died, record a sample, redraw the table, until the learner has ended. Whatever happens, all
processes end in order, and the summary and the page are written from what was measured. The launcher waits for its children;
nobody waits for the launcher.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
from rich.console import Console

from async_search_rl.config import Config
from async_search_rl.errors import RunStoppedError, SearchRLError
from async_search_rl.http import announced_url, client_session, read_token
from async_search_rl.json_lines import JsonLines, JsonLinesTail, read_json_lines, surviving_steps
from async_search_rl.launch import observe, pieces
from async_search_rl.launch.local import LocalStarter
from async_search_rl.launch.report import RunReport, write_report
from async_search_rl.launch.screen import Screen
from async_search_rl.launch.supervise import Fleet, Interrupts, RunInterruptedError, Starter, fleet
from async_search_rl.launch.table import View
from async_search_rl.launch.timeline import last_seconds, sample, shares
from async_search_rl.replay.schema import Status

_TICK_S = 0.25
_SAMPLE_S = 1.0
_SAMPLES_BEFORE_THINNING = 1800
_WINDOW_S = 30.0
_LAST_STEPS = 10
_REQUEST_TIMEOUT_S = 5.0


async def launch(config: Config, started_at: float, console: Console) -> RunReport:
    """Run ``config`` to its end; ``started_at`` is ``time.monotonic()`` of the launch.

    Raises:
        SearchRLError: the run could not start or go on; one sentence says why. Nothing is left running.
        RunInterruptedError: Ctrl-C or SIGTERM ended it.
    """
    interrupts = Interrupts()
    launched = None
    outcome = "failed"
    with interrupts.caught(), Screen(console, config.logging.table_every_s) as screen:
        try:
            async with (
                _members(config, interrupts) as members,
                client_session(read_token(config.security), _REQUEST_TIMEOUT_S) as session,
            ):
                launched = Launch(config, members, session, screen, interrupts, started_at)
                try:
                    await launched.start_services()
                    await launched.start_workers()
                    await launched.watch()
                finally:
                    await launched.stop()
            outcome = "finished"
        except SearchRLError as error:
            outcome = "interrupted" if isinstance(error, RunInterruptedError) else str(error)
            raise
        finally:
            report = launched.report(outcome) if launched else None
    if report is None:
        raise RunStoppedError("the run ended before the replay service reported anything")
    return report


class Launch:
    """The state of one launch. Its methods are the steps of the story, in order."""

    def __init__(
        self,
        config: Config,
        members: Fleet,
        session: aiohttp.ClientSession,
        screen: Screen,
        interrupts: Interrupts,
        started_at: float,
    ) -> None:
        self._config, self._members, self._session = config, members, session
        self._screen, self._interrupts, self._started_at = screen, interrupts, started_at
        self._folder = config.run.folder
        self._status: Status | None = None
        self._incarnation_before = 0
        self._recent: deque[dict[str, object]] = deque(maxlen=int(2 * _WINDOW_S / _SAMPLE_S))
        self._learner_file = JsonLinesTail(self._folder / "metrics" / "learner.jsonl")
        self._learner_steps = surviving_steps(self._learner_file.new())
        self._notes: deque[str] = deque(maxlen=3)
        self._progress_at = self._sampled_at = self._written_at = time.monotonic()
        self._phase = "starting"
        timeline = self._folder / "metrics" / "timeline.jsonl"
        self._recorded_s = max((row.get("t", 0.0) for row in read_json_lines(timeline)), default=0.0)
        self._timeline = JsonLines(timeline)
        self._as_asked = config

    async def start_services(self) -> None:
        """Start search and replay, wait until both answer, and write their addresses into the configuration."""
        self._show("finding places for the run's processes")
        config = self._config = await self._members.prepare(self._config)
        within_s = config.launch.start_timeout_s
        for name in ("search", "replay"):
            (self._folder / f"{name}.url").unlink(missing_ok=True)
        pieces.write_config(config)
        starts_search = config.launch.start_search and not config.retrieval.url
        starts_replay = not config.replay.url
        self._show("starting the search and replay services")
        if starts_search:
            await self._members.start(pieces.search(config), within_s)
        if starts_replay:
            await self._members.start(pieces.replay(config), within_s)
        if starts_replay:
            self._config = pieces.with_service(self._config, "replay", await self._service("replay", "/health"))
        if starts_search:
            self._config = pieces.with_service(self._config, "retrieval", await self._service("search", "/ready"))
        pieces.write_config(self._config)

    async def start_workers(self) -> None:
        """Start the learner and the actors; they become ready while they are watched."""
        self._show("starting the learner and the actors: models and engines are loading")
        status = await observe.status(self._session, self._config.replay.url)
        self._incarnation_before = status.incarnation if status else 0
        for piece in (pieces.learner(self._config), *pieces.actors(self._config)):
            await self._members.start(piece, self._config.launch.start_timeout_s)

    async def watch(self) -> None:
        """Look after everything until the learner has ended with success.

        Raises:
            RunStoppedError: the replay service says that the run must stop, or the learner ended before its last step.
        """
        while self._members.exit_code("learner") != 0:
            self._interrupts.check()
            await self._observe(now=self._members.has_dead())
            if self._status is not None and self._status.state == "stopped":
                raise RunStoppedError(self._status.stop or "the replay service stopped the run without a reason")
            for note in await self._members.mend(finished=self._finished()):
                self._notes.append(note)
                self._screen.note(f"warning: {note}")
            if self._members.all_ready():
                self._phase = ""
            self._show()
            await asyncio.sleep(_TICK_S)
        await self._observe(now=True)
        if self._status is None or self._status.step < self._config.run.max_steps:
            raise RunStoppedError(f"the learner must reach step {self._config.run.max_steps}, got its end before that")

    async def stop(self) -> None:
        """End all pieces, in order, after a last look; in order also where that fails."""
        try:
            if self._config.replay.url:
                await self._observe(now=True)
        finally:
            self._timeline.close()
            self._show("stopping; Ctrl-C again ends everything at once")
            await self._members.stop(pieces.stop_order(list(self._members.pieces)))

    def report(self, outcome: str) -> RunReport | None:
        """Write the summary and the page; ``None`` where nothing was measured."""
        if self._status is None:
            return None
        wall_s = time.monotonic() - self._started_at
        return write_report(self._as_asked, self._status, outcome=outcome, wall_s=wall_s, restarts=self._members.restarts)

    async def _service(self, name: str, path: str) -> str:
        async def is_ready() -> bool:
            url = announced_url(self._folder / f"{name}.url")
            return url is not None and await observe.answers(self._session, url + path)

        await self._members.await_ready(name, is_ready)
        url = announced_url(self._folder / f"{name}.url")
        assert url is not None, "a ready service has announced its address"
        return url

    async def _observe(self, *, now: bool = False) -> None:
        """Take a sample if it is time to, or ``now``. In the file they grow sparser, and go on where an earlier launch ended."""
        at = time.monotonic()
        if not now and at - self._sampled_at < _SAMPLE_S:
            return
        self._sampled_at = at
        status = await observe.status(self._session, self._config.replay.url)
        if status is None:
            return
        url = self._config.retrieval.url.partition(",")[0]
        search = await observe.search_metrics(self._session, url) if url else {}
        self._take(status, at)
        t_s = self._recorded_s + at - self._started_at
        row = sample(t_s, status, search, self._members.cpu_s())
        self._recent.append(row)
        if now or at - self._written_at >= t_s / _SAMPLES_BEFORE_THINNING:
            self._timeline.write(row)
            self._written_at = at

    def _take(self, status: Status, at: float) -> None:
        """Remember ``status``, what is new in it, and which pieces it shows to be ready."""
        before, self._status = self._status, status
        if before is None or status.step != before.step or status.counters != before.counters:
            self._progress_at = at
        if new := self._learner_file.new():
            self._learner_steps = surviving_steps([*self._learner_steps, *new])
        if status.incarnation > self._incarnation_before:
            self._members.ready("learner")
        if observe.nodes(status) >= self._config.launch.actor_nodes:
            for name in self._members.pieces:
                if name.startswith("actor"):
                    self._members.ready(name)

    def _finished(self) -> list[str]:
        """Pieces that may end without being restarted."""
        over = self._status is not None and self._status.state == "finished"
        names = [name for name in self._members.pieces if over and name.startswith("actor") and self._members.exit_code(name) == 0]
        return [*names, *(["learner"] if self._members.exit_code("learner") == 0 else [])]

    def _show(self, phase: str = "", *, now: bool = False) -> None:
        self._phase = phase or self._phase
        self._screen.show(self._view(self._phase), now=now or bool(phase))

    def _view(self, phase: str) -> View:
        run, steps = self._config.run, self._learner_steps
        known = self._status.learner if self._status else {}
        return View(
            name=run.name,
            max_steps=run.max_steps,
            max_staleness=self._config.replay.max_staleness,
            elapsed_s=time.monotonic() - self._started_at,
            phase=phase,
            status=self._status,
            learner=known | {name: value for name, value in (steps[-1] if steps else {}).items() if isinstance(value, int | float)},
            shares=shares(last_seconds(list(self._recent), _WINDOW_S), steps[-_LAST_STEPS:]),
            rewards=[step["reward_mean"] for step in steps if step.get("reward_mean") is not None],
            exact_matches=[step["exact_match"] for step in steps if step.get("exact_match") is not None],
            waits=self._waits(),
            notes=list(self._notes),
        )

    def _waits(self) -> list[str]:
        """Who waits for whom, once nothing has moved for a while."""
        silent_s = time.monotonic() - self._progress_at
        bound_s = self._config.launch.idle_warning_s
        if self._status is None or not bound_s or silent_s < bound_s:
            return []
        waits = [f"no progress for {silent_s:.0f} s"]
        if self._status.waiting_for:
            waits.append(f"the learner waits: {self._status.waiting_for}")
        if not self._status.actors:
            waits.append("no actor is live")
        return waits


def _members(config: Config, interrupts: Interrupts) -> AbstractAsyncContextManager[Fleet]:
    launch = config.launch
    return fleet(
        _starter(config, interrupts),
        interrupts,
        restart_limit=launch.restart_limit,
        restart_window_s=launch.restart_window_s,
        stop_timeout_s=launch.stop_timeout_s,
    )


def _starter(config: Config, interrupts: Interrupts) -> Starter:
    logs = Path(config.run.folder) / "logs"
    if config.launch.placement == "ray":
        from async_search_rl.launch.ray import RayStarter

        return RayStarter(config, logs, interrupts)
    return LocalStarter(logs)
