"""Process groups of the weight channel: one broadcast root, outside every other group of the process.

``open_group`` meets the other members in the store and may wait until its deadline; ``start`` queues one bucket and returns a
``Transfer`` whose ``wait`` ends when the bucket may be read (a member) or overwritten (the sender). A group is used by one thread,
save for ``abort``, which any thread may call. After an error or an abort it is of no further use.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from async_search_rl.errors import DeadlineError, WeightSyncError
from async_search_rl.weights.rendezvous import connect_store, group_prefix
from async_search_rl.weights.schema import Transport

SENDER_RANK = 0
_POLL_S = 0.0005
_NCCL_TIMEOUT_S = 86400.0
"""Torch's own time limit of an operation, far beyond any deadline here: its watchdog is to leave the operations alone."""
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
}
"""Read when a ProcessGroupNCCL is made. Its own answer to a silent member is to end the process; here the group is aborted. Only
with a blocking ``wait`` is the error of a broken operation raised at all; it is called when the operation has ended, so it blocks
nobody."""
_environment_lock = threading.Lock()


class Transfer(Protocol):
    """One bucket on its way."""

    def wait(self) -> None:
        """Return when this side is done with the bucket; raise :class:`WeightSyncError` or :class:`DeadlineError`."""


class BroadcastGroup(Protocol):
    """A group whose rank 0 broadcasts."""

    def start(self, flat: torch.Tensor, timeout_s: float) -> Transfer:
        """Queue the broadcast of one flat tensor, which must be alive and untouched until the transfer's ``wait`` returns."""

    def abort(self) -> None:
        """Break off what is running, as far as the transport can; a gloo operation runs out at its own deadline."""


def open_group(
    transport: Transport, host: str, port: int, epoch: int, rank: int, world: int, device: torch.device, timeout_s: float
) -> BroadcastGroup:
    """Join the group of ``epoch`` as ``rank`` of ``world``; every member must call it within ``timeout_s`` seconds.

    Raises:
        WeightSyncError: the group cannot be built.
    """
    store = connect_store(host, port, timeout_s)
    prefixed = PrefixStore(group_prefix(epoch), store)
    try:
        if transport == "gloo":
            return GlooGroup(prefixed, rank, world, local_address(host, port), timeout_s)
        return NcclGroup(prefixed, rank, world, device)
    except RuntimeError as error:
        raise WeightSyncError(f"group of epoch {epoch} (rank {rank} of {world}, {transport}) cannot be built: {error}") from error


def local_address(host: str, port: int) -> str:
    """The address of this machine by which packets to ``host`` leave; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class GlooGroup:
    """Broadcast between host tensors over TCP."""

    def __init__(self, store: PrefixStore, rank: int, world: int, address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        self._group = ProcessGroupGloo(store, rank, world, options)

    def start(self, flat: torch.Tensor, timeout_s: float) -> Transfer:
        """Queue one host tensor."""
        work = self._group.broadcast([flat], _from_sender(timeout_s))  # type: ignore[attr-defined]
        return _GlooTransfer(work, flat)

    def abort(self) -> None:
        """Nothing can be broken off: each operation carries its own deadline."""


class _GlooTransfer:
    def __init__(self, work: Any, flat: torch.Tensor) -> None:
        self._work = work
        self._flat = flat

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"broadcast over gloo failed: {error}") from error


class NcclGroup:
    """Broadcast between GPUs with a communicator and a stream of its own.

    Where the engine has tensor-parallel communicators on the same device, two communicators run side by side: NCCL allows it as
    long as every rank issues each one's operations in the same order, which holds here, for this group carries broadcasts only.
    The communicator itself is built by the first ``start``, where all members meet.
    """

    def __init__(self, store: PrefixStore, rank: int, world: int, device: torch.device) -> None:
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=_NCCL_TIMEOUT_S)
        with _nccl_environment():
            self._group = ProcessGroupNCCL(store, rank, world, options)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, flat: torch.Tensor, timeout_s: float) -> Transfer:
        """Queue one device tensor whose earlier writes are complete."""
        with torch.cuda.stream(self._stream):
            work = self._group.broadcast([flat], _from_sender(_NCCL_TIMEOUT_S))  # type: ignore[attr-defined]
        return _NcclTransfer(work, flat, time.monotonic() + timeout_s)

    def abort(self) -> None:
        """Abort the communicator: running operations end, their tensors hold nothing of worth."""
        self._group.abort()


class _NcclTransfer:
    def __init__(self, work: Any, flat: torch.Tensor, ends_at: float) -> None:
        self._work = work
        self._flat = flat
        self._ends_at = ends_at

    def wait(self) -> None:
        while not self._work.is_completed():
            if time.monotonic() > self._ends_at:
                raise DeadlineError("broadcast over nccl did not end by its deadline")
            time.sleep(_POLL_S)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise WeightSyncError(f"broadcast over nccl failed: {error}") from error


def _from_sender(timeout_s: float) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank = SENDER_RANK
    options.rootTensor = 0
    options.timeout = datetime.timedelta(seconds=max(timeout_s, 0.001))
    return options


@contextlib.contextmanager
def _nccl_environment() -> Iterator[None]:
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _NCCL_ENVIRONMENT}
        os.environ.update(_NCCL_ENVIRONMENT)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
