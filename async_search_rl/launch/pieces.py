"""What a run consists of: the four entrypoints with their arguments, and the configuration file they share.

In: the configuration. Out: :class:`Piece` values for whichever placement starts them. Children read `<run folder>/config.toml`, the
effective configuration, into which the addresses of the services are filled once they are known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from async_search_rl.config import Config, to_toml
from async_search_rl.errors import ConfigError
from async_search_rl.files import writable, write_whole
from async_search_rl.http import is_loopback
from async_search_rl.launch.process import Piece

BIN = Path(__file__).resolve().parents[2] / "bin"
STOP_ORDER = ("actor", "learner", "search", "replay")
"""Kinds of pieces in the order in which a run ends: nobody loses the service it is still using."""

_RESUME = ("--set", "run.resume=auto")


def config_path(config: Config) -> Path:
    """The effective configuration of the run."""
    return config.run.folder / "config.toml"


def write_config(config: Config) -> None:
    """Write the effective configuration, whole or not at all.

    Raises:
        ConfigError: the run's folder cannot be written.
    """
    path = config_path(config)
    with writable(path.parent):
        write_whole(path, to_toml(config).encode())


def with_service(config: Config, section: str, url: str) -> Config:
    """``config`` with the address of `replay` or `retrieval`, port included, so that a restart binds the same one."""
    changed = msgspec.structs.replace(getattr(config, section), url=url, port=urlsplit(url).port or 0)
    return msgspec.structs.replace(config, **{section: changed})


def with_hosts(config: Config, hosts: Mapping[str, str]) -> Config:
    """``config`` for pieces on several machines: each of `search`, `replay` and `learner` binds its own of ``hosts``.

    Addresses that were already set to something other than loopback stay.
    """
    changes = {}
    for piece, section in (("search", "retrieval"), ("replay", "replay"), ("learner", "weights")):
        if piece in hosts and is_loopback(getattr(config, section).host):
            changes[section] = msgspec.structs.replace(getattr(config, section), host=hosts[piece])
    return msgspec.structs.replace(config, **changes)


def search(config: Config) -> Piece:
    """The retrieval service."""
    return Piece(name="search", argv=_entrypoint("search", config), cpus=2)


def replay(config: Config) -> Piece:
    """The replay service. A restart rebuilds its state from the trajectory log."""
    return Piece(name="replay", argv=_entrypoint("replay", config), restart_argv=_RESUME)


def learner(config: Config) -> Piece:
    """The learner, under torchrun with several ranks. A restart resumes from its newest checkpoint."""
    launch = config.launch
    env = {"OMP_NUM_THREADS": str(launch.learner_threads)} if launch.learner_threads else {}
    if launch.learner_devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.learner_devices))
    argv = _entrypoint("learner", config)
    if launch.learner_ranks > 1:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.learner_ranks}")
        argv = (argv[0], *torchrun, *argv[1:])
    return Piece(
        name="learner",
        argv=argv,
        env=env,
        restart_argv=_RESUME,
        gpus=launch.learner_ranks,
        cpus=launch.learner_ranks * max(1, launch.learner_threads),
    )


def actors(config: Config) -> list[Piece]:
    """The actor supervisors, one a node."""
    generator, nodes = config.generator, config.launch.actor_nodes
    return [
        Piece(
            name="actor" if nodes == 1 else f"actor-{i}",
            argv=_entrypoint("actor", config),
            gpus=generator.processes * generator.tensor_parallel,
            cpus=generator.processes * max(1, generator.threads),
        )
        for i in range(nodes)
    ]


def stop_order(names: list[str]) -> list[str]:
    """``names`` of running pieces in the order in which they are to end."""
    return sorted(names, key=lambda name: STOP_ORDER.index(name.partition("-")[0]))


def _entrypoint(name: str, config: Config) -> tuple[str, ...]:
    path = BIN / name
    if not path.is_file():
        raise ConfigError(f"bin/launch must run from a source checkout with {path.name} in its bin folder, got no {path}")
    return (sys.executable, str(path), str(config_path(config)))
