"""Placement over a Ray cluster: every piece runs under a Ray actor that Ray places, one placement group holding them all.

In: a running cluster, and a folder that all its nodes see under the same path (the run's folder, this checkout, model and data).
Out: handles like those of local processes; each call to one is a call to its Ray actor. A request that the cluster cannot meet
would wait for ever: here it ends at `launch.start_timeout_s` with what was asked for and what there is, and soon after a signal.
When the launcher dies, Ray ends the actors, and with each its guard and all below it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_search_rl.config import Config
from async_search_rl.errors import ConfigError, DeadlineError, EngineError
from async_search_rl.http import is_loopback
from async_search_rl.launch import pieces
from async_search_rl.launch.process import Handle, LocalProcess, Piece
from async_search_rl.launch.supervise import Interrupts

LOST = 255
"""Exit status of a process whose Ray actor or node is gone."""

_CALL_TIMEOUT_S = 5.0
_LOOK_S = 1.0
"""Seconds between two looks for a signal during a long wait."""


class Runner:
    """Lives in a Ray worker and keeps one process there. Its methods are those of a handle."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    def start(self, piece: Piece, log: str, restart: bool) -> None:
        """Start ``piece`` on this worker's node."""
        self._process = LocalProcess(piece, Path(log), restart=restart)

    def poll(self) -> int | None:
        """Exit status; :data:`LOST` where this runner was itself restarted and so lost its process."""
        return LOST if self._process is None else self._process.poll()

    def call(self, name: str) -> Any:
        """A method of the process, without arguments; nothing where there is none."""
        return None if self._process is None else getattr(self._process, name)()


