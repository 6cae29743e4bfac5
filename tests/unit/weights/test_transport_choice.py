"""Who is reached how, and who shares a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.errors import SchemaError
from async_search_rl.weights.transport import Member, choose_transport, plan_groups


@pytest.mark.parametrize(
    ("sender", "devices", "transport"),
    [
        ("cpu", ("cpu",), "gloo"),
        ("cpu", ("cuda-1",), "gloo"),
        ("cuda-0", ("cpu",), "gloo"),
        ("cuda-0", ("cuda-0",), "ipc"),
        ("cuda-0", ("cuda-1",), "nccl"),
        ("cuda-0", ("cuda-1", "cuda-2"), "nccl"),
        ("cuda-0", ("cuda-0", "cuda-1"), "gloo"),
        ("cuda-0", ("cuda-1", "cuda-0"), "gloo"),
    ],
)
def test_auto_follows_where_the_two_sides_are(sender: str, devices: tuple[str, ...], transport: str) -> None:
    assert choose_transport("auto", sender, devices) == transport


@pytest.mark.parametrize(
    ("setting", "sender", "devices"),
    [
        ("nccl", "cpu", ("cuda-0",)),
        ("nccl", "cuda-0", ("cuda-0",)),
        ("ipc", "cuda-0", ("cuda-1",)),
        ("ipc", "cuda-0", ("cuda-0", "cuda-1")),
        ("ipc", "cpu", ("cpu",)),
    ],
)
def test_a_transport_that_cannot_join_the_two_is_refused(setting: str, sender: str, devices: tuple[str, ...]) -> None:
    with pytest.raises(SchemaError, match=f"'{setting}' must"):
        choose_transport(setting, sender, devices)  # type: ignore[arg-type]


def test_gloo_reaches_any_device_when_asked_for() -> None:
    assert choose_transport("gloo", "cuda-0", ("cuda-0",)) == "gloo"


DEVICE_SETS = st.lists(st.sampled_from(["cpu", "cuda-0", "cuda-1", "cuda-2"]), min_size=1, max_size=2, unique=True)


@given(st.lists(st.tuples(DEVICE_SETS, st.booleans()), max_size=10), st.sampled_from(["cpu", "cuda-0"]))
def test_groups_serve_everyone_once_and_no_device_twice(raw: list[tuple[list[str], bool]], sender: str) -> None:
    members = [Member(f"r{i}", tuple(devices), None, suspect) for i, (devices, suspect) in enumerate(raw)]
    groups = plan_groups("auto", sender, members)
    assert sorted(m.name for g in groups for m in g.members) == sorted(m.name for m in members)
    for group in groups:
        devices = [device for member in group.members for device in member.devices]
        if group.transport == "nccl":
            assert len(set(devices)) == len(devices)
            assert sender not in devices
        if group.transport == "ipc":
            assert devices == [sender]
        if any(member.suspect for member in group.members):
            assert len(group.members) == 1
    assert plan_groups("auto", sender, members[::-1]) == groups


def test_several_engines_on_one_device_make_several_nccl_groups() -> None:
    members = [Member(f"r{i}", (f"cuda-{1 + i % 2}",), None) for i in range(5)]
    groups = plan_groups("auto", "cuda-0", members)
    assert [[m.name for m in g.members] for g in groups] == [["r0", "r1"], ["r2", "r3"], ["r4"]]
