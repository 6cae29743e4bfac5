"""Which parameters travel together: a bucket plan from names, shapes and dtypes. Pure; no torch.

In: the parameters in the order in which the trainer gathers them. Out: buckets of one dtype and bounded size, in which every
parameter stands exactly once, whole. Sender and receivers never plan apart: the plan travels in the offer.
"""

from __future__ import annotations

from collections.abc import Iterable

from async_search_rl.errors import WeightSyncError
from async_search_rl.weights.schema import TensorSpec

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch dtype name: the dtypes that may travel."""


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of one parameter.

    Raises:
        WeightSyncError: the dtype cannot travel, or a size is negative.
    """
    if spec.dtype not in ITEM_BYTES:
        raise WeightSyncError(f"dtype of {spec.name} must be one of {sorted(ITEM_BYTES)}, got {spec.dtype!r}")
    if any(size < 0 for size in spec.shape):
        raise WeightSyncError(f"sizes of {spec.name} must be >= 0, got {spec.shape}")
    return spec.numel * ITEM_BYTES[spec.dtype]


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Buckets of one dtype and at most ``bucket_bytes`` bytes; a parameter larger than that has a bucket to itself.

    Within a dtype the order of ``specs`` is kept. One bucket a dtype is open at a time, so a trainer that writes in this order
    never comes back to a full bucket.

    Raises:
        WeightSyncError: a name comes twice, a dtype cannot travel, or ``bucket_bytes`` is not positive.
    """
    if bucket_bytes <= 0:
        raise WeightSyncError(f"bucket_bytes must be > 0, got {bucket_bytes}")
    full: list[list[TensorSpec]] = []
    open_buckets: dict[str, tuple[list[TensorSpec], int]] = {}
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise WeightSyncError(f"parameter names must be unique, got {spec.name!r} twice")
        names.add(spec.name)
        size = tensor_bytes(spec)
        bucket, held = open_buckets.get(spec.dtype, ([], 0))
        if bucket and held + size > bucket_bytes:
            full.append(bucket)
            bucket, held = [], 0
        bucket.append(spec)
        open_buckets[spec.dtype] = (bucket, held + size)
    return full + [bucket for bucket, _ in open_buckets.values()]
