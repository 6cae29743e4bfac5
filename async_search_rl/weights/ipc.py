"""Staged buckets shared between processes on one GPU, by CUDA IPC handles that travel as plain bytes.

A handle is the list of fields that torch itself hands to another process, in the wire format of :mod:`async_search_rl.codec`:
integers, booleans and bytes, never a pickle. The memory belongs to the sender; who opens a handle must be done with it before the
sender may write again.
"""

from __future__ import annotations

from typing import Any

import torch

from async_search_rl import codec
from async_search_rl.errors import SchemaError

_FIELD_TYPES = (int, bytes, int, int, bytes, int, bytes, bool)
_MAX_HANDLE_BYTES = 4096


def export_handle(flat: torch.Tensor) -> bytes:
    """A handle to a CUDA tensor that fills its storage; its writes must be complete. Valid as long as the storage lives."""
    fields = flat.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return codec.encode(list(fields))


def open_handle(handle: bytes, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The flat tensor behind a handle. Copy it, then drop it.

    ``device``: this process's name of the same GPU, with its index.

    Raises:
        SchemaError: the handle is not one of :func:`export_handle`.
    """
    fields = codec.decode(handle, _MAX_HANDLE_BYTES)
    _require_fields(fields)
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *fields[1:])
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (storage.nbytes() // size,), (1,))


def _require_fields(fields: Any) -> None:
    if not isinstance(fields, list) or [type(field) for field in fields] != list(_FIELD_TYPES):
        raise SchemaError(f"an IPC handle must be a list of {[kind.__name__ for kind in _FIELD_TYPES]}, got another structure")
