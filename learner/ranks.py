"""The learner's ranks: one process a device, and the small collectives they need beside DeepSpeed's own.

In: the variables torchrun sets, or none for a single rank. Out: a :class:`Ranks`, through which rank 0 hands bytes to the others
and all of them agree on numbers. Host data travels over gloo, also where the devices talk NCCL. Every collective has the
deadline of the world; a rank that misses it ends the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from async_search_rl.errors import EngineError


@dataclass(frozen=True)
class Ranks:
    """This process among the learner's."""

    rank: int
    """0 .. world - 1; rank 0 talks to the replay service and the actors."""
    world: int
    """Processes."""
    device: torch.device
    """Where this rank computes."""
    hosts: Any
    """Process group for data in host memory."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Elementwise sum over ranks, float64, the same on every rank."""
        total = torch.from_numpy(np.array(values, dtype=np.float64))
        if self.world > 1:
            dist.all_reduce(total, group=self.hosts)
        return total.numpy()

    def sum_by_name(self, values: dict[str, float]) -> dict[str, float]:
        """Sum over ranks of each entry; every rank must bring the same names in the same order."""
        totals = self.sum(np.array(list(values.values()), dtype=np.float64))
        return dict(zip(values, totals.tolist(), strict=True))

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank."""
        return bool(self.sum(np.array([float(flag)]))[0] > 0)

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's ``data`` on every rank; the others pass ``None``."""
        if self.world == 1:
            assert data is not None
            return data
        size = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(size, 0, group=self.hosts)
        payload = torch.empty(int(size), dtype=torch.uint8)
        if data:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(payload, 0, group=self.hosts)
        return payload.numpy().tobytes()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier(group=self.hosts)

    def close(self) -> None:
        """Leave the world."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join_ranks(timeout_s: float) -> Ranks:
    """Join the world that torchrun describes, or be the only rank.

    Args:
        timeout_s: deadline of a collective; longer than the longest wait of rank 0 for a batch.

    Raises:
        EngineError: when the other ranks do not come.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    settings: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "device_id": device if cuda else None}
    try:
        if world > 1:
            dist.init_process_group(backend, **settings)
            hosts = dist.new_group(backend="gloo", timeout=settings["timeout"])
        else:
            hosts = _be_alone(backend, settings)
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"rank {rank} could not join the {world} ranks of the learner: {error}") from error
    return Ranks(rank, world, device, hosts)


def _be_alone(backend: str, settings: dict[str, Any]) -> Any:
    """A world of one, which needs no port and listens on the loopback interface only; its host group."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with _variable("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else None):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **settings)  # type: ignore[attr-defined]
        return dist.new_group(backend="gloo", timeout=settings["timeout"])


@contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """``name`` in the environment is ``value`` within the block; the weight channel chooses its interfaces itself."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