class RayProcess:
    """A :class:`~async_search_rl.launch.process.Handle` of a process that a runner keeps."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._code: int | None = None

    def poll(self) -> int | None:
        """See :class:`Handle`. A node that does not answer in time counts as running until Ray gives it up."""
        if self._code is None:
            self._code = _ask(self._runner.poll.remote(), lost=LOST, late=None)
        return self._code

    def stop(self) -> None:
        """SIGTERM to the process."""
        _ask(self._runner.call.remote("stop"))

    def kill(self) -> None:
        """SIGKILL to the process and all its descendants."""
        _ask(self._runner.call.remote("kill"))

    def error_line(self) -> str:
        """See :class:`Handle`."""
        return _ask(self._runner.call.remote("error_line"), lost="its node or Ray worker was lost", late="no answer") or "no output"

    def cpu_s(self) -> float:
        """See :class:`Handle`."""
        return _ask(self._runner.call.remote("cpu_s"), lost=0.0, late=0.0) or 0.0


class RayStarter:
    """A :class:`~async_search_rl.launch.supervise.Starter` for a Ray cluster. Each of its waits ends when ``interrupts`` counts.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at `launch.ray_address`.
    """

    def __init__(self, config: Config, logs: Path, interrupts: Interrupts) -> None:
        self._launch, self._logs, self._interrupts = config.launch, logs.absolute(), interrupts
        self._wanted = {piece.name: _bundle(piece, gpus=config.launch.ray_gpus) for piece in _all_pieces(config)}
        self._runners: dict[str, Any] = {}
        self._group: Any = None
        _connect(config.launch.ray_address)

    async def prepare(self, config: Config) -> Config:
        """Reserve a place for every piece; on several nodes each service binds the address of the node it is to be on.

        Raises:
            DeadlineError: the cluster had no room for the whole run in time.
            RunInterruptedError: a signal came.
        """
        import ray

        await self._reserve()
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        if len(nodes) == 1:
            return config
        places = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return pieces.with_hosts(config, {name: nodes[places[i]] for i, name in enumerate(self._wanted)})

    async def start(self, piece: Piece, restart: bool) -> Handle:
        """Start ``piece`` where its share of the placement group is; after :meth:`prepare`.

        Raises:
            DeadlineError: Ray did not start its actor in time.
            EngineError: the Ray actor could not start the process.
            RunInterruptedError: a signal came.
        """
        import ray

        if restart and await self._is_gone(piece.name):
            del self._runners[piece.name]
        if piece.name not in self._runners:
            self._runners[piece.name] = self._new_runner(piece.name)
        runner = self._runners[piece.name]
        started = runner.start.remote(piece, str(self._logs / f"{piece.name}.log"), restart)
        if not await self._is_done(started):
            raise DeadlineError(f"{piece.name} must be started by Ray within {self._launch.start_timeout_s:g} s")
        try:
            ray.get(started, timeout=_CALL_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise EngineError(f"{piece.name} cannot be started by Ray: {str(error).strip().splitlines()[-1]}") from error
        return RayProcess(runner)

    async def close(self) -> None:
        """End the runners, give the placement group back, leave the cluster."""
        import ray

        for runner in self._runners.values():
            ray.kill(runner)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()

    async def _reserve(self) -> None:
        import ray

        self._group = ray.util.placement_group(list(self._wanted.values()), strategy="PACK")
        if await self._is_done(self._group.ready()):
            return
        cpus, gpus = (ray.cluster_resources().get(name, 0.0) for name in ("CPU", "GPU"))
        raise DeadlineError(
            f"the Ray cluster must have room for the run within {self._launch.start_timeout_s:g} s (launch.start_timeout_s): asked "
            f"for {_total(self._wanted)}, it has {cpus:g} CPU and {gpus:g} GPU in all"
        )

    async def _is_done(self, reference: Any) -> bool:
        """Whether the task behind ``reference`` ended, well or not, within the start timeout.

        Raises:
            RunInterruptedError: a signal came first.
        """
        import ray

        ends_at = time.monotonic() + self._launch.start_timeout_s
        while (left_s := ends_at - time.monotonic()) > 0:
            self._interrupts.check()
            done, _ = await asyncio.to_thread(ray.wait, [reference], timeout=min(left_s, _LOOK_S))
            if done:
                return True
        return False

    def _new_runner(self, name: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._wanted[name]
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=list(self._wanted).index(name))
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": self._launch.restart_limit}
        return ray.remote(Runner).options(scheduling_strategy=place, **options).remote()

    async def _is_gone(self, name: str) -> bool:
        """Whether Ray has given the runner up, its own restarts included."""
        import ray

        asked = self._runners[name].poll.remote()
        if not await self._is_done(asked):
            return True
        try:
            ray.get(asked, timeout=_CALL_TIMEOUT_S)
        except ray.exceptions.RayError:
            return True
        return False


def _connect(address: str) -> None:
    """Join the cluster.

    Ray itself tries a dead address for minutes and then exits, so the port is tried first. And it replaces a loopback address by
    another one of the machine, where a cluster on loopback does not listen, unless a variable that it reads on import is 0.
    """
    if is_loopback(address.rpartition(":")[0]):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("launch.placement = 'ray' needs Ray: pip install 'async-search-rl[ray]'") from error
    wanted = f"launch.ray_address must be that of a running Ray cluster, got {address!r}"
    found = _known_cluster() if address == "auto" else address
    host, _, port = found.rpartition(":")
    if not port.isdigit():
        raise ConfigError(f"{wanted}: {'no cluster runs on this machine' if address == 'auto' else 'it must be HOST:PORT'}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CALL_TIMEOUT_S).close()
        ray.init(address=found, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{wanted}: {str(error).splitlines()[0]}") from error


def _known_cluster() -> str:
    """The address in RAY_ADDRESS, or that of the cluster which `ray start` last began on this machine; empty if there is none."""
    noted = Path("/tmp/ray/ray_current_cluster")
    return os.environ.get("RAY_ADDRESS", "") or (noted.read_text(encoding="utf-8").strip() if noted.is_file() else "")


def _all_pieces(config: Config) -> list[Piece]:
    services = [pieces.search(config)] if config.launch.start_search and not config.retrieval.url else []
    services += [] if config.replay.url else [pieces.replay(config)]
    return [*services, pieces.learner(config), *pieces.actors(config)]


def _bundle(piece: Piece, *, gpus: bool) -> dict[str, float]:
    return {"CPU": piece.cpus, "GPU": piece.gpus} if gpus and piece.gpus else {"CPU": piece.cpus}


def _total(bundles: Mapping[str, Mapping[str, float]]) -> str:
    cpus, gpus = (sum(bundle.get(name, 0) for bundle in bundles.values()) for name in ("CPU", "GPU"))
    return f"{cpus:g} CPU and {gpus:g} GPU in {len(bundles)} pieces"


def _ask(reference: Any, *, lost: Any = None, late: Any = None) -> Any:
    """The result of a call to a runner; ``lost`` where the runner is gone, ``late`` where it does not answer in time."""
    import ray

    try:
        return ray.get(reference, timeout=_CALL_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        return late
    except ray.exceptions.RayError:
        return lost
