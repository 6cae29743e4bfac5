"""The learner's staged copies of the full weights: what is being sent, what waits, and what may be filled.

The learner's main thread fills a copy (the only thing it waits for); the broadcast thread computes digests and sends. There are
at most two copies: the current one, which is being sent or kept for late receivers, and one that is filled or queued.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import msgspec
import torch

from async_search_rl.errors import WeightSyncError
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.digest import tensor_digest
from async_search_rl.weights.schema import Bucket, TensorSpec

Plan = Sequence[Sequence[TensorSpec]]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name``.

    Raises:
        WeightSyncError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"dtype must be the name of a torch dtype, got {name!r}")
    return dtype


def allocate(buckets: Sequence[Bucket], device: torch.device) -> list[torch.Tensor]:
    """One flat tensor a bucket, each with a storage of its own."""
    return [torch.empty(sum(t.numel for t in b.tensors), dtype=torch_dtype(b.tensors[0].dtype), device=device) for b in buckets]


def tensor_views(buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Each parameter's spec and its view, shaped, into the flat tensors."""
    for bucket, flat in zip(buckets, flats, strict=True):
        pieces = flat.split([spec.numel for spec in bucket.tensors])  # type: ignore[no-untyped-call]
        for spec, piece in zip(bucket.tensors, pieces, strict=True):
            yield spec, piece.view(spec.shape)


class StagedWeights:
    """One copy of the full weights as flat bucket tensors, with its packed version.

    Filled by :meth:`write`, handed over by ``WeightSender.publish``, digested by :meth:`seal` on the broadcast thread.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.version = -1
        self.buckets = tuple(Bucket(tensors=tuple(specs)) for specs in plan if specs)
        self.flats = allocate(self.buckets, device)
        self.handles: tuple[bytes, ...] = ()
        self._views = {spec.name: view for spec, view in tensor_views(self.buckets, self.flats)}
        self._missing = set(self._views)
        self._written: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    @property
    def device(self) -> torch.device:
        """Where the buckets are."""
        return self.flats[0].device if self.flats else torch.device("cpu")

    def fits(self, plan: Plan) -> bool:
        """Whether this copy was allocated for ``plan``."""
        return [list(b.tensors) for b in self.buckets] == [list(specs) for specs in plan if specs]

    def reset(self, version: int) -> None:
        """Begin to fill this copy with ``version`` (packed)."""
        self.version = version
        self._missing = set(self._views)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one gathered parameter in, cast to the planned dtype. On a GPU the copy is queued on the current stream.

        Raises:
            WeightSyncError: the plan has no such name, or another shape.
        """
        view = self._views.get(name)
        if view is None:
            raise WeightSyncError(f"a written parameter must be in the bucket plan, got {name!r}")
        if view.shape != tensor.shape:
            raise WeightSyncError(f"shape of {name} must be {tuple(view.shape)} as planned, got {tuple(tensor.shape)}")
        view.copy_(tensor.detach(), non_blocking=True)
        self._missing.discard(name)

    def complete(self) -> None:
        """Note that the last write was queued.

        Raises:
            WeightSyncError: parameters of the plan were not written.
        """
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise WeightSyncError(f"all planned parameters must be written to publish, got all but {len(self._missing)}: {some}")
        if self.device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(self.device))

    def seal(self) -> None:
        """Wait for the writes and compute the digests (broadcast thread)."""
        if self._written is not None:
            self._written.synchronize()
        digests = [tensor_digest(flat) for flat in self.flats]
        self.buckets = tuple(msgspec.structs.replace(b, digest=digest) for b, digest in zip(self.buckets, digests, strict=True))


class StagingPool:
    """At most `STAGED_COPIES` copies and who holds them. ``changed`` guards the state and is notified when a copy is queued."""

    def __init__(self, changed: threading.Condition, device: torch.device) -> None:
        self._changed = changed
        self._device = device
        self.current: StagedWeights | None = None
        """Being sent, or kept for late receivers."""
        self.queued: StagedWeights | None = None
        """Published, not yet begun."""
        self._spare: StagedWeights | None = None
        self._newest = -1
        self.superseded = 0
        """Publications that a newer one replaced before they were begun."""

    def acquire(self, plan: Plan, version: int) -> StagedWeights:
        """The copy that is not being sent, to be filled with ``version``; a queued publication gives its copy up. Never blocks.

        Raises:
            WeightSyncError: ``version`` is not newer than the last one published.
        """
        with self._changed:
            if version <= self._newest:
                newest = PolicyVersion.unpack(self._newest)
                raise WeightSyncError(f"a published version must be newer than {newest}, got {PolicyVersion.unpack(version)}")
            if self.queued is not None:
                self._spare, self.queued = self.queued, None
                self.superseded += 1
            staged, self._spare = self._spare, None
        if staged is None or not staged.fits(plan):
            del staged
            staged = StagedWeights(plan, self._device)
        staged.reset(version)
        with self._changed:
            self._spare = staged
        return staged

    def submit(self, staged: StagedWeights) -> None:
        """Queue a filled copy.

        Raises:
            WeightSyncError: it did not come from :meth:`acquire`, or was not filled.
        """
        staged.complete()
        with self._changed:
            if staged is not self._spare:
                raise WeightSyncError("the published copy must be the last one that acquire_buffers gave, got another")
            self._spare, self.queued = None, staged
            self._newest = staged.version
            self._changed.notify_all()

    def advance(self) -> StagedWeights:
        """Make the queued copy the current one; the old current one may be filled next. The caller sends nothing meanwhile."""
        with self._changed:
            if self.queued is None:
                raise WeightSyncError("advance needs a queued publication, got none")
            self._spare, self.current, self.queued = self.current, self.queued, None
            return self.current

    def clear(self) -> None:
        """Let go of all copies."""
        with self._changed:
            self.current = self.queued = self._spare = None
