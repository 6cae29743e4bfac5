"""Checksum of a flat tensor's bytes: the same value on every device, without copying the tensor off it.

The bytes are read as rows of 32-bit words. Each row gives the multilinear hash ``sum_i key_i * word_i mod 2**64`` with fixed
pseudo-random 64-bit keys (Lemire and Kaser, "Strongly universal string hashing is fast", 2014); the row sums and the length then
go through BLAKE2b. Any change within a row that is independent of the keys goes unseen with probability at most 2**-33, and rows
cannot change places. It finds faults of memory, transport and bookkeeping; it is no signature.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import torch

ROW_WORDS = 1 << 15
_DEVICE_ROWS = 128
_SEED = 0x9E3779B97F4A7C15


def tensor_digest(flat: torch.Tensor) -> int:
    """Checksum of the bytes of ``flat`` (contiguous, any dtype and device), in ``[0, 2**63)``. Waits for the device.

    On the host it runs on the calling thread alone, so that a side thread takes no more than one core from the engine.
    """
    data = flat.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    n_bytes = data.numel()
    n_words = n_bytes // 4
    whole_rows = n_words // ROW_WORDS
    rows = data[: whole_rows * ROW_WORDS * 4].view(torch.int32).view(whole_rows, ROW_WORDS)
    sums = [_row_sums(rows)] if whole_rows else []
    rest = data[whole_rows * ROW_WORDS * 4 :]
    if rest.numel():
        padded = torch.zeros(ROW_WORDS * 4, dtype=torch.uint8, device=data.device)
        padded[: rest.numel()] = rest
        sums.append(_row_sums(padded.view(torch.int32).view(1, ROW_WORDS)))
    state = hashlib.blake2b(n_bytes.to_bytes(8, "little"), digest_size=8)
    for part in sums:
        state.update(part.tobytes())
    return int.from_bytes(state.digest(), "little") >> 1


def _row_sums(words_RK: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    return _row_sums_on_host(words_RK.numpy()) if words_RK.device.type == "cpu" else _row_sums_on_device(words_RK)


def _row_sums_on_host(words_RK: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    keys_K = _host_keys()
    return np.array([np.dot(row.astype(np.int64), keys_K) for row in words_RK], dtype="<i8")


def _row_sums_on_device(words_RK: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The same sums with torch, a few rows at a time to bound the 64-bit products held."""
    keys_K = _device_keys(str(words_RK.device))
    parts = [(part * keys_K).sum(1) for part in words_RK.split(_DEVICE_ROWS)]  # type: ignore[no-untyped-call]
    return torch.cat(parts).cpu().numpy().astype("<i8")


@functools.cache
def _host_keys() -> np.ndarray[Any, np.dtype[np.int64]]:
    """SplitMix64's first ``ROW_WORDS`` outputs, made odd so that no single changed word is lost."""
    z = (np.arange(1, ROW_WORDS + 1, dtype=np.uint64)) * np.uint64(_SEED)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


@functools.cache
def _device_keys(device: str) -> torch.Tensor:
    return torch.from_numpy(_host_keys().copy()).to(device)
