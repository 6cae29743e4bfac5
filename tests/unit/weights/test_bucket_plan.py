"""The bucket plan: everything once, in order, of one dtype, within the size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.errors import WeightSyncError
from async_search_rl.weights.plan import ITEM_BYTES, plan_buckets, tensor_bytes
from async_search_rl.weights.schema import TensorSpec


@st.composite
def named_specs(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=40))
    dtypes = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])
    return [TensorSpec(name=f"p{i}", shape=tuple(shape), dtype=draw(dtypes)) for i, shape in enumerate(shapes)]


@given(named_specs(), st.integers(1, 5000))
def test_every_parameter_stands_in_one_bucket_of_its_dtype(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = plan_buckets(specs, bucket_bytes)
    assert sorted(spec.name for bucket in plan for spec in bucket) == sorted(spec.name for spec in specs)
    for dtype in {spec.dtype for spec in specs}:
        of_dtype = [bucket for bucket in plan if bucket[0].dtype == dtype]
        assert [spec for bucket in of_dtype for spec in bucket] == [spec for spec in specs if spec.dtype == dtype]
    assert all(len({spec.dtype for spec in bucket}) == 1 for bucket in plan)


@given(named_specs(), st.integers(1, 5000))
def test_only_a_lone_parameter_may_exceed_the_size(specs: list[TensorSpec], bucket_bytes: int) -> None:
    for bucket in plan_buckets(specs, bucket_bytes):
        assert bucket
        weighty = [spec for spec in bucket if spec.numel]
        assert sum(map(tensor_bytes, bucket)) <= bucket_bytes or len(weighty) == 1


@given(named_specs(), st.integers(1, 5000))
def test_neighbouring_buckets_of_a_dtype_would_not_fit_together(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = plan_buckets(specs, bucket_bytes)
    for dtype in ITEM_BYTES:
        of_dtype = [bucket for bucket in plan if bucket[0].dtype == dtype]
        for left, right in itertools.pairwise(of_dtype):
            assert sum(map(tensor_bytes, left)) + tensor_bytes(right[0]) > bucket_bytes


def test_scalars_have_one_element() -> None:
    assert tensor_bytes(TensorSpec(name="scale", shape=(), dtype="float32")) == 4


@pytest.mark.parametrize(
    ("specs", "bucket_bytes", "message"),
    [
        ([TensorSpec(name="a", shape=(1,), dtype="float32")] * 2, 8, "unique, got 'a' twice"),
        ([TensorSpec(name="a", shape=(1,), dtype="complex64")], 8, "got 'complex64'"),
        ([TensorSpec(name="a", shape=(-1,), dtype="float32")], 8, "must be >= 0"),
        ([], 0, "bucket_bytes must be > 0, got 0"),
    ],
)
def test_impossible_plans_are_refused(specs: list[TensorSpec], bucket_bytes: int, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        plan_buckets(specs, bucket_bytes)
