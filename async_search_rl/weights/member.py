"""One engine worker's half of the receiver: joins the group, stages the buckets on a side thread, checks them, hands them over.

Lives in the engine's worker process, has no event loop, and is driven by calls that return at once: ``begin`` with an encoded
offer, ``state`` until ``"ready"``, ``take`` for the tensors. The engine goes on generating meanwhile. A transfer that hangs is left
behind on its own thread together with its tensors, never waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from async_search_rl.codec import decode_message
from async_search_rl.errors import SchemaError, SearchRLError, WeightSyncError
from async_search_rl.weights.device import resolve_device, use_side_stream
from async_search_rl.weights.digest import tensor_digest
from async_search_rl.weights.groups import BroadcastGroup, Transfer, open_group
from async_search_rl.weights.ipc import open_handle
from async_search_rl.weights.rendezvous import Rendezvous, connect_store
from async_search_rl.weights.schema import Bucket, Offer
from async_search_rl.weights.staging import allocate, tensor_views

_log = logging.getLogger(__name__)

_POLL_S = 0.01
_BEAT_S = 1.0
_ABORT_CHECK_S = 0.1
_STORE_TIMEOUT_S = 30.0


@dataclass(eq=False)
class _Reception:
    """One publication being received. ``error`` is final once set; ``complete`` only without one."""

    offer: Offer
    rank: int
    ends_at: float
    flats: list[torch.Tensor] = field(default_factory=list)
    received: threading.Event = field(default_factory=threading.Event)
    landed: int = 0
    complete: bool = False
    error: str = ""

    def left_s(self) -> float:
        return max(0.05, self.ends_at - time.monotonic())

    def failed(self) -> bool:
        """Asked anew each time, for any thread may let it fail."""
        return bool(self.error)


class WeightMember:
    """Receives publications for one worker.

    ``device``: the worker's. ``staging``: where received weights wait for the swap, beside the model on the ``"device"``, or in
    ``"host"`` memory where the device has no room.
    """

    def __init__(self, device: torch.device | str = "cpu", staging: Literal["device", "host"] = "device") -> None:
        self._device = resolve_device(device)
        self._staging = torch.device("cpu") if staging == "host" else self._device
        self._group: tuple[tuple[str, int, int], BroadcastGroup] | None = None
        self._buckets: tuple[tuple[int, str], ...] = ()
        self._flats: list[torch.Tensor] = []
        self._reception: _Reception | None = None

    def begin(self, offer: bytes, worker: int = 0) -> None:
        """Start to receive an encoded :class:`Offer` as the receiver's ``worker``-th worker (its tensor-parallel rank).

        What was being received before is abandoned.

        Raises:
            SchemaError: the bytes are not an offer, or its group has no such rank.
        """
        message = decode_message(offer, Offer)
        rank = message.first_rank + worker
        if not 0 < rank < message.world:
            raise SchemaError(f"rank must be 1 to {message.world - 1} in this offer, got {rank}")
        self._abandon("a newer offer came")
        reception = _Reception(message, rank, time.monotonic() + message.deadline_s)
        self._reception = reception
        threading.Thread(target=self._supervise, args=(reception,), name="weights-member", daemon=True).start()

    def state(self) -> str:
        """``"idle"``, ``"receiving"``, ``"ready"``, or ``"failed: why"``."""
        reception = self._reception
        if reception is None:
            return "idle"
        if reception.error:
            return f"failed: {reception.error}"
        return "ready" if reception.complete else "receiving"

    @property
    def version(self) -> int | None:
        """Packed version that is being received or ready."""
        return None if self._reception is None else self._reception.offer.version

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """The received parameters: name in the transformers checkpoint, and a view that the next ``begin`` overwrites.

        Raises:
            WeightSyncError: nothing is ready.
        """
        reception = self._reception
        if reception is None or not reception.complete or reception.error:
            raise WeightSyncError(f"weights must be ready before they are taken, got state {self.state()!r}")
        self._reception = None
        return [(spec.name, view) for spec, view in tensor_views(reception.offer.buckets, reception.flats)]

    def abort(self) -> None:
        """Give up what is being received; returns at once. The staging tensors and the group of a running transfer are let go."""
        self._abandon("aborted by the receiver")

    def close(self) -> None:
        """Give up, and leave the group."""
        self.abort()
        self._drop_group()
        self._flats, self._buckets, self._reception = [], (), None

    def _abandon(self, reason: str) -> None:
        reception = self._reception
        if reception is not None and not reception.complete and not reception.error:
            self._fail(reception, reason)

    def _fail(self, reception: _Reception, reason: str) -> None:
        """The one way to fail: the first reason stays, and nothing of a transfer that may still run is used again."""
        if not reception.error:
            reception.error = reason
        if reception is self._reception:
            self._flats, self._buckets = [], ()
            self._drop_group()

    def _drop_group(self) -> None:
        if self._group is not None:
            _, group = self._group
            self._group = None
            threading.Thread(target=group.abort, name="weights-abort", daemon=True).start()

    def _supervise(self, reception: _Reception) -> None:
        """Join, wait for go, then watch over the receiving thread: beat, look for the sender's abort, keep the deadline."""
        try:
            offer = reception.offer
            store = connect_store(offer.store_host, offer.store_port, min(_STORE_TIMEOUT_S, reception.left_s()))
            if reception.failed():
                return
            rendezvous = Rendezvous(store, offer.epoch, offer.version)
            reception.flats = self._reusable_flats(offer.buckets)
            rendezvous.join(reception.rank)
            if offer.transport != "ipc":
                self._watch(reception, rendezvous, rendezvous.may_go)
            # Asked again with the staging tensors in hand: those of a failed reception may be the next one's by now.
            if reception.failed():
                return
            threading.Thread(target=self._receive, args=(reception,), name="weights-receive", daemon=True).start()
            self._watch(reception, rendezvous, reception.received.is_set)
            if not reception.error:
                reception.complete = True
        except (SearchRLError, RuntimeError) as error:
            self._fail(reception, str(error))

    def _watch(self, reception: _Reception, rendezvous: Rendezvous, finished: Callable[[], bool]) -> None:
        """Poll until ``finished`` or the reception failed.

        Raises:
            WeightSyncError: the sender gave up, or the deadline passed.
        """
        next_beat = next_check = 0.0
        told = reception.landed
        while not finished() and not reception.error:
            now = time.monotonic()
            if now >= next_beat or reception.landed != told:
                told = reception.landed
                rendezvous.beat(reception.rank, told)
                next_beat = now + _BEAT_S
            if now >= next_check:
                if reason := rendezvous.aborted():
                    raise WeightSyncError(f"the sender gave up: {reason}")
                next_check = now + _ABORT_CHECK_S
            if now > reception.ends_at:
                raise WeightSyncError(f"the publication must arrive within {reception.offer.deadline_s:g} s, it did not")
            reception.received.wait(_POLL_S)

    def _receive(self, reception: _Reception) -> None:
        """The receiving thread. Errors of any kind end as the reception's error, for there is nobody above to raise to."""
        try:
            use_side_stream(self._device)
            if self._device.type == "cuda":
                # The staging tensors may lie where kernels that the engine has queued still read: freed blocks, or the last swap.
                torch.cuda.synchronize(self._device)
            if reception.offer.transport == "ipc":
                self._copy_shared(reception)
            else:
                self._receive_broadcast(reception, self._enter_group(reception))
        except Exception as error:
            _log.debug("receiving version %d failed", reception.offer.version, exc_info=True)
            self._fail(reception, str(error) if isinstance(error, SearchRLError) else f"{type(error).__name__}: {error}")
        finally:
            reception.received.set()

    def _enter_group(self, reception: _Reception) -> BroadcastGroup:
        """The group of the offer's epoch: the one that is open, or a new one, which waits for all members."""
        offer = reception.offer
        key = (offer.store_host, offer.store_port, offer.epoch)
        if reception.error:
            raise WeightSyncError(reception.error)
        if self._group is not None and self._group[0] == key:
            return self._group[1]
        self._drop_group()
        place = (offer.store_host, offer.store_port, offer.epoch, reception.rank, offer.world)
        group = open_group(offer.transport, *place, self._device, reception.left_s())
        if reception is self._reception and not reception.error:
            self._group = (key, group)
        return group

    def _receive_broadcast(self, reception: _Reception, group: BroadcastGroup) -> None:
        """Bucket by bucket; each is checked while the next one travels."""
        by_host = reception.offer.transport == "gloo"
        wire = torch.device("cpu") if by_host else self._device
        previous: tuple[Transfer, torch.Tensor, int] | None = None
        for index, flat in enumerate(reception.flats):
            landing = flat if flat.device.type == wire.type else torch.empty_like(flat, device=wire)
            transfer = group.start(landing, reception.left_s())
            if previous is not None:
                self._land(reception, *previous)
            previous = (transfer, landing, index)
        if previous is not None:
            self._land(reception, *previous)

    def _land(self, reception: _Reception, transfer: Transfer, landing: torch.Tensor, index: int) -> None:
        transfer.wait()
        flat = reception.flats[index]
        if landing is not flat:
            flat.copy_(landing)
        _require_digest(flat, reception.offer.buckets[index], index)
        reception.landed += 1

    def _copy_shared(self, reception: _Reception) -> None:
        """Copy each bucket out of the sender's memory; the copies are complete when their digests are."""
        offer = reception.offer
        for index, (flat, handle) in enumerate(zip(reception.flats, offer.handles, strict=True)):
            shared = open_handle(handle, flat.dtype, self._device)
            flat.copy_(shared)
            _require_digest(flat, offer.buckets[index], index)
            reception.landed += 1

    def _reusable_flats(self, buckets: tuple[Bucket, ...]) -> list[torch.Tensor]:
        """The staging tensors of the last publication if this one has the same buckets, else new ones."""
        layout = tuple((sum(spec.numel for spec in bucket.tensors), bucket.tensors[0].dtype) for bucket in buckets)
        if layout != self._buckets or not self._flats:
            self._flats = []
            self._flats = allocate(buckets, self._staging)
            self._buckets = layout
        return self._flats


def _require_digest(flat: torch.Tensor, bucket: Bucket, index: int) -> None:
    got = tensor_digest(flat)
    if got != bucket.digest:
        raise WeightSyncError(f"digest of bucket {index} ({bucket.tensors[0].name}, ...) must be {bucket.digest:x}, got {got:x}")
