"""Control messages of the weight channel (:mod:`async_search_rl.codec` bodies) and the manifest of a publication.

The learner's first rank runs the sender; each generator process has a receiver, with one *member* of the process group for each
of its engine's workers (tensor-parallel ranks). Every member receives the full weights and keeps its shard.

    POST /offer    OfferRequest   -> OfferReply    long poll: the newest staged version that the receiver does not have
    POST /received ReceivedRequest -> Ack          all workers of the receiver hold the whole publication, digest checked (or not)
    GET  /status                                   members, epoch, queue, seconds of the last publications
"""

from __future__ import annotations

from typing import Literal

import msgspec

Transport = Literal["gloo", "nccl", "ipc"]
STAGED_COPIES = 2
"""Copies of the weights that the sender holds at most: the one being sent and the one that is queued."""


class WeightMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all control messages."""


class TensorSpec(WeightMessage, frozen=True):
    """One parameter: its name in the transformers checkpoint, shape, and torch dtype name (``"bfloat16"``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n


class Bucket(WeightMessage, frozen=True):
    """Parameters of one dtype that travel as one flat tensor, in order; ``digest`` is the checksum of that tensor's bytes."""

    tensors: tuple[TensorSpec, ...]
    digest: int = 0


class OfferRequest(WeightMessage, frozen=True):
    """``have``: packed version that is loaded or being received, ``None`` for none. ``workers``: members it brings.

    ``device``: what its engine runs on, by which the transport is chosen: ``"cpu"``, or the GPU's name
    (:func:`async_search_rl.weights.device.device_name`), one for all workers or, with commas, one for each.
    ``epoch``: the epoch of the group that its workers hold open, ``None`` for none; only a group that all hold open is reused.
    """

    receiver: str
    have: int | None
    workers: int
    device: str
    wait_s: float
    epoch: int | None = None


class Offer(WeightMessage, frozen=True):
    """One publication, as it concerns one receiver.

    Its workers take the ranks ``first_rank ... first_rank + workers - 1`` of a group of ``world`` members that meets at
    ``store_host:store_port`` under the prefix ``epoch``; rank 0 is the sender. A new epoch is a new group.
    ``handles``: for ``ipc``, one shared-memory handle a bucket.
    """

    version: int
    epoch: int
    store_host: str
    store_port: int
    first_rank: int
    world: int
    transport: Transport
    buckets: tuple[Bucket, ...]
    deadline_s: float
    handles: tuple[bytes, ...] = ()


class OfferReply(WeightMessage, frozen=True):
    """``offer`` is ``None`` when ``wait_s`` went by without news."""

    offer: Offer | None = None


class ReceivedRequest(WeightMessage, frozen=True):
    """``error`` is empty when every worker holds the whole publication with the right digests."""

    receiver: str
    version: int
    epoch: int
    error: str = ""


class Ack(WeightMessage, frozen=True):
    """Accepted."""
