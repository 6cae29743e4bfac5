"""What a member answers before and without a group; with one it is tested between real processes."""

from __future__ import annotations

import pytest

from async_search_rl.codec import encode_message
from async_search_rl.errors import SchemaError, WeightSyncError
from async_search_rl.weights.ipc import open_handle
from async_search_rl.weights.member import WeightMember
from async_search_rl.weights.schema import Ack, Offer


def offer(world: int = 2, deadline_s: float = 5.0) -> bytes:
    return encode_message(
        Offer(
            version=1,
            epoch=1,
            store_host="127.0.0.1",
            store_port=1,
            first_rank=1,
            world=world,
            transport="gloo",
            buckets=(),
            deadline_s=deadline_s,
        )
    )


def test_nothing_is_taken_before_it_is_ready() -> None:
    member = WeightMember()
    assert member.state() == "idle"
    with pytest.raises(WeightSyncError, match="got state 'idle'"):
        member.take()


@pytest.mark.parametrize(("data", "worker"), [(encode_message(Ack()), 0), (b"\x80\x04K\x01.", 0), (offer(), 1), (offer(), -1)])
def test_anything_but_an_offer_with_this_rank_is_refused(data: bytes, worker: int) -> None:
    member = WeightMember()
    with pytest.raises(SchemaError):
        member.begin(data, worker)
    assert member.state() == "idle"


def test_an_aborted_reception_stays_failed() -> None:
    member = WeightMember()
    member.begin(offer())
    member.abort()
    assert member.state() == "failed: aborted by the receiver"
    assert member.version == 1
    member.close()
    assert member.state() == "idle"


def test_a_forged_handle_is_refused_before_the_device_sees_it() -> None:
    import torch

    from async_search_rl.codec import encode

    for fields in ({"a": 1}, [0, b"x"], [0, "x", 1, 0, b"", 0, b"", True]):
        with pytest.raises(SchemaError, match="IPC handle must be"):
            open_handle(encode(fields), torch.float32, torch.device("cpu"))
