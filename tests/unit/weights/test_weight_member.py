"""What a member answers before and without a group; with one it is tested between real processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from async_search_rl.codec import encode_message
from async_search_rl.errors import SchemaError, WeightSyncError
from async_search_rl.weights import member as member_module
from async_search_rl.weights.ipc import open_handle
from async_search_rl.weights.member import WeightMember
from async_search_rl.weights.rendezvous import Rendezvous, serve_store
from async_search_rl.weights.schema import Ack, Bucket, Offer, TensorSpec

BUCKETS = (Bucket(tensors=(TensorSpec(name="a", shape=(4,), dtype="float32"),)),)
PATIENCE_S = 20.0


def offer(world: int = 2, deadline_s: float = 5.0, store_port: int = 1, buckets: tuple[Bucket, ...] = ()) -> bytes:
    return encode_message(
        Offer(
            version=1,
            epoch=1,
            store_host="127.0.0.1",
            store_port=store_port,
            first_rank=1,
            world=world,
            transport="gloo",
            buckets=buckets,
            deadline_s=deadline_s,
        )
    )


def end_of_threads() -> None:
    """Wait until no reception runs any more."""
    ends_at = time.monotonic() + PATIENCE_S
    while running := [t for t in threading.enumerate() if t.name in ("weights-member", "weights-receive")]:
        running[0].join(max(0.0, ends_at - time.monotonic()))
        assert time.monotonic() < ends_at, "every reception must end"


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


def test_a_reception_aborted_while_it_waits_for_go_enters_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    joined = threading.Event()

    def join(rendezvous: Rendezvous, rank: int) -> None:
        joined.set()

    def enter(*place: Any) -> Any:
        entered.append(place)
        raise WeightSyncError("there is no such group any more")

    monkeypatch.setattr(Rendezvous, "join", join)
    monkeypatch.setattr(member_module, "open_group", enter)
    store = serve_store("127.0.0.1")
    member = WeightMember()
    member.begin(offer(store_port=store.port, buckets=BUCKETS))
    assert joined.wait(PATIENCE_S)
    member.abort()
    end_of_threads()
    assert entered == []
    assert member.state() == "failed: aborted by the receiver"


def test_a_reception_aborted_while_it_connects_takes_no_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = []
    connecting, connected = threading.Event(), threading.Event()
    store = serve_store("127.0.0.1")

    def connect(host: str, port: int, timeout_s: float) -> Any:
        connecting.set()
        assert connected.wait(PATIENCE_S)
        return store

    def allocate(buckets: Any, device: torch.device) -> list[torch.Tensor]:
        allocated.append(device)
        return [torch.zeros(4)]

    monkeypatch.setattr(member_module, "connect_store", connect)
    monkeypatch.setattr(member_module, "allocate", allocate)
    member = WeightMember()
    member.begin(offer(store_port=store.port, buckets=BUCKETS))
    assert connecting.wait(PATIENCE_S)
    member.abort()
    connected.set()
    end_of_threads()
    assert allocated == []


def test_a_forged_handle_is_refused_before_the_device_sees_it() -> None:
    from async_search_rl.codec import encode

    for fields in ({"a": 1}, [0, b"x"], [0, "x", 1, 0, b"", 0, b"", True]):
        with pytest.raises(SchemaError, match="IPC handle must be"):
            open_handle(encode(fields), torch.float32, torch.device("cpu"))
