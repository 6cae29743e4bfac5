"""Trajectories and groups refuse whatever would mislead the learner; the codec brings back exactly what was sent."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from async_search_rl.codec import SCHEMA_VERSION, decode, decode_group, decode_message, encode, encode_group, encode_message
from async_search_rl.errors import SchemaError, TooLargeError
from async_search_rl.replay.schema import LeaseReply, LeaseRequest, Policy, Running
from async_search_rl.trajectory import Group, PassageRecord, Trajectory, Turn
from async_search_rl.version import PolicyVersion, lag


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "token_ids": np.arange(6, dtype=np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 0, 1], dtype=bool),
        "behaviour_logprobs": np.array([0, 0, -1, -2, 0, -0.5], dtype=np.float32),
        "versions": np.array([-1, -1, 7, 7, -1, 8], dtype=np.int64),
        "prompt_length": 2,
        "turns": (
            Turn(start=2, end=4, action="search", query="q", passages=(PassageRecord(id="1", title="t", text="é", score=1.5),)),
            Turn(start=5, end=6, action="answer"),
        ),
        "reward": 1.0,
        "reward_parts": {"exact_match": 1.0},
        "outcome": "answered",
        "answer": "x",
    }
    return Trajectory(**{**fields, **changes})


def group(*members: Trajectory, **changes: Any) -> Group:
    fields: dict[str, Any] = {"ticket": 3, "attempt": 1, "question_id": "nq-1", "actor": "a0"}
    return Group(**{**fields, "trajectories": members or (trajectory(),), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.arange(6, dtype=np.int64)}, "token_ids must be int32"),
        ({"token_ids": np.arange(-1, 5, dtype=np.int32)}, "token_ids must be >= 0"),
        ({"loss_mask": np.zeros(5, dtype=bool)}, "loss_mask must be as long as token_ids"),
        ({"loss_mask": np.array([0, 0, 1, 1, 1, 1], dtype=bool)}, "must be 0 where nothing was sampled|versions must be|loss_mask"),
        ({"loss_mask": np.array([0, 0, 1, 0, 0, 1], dtype=bool)}, "behaviour_logprobs must be 0 where nothing was sampled"),
        ({"behaviour_logprobs": np.array([0, 0, -1, np.nan, 0, -1], dtype=np.float32)}, "behaviour_logprobs must be finite"),
        ({"behaviour_logprobs": np.array([0, 0, -1, 0.5, 0, -1], dtype=np.float32)}, "behaviour_logprobs must be <= 0"),
        ({"versions": np.array([-1, -1, -1, 7, -1, 8], dtype=np.int64)}, "versions must be >= 0 on sampled tokens"),
        ({"versions": np.array([-1, 4, 7, 7, -1, 8], dtype=np.int64)}, "versions must be -1 elsewhere"),
        ({"prompt_length": 0}, r"prompt_length must be in \[1, 6\]"),
        ({"prompt_length": 3}, r"turns\[0\] must lie in"),
        ({"turns": (Turn(start=2, end=4, action="search", query="q"),)}, "loss_mask must be true exactly on the turns' tokens"),
        ({"turns": (Turn(start=2, end=4, action="search"), Turn(start=5, end=6, action="answer"))}, "query goes with a search"),
        ({"outcome": "won"}, "outcome must be one of"),
        ({"reward": None}, "reward must be None exactly for a fault"),
        ({"reward": float("nan")}, "reward must be finite"),
        ({"reward_parts": {"f1": float("nan")}}, "reward_parts must be finite"),
        ({"seconds": float("inf")}, "seconds must be finite and >= 0"),
        ({"seconds": -1.0}, "seconds must be finite and >= 0"),
        ({"outcome": "fault", "reward": None}, "fault must be set exactly"),
    ],
)
def test_a_trajectory_refuses_what_breaks_its_invariants(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        trajectory(**changes)


def test_arrays_of_a_trajectory_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        trajectory().token_ids[0] = 5


def test_a_group_knows_its_valid_members_and_oldest_version() -> None:
    fault = trajectory(
        reward=None, outcome="fault", fault="search failed", versions=np.array([-1, -1, 1, 1, -1, 1], dtype=np.int64)
    )
    g = group(trajectory(), fault, trajectory(reward=0.0))
    assert g.valid_G.tolist() == [True, False, True]
    assert np.isnan(g.rewards_G[1])
    assert g.oldest_version == PolicyVersion(0, 7)
    assert g.lag(9) == 2
    assert not g.uniform
    assert group(trajectory(), fault).uniform


def test_lag_looks_at_steps_whatever_the_incarnation() -> None:
    newer = PolicyVersion(2, 3)
    assert newer.pack() > PolicyVersion(1, 9).pack()
    assert PolicyVersion.unpack(newer.pack()) == newer
    assert lag(5, PolicyVersion(1, 9).pack()) == 0
    assert lag(5, newer.pack()) == 2


def test_a_group_survives_the_wire_bit_for_bit() -> None:
    data = encode_group(group(trajectory(), trajectory(reward=0.0)))
    assert encode_group(decode_group(data)) == data
    copy = decode_group(data).trajectories[0]
    assert copy.turns == trajectory().turns
    assert copy.versions.tolist() == trajectory().versions.tolist()


@pytest.mark.parametrize("field", ["ticket", "trajectories", "actor"])
def test_a_missing_field_is_named(field: str) -> None:
    tree = decode(encode_group(group()))
    del tree[field]
    with pytest.raises(SchemaError, match=field):
        decode_group(encode(tree))


def test_a_bad_member_is_named_with_its_index_and_field() -> None:
    tree = decode(encode_group(group(trajectory(), trajectory())))
    tree["trajectories"][1]["prompt_length"] = 99
    with pytest.raises(SchemaError, match=r"trajectories\[1\].prompt_length"):
        decode_group(encode(tree))
    tree["trajectories"][1]["token_ids"] = [1, 2]
    with pytest.raises(SchemaError, match=r"trajectories\[1\].token_ids must be an array, got list"):
        decode_group(encode(tree))


def test_messages_are_typed_and_name_the_wrong_field() -> None:
    request = LeaseRequest(
        actor="a", running=[Running(ticket=1, attempt=1)], want=2, want_evaluations=0, wait_s=1.0, gauges={"x": 1.0}
    )
    assert decode_message(encode_message(request), LeaseRequest) == request
    reply = LeaseReply(policy=Policy(version=PolicyVersion(1, 2).pack(), weights_url="http://127.0.0.1:1"))
    assert decode_message(encode_message(reply), LeaseReply) == reply
    with pytest.raises(SchemaError, match="want"):
        decode_message(encode({"actor": "a", "running": [], "want": "2", "want_evaluations": 0, "wait_s": 1.0}), LeaseRequest)


def test_an_array_in_the_place_of_a_map_is_refused() -> None:
    request = {"actor": "a", "running": [np.zeros(1)], "want": 2, "want_evaluations": 0, "wait_s": 1.0}
    for body in (np.zeros(1), request):
        with pytest.raises(SchemaError, match="LeaseRequest: maps must not be arrays"):
            decode_message(encode(body), LeaseRequest)
    with pytest.raises(SchemaError, match="group: maps must not be arrays"):
        decode_group(encode(np.zeros(1)))


def test_what_has_no_place_on_the_wire_is_refused_when_sent() -> None:
    for bad in ({"x": object()}, {"x": np.array(["a"])}, {"x": np.zeros(2, dtype=np.complex64)}, {"x": {1, 2}}):
        with pytest.raises(SchemaError, match="cannot be encoded"):
            encode(bad)


def test_size_and_schema_version_are_checked_before_anything_else() -> None:
    with pytest.raises(TooLargeError, match="must be <= 10 bytes"):
        decode(b"\x00" * 11, max_bytes=10)
    with pytest.raises(SchemaError, match="schema must be 1, got 2"):
        decode(msgpack.packb({"schema": SCHEMA_VERSION + 1, "body": 1}))


def test_arrays_with_a_lying_header_are_refused() -> None:
    def message(*header: Any) -> bytes:
        return msgpack.packb({"schema": SCHEMA_VERSION, "body": msgpack.ExtType(1, msgpack.packb(list(header)))})

    for header in (
        ("<i4", [3], b"\0" * 8),
        ("|O8", [1], b"\0" * 8),
        ("<i4", [-1], b""),
        ("<i4", [1 << 62, 4], b""),
        ("<i4", "x", b""),
        ("|b1", [2], b"\1\2"),
    ):
        with pytest.raises(SchemaError, match="array"):
            decode(message(*header))
    with pytest.raises(SchemaError, match="extension type"):
        decode(msgpack.packb({"schema": SCHEMA_VERSION, "body": msgpack.ExtType(7, b"")}))


TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
ARRAYS = st.sampled_from([np.bool_, np.int32, np.int64, np.float32, np.float64, np.uint8]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@given(TREES)
def test_any_tree_comes_back_equal(tree: Any) -> None:
    assert decode(encode(tree)) == tree


@given(ARRAYS)
def test_any_array_comes_back_with_its_dtype_shape_and_bytes(array: np.ndarray) -> None:
    copy = decode(encode({"a": array}))["a"]
    assert copy.dtype == array.dtype
    assert copy.shape == array.shape
    assert copy.tobytes() == array.tobytes()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_schema_error_or_a_tree(data: bytes) -> None:
    try:
        tree = decode(data)
    except SchemaError:
        return
    assert decode(encode(tree)) == tree
