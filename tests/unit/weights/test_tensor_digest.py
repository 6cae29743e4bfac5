"""The checksum: equal on both code paths, and any change of the bytes changes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_search_rl.codec import decode, encode
from async_search_rl.weights import digest as digest_module
from async_search_rl.weights.digest import ROW_WORDS, tensor_digest

ROW_BYTES = 4 * ROW_WORDS
PINNED = 190576055689722249


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def test_the_value_is_pinned() -> None:
    assert tensor_digest(torch.arange(100_000, dtype=torch.int32)) == PINNED


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3 * ROW_BYTES), st.data())
def test_a_flipped_bit_anywhere_is_seen(count: int, data: st.DataObject) -> None:
    original = random_bytes(count + 1)
    changed = original.clone()
    changed[data.draw(st.integers(0, count))] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_digest(changed) != tensor_digest(original)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2 * ROW_WORDS - 1), st.integers(0, 2 * ROW_WORDS - 1))
def test_sign_flips_in_two_numbers_are_seen(i: int, j: int) -> None:
    numbers = torch.ones(2 * ROW_WORDS)
    before = tensor_digest(numbers)
    numbers[i] *= -1
    numbers[j] *= -1
    assert (tensor_digest(numbers) == before) == (i == j)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (5, 20_000), (3, ROW_WORDS + 3), (0, 2 * ROW_WORDS)])
def test_exchanged_words_are_seen(first: int, second: int) -> None:
    words = torch.arange(2 * ROW_WORDS + 10, dtype=torch.int32)
    before = tensor_digest(words)
    words[first], words[second] = int(words[second]), int(words[first])
    assert tensor_digest(words) != before


def test_exchanged_rows_are_seen() -> None:
    data = random_bytes(2 * ROW_BYTES)
    assert tensor_digest(torch.cat([data[ROW_BYTES:], data[:ROW_BYTES]])) != tensor_digest(data)


@pytest.mark.parametrize("count", [0, 1, 4, ROW_BYTES - 1, ROW_BYTES])
def test_zeros_at_the_end_are_seen(count: int) -> None:
    assert tensor_digest(torch.zeros(count + 1, dtype=torch.uint8)) != tensor_digest(torch.zeros(count, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
def test_only_the_bytes_count(dtype: torch.dtype) -> None:
    data = random_bytes(8 * 5000)
    assert tensor_digest(data.view(dtype)) == tensor_digest(data)


def test_unaligned_views_are_read_right() -> None:
    data = random_bytes(3 * ROW_BYTES)
    assert tensor_digest(data[1:1001]) == tensor_digest(data[1:1001].clone())


@pytest.mark.parametrize("rows", [1, 3, 130])
def test_both_code_paths_give_the_same_sums(rows: int) -> None:
    words_RK = random_bytes(rows * ROW_BYTES, seed=rows).view(torch.int32).view(rows, ROW_WORDS)
    on_host = digest_module._row_sums_on_host(words_RK.numpy())
    assert (on_host == digest_module._row_sums_on_device(words_RK)).all()


def test_the_value_travels_in_the_wire_format() -> None:
    values = [tensor_digest(random_bytes(100, seed)) for seed in range(50)]
    assert all(0 <= value < 2**63 for value in values)
    assert decode(encode(values)) == values
