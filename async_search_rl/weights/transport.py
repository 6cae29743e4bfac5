"""Which transport reaches which receiver, and who shares a process group. Pure; no torch.

A device is named ``"cpu"``, or by its GPU's unique id, the same in every process that uses it
(:func:`async_search_rl.weights.device.device_name`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from async_search_rl.errors import SchemaError
from async_search_rl.weights.schema import Transport

CPU = "cpu"


class Member(NamedTuple):
    """One receiver as a publication sees it: its name, the device of each of its workers, and the epoch whose group it has open."""

    name: str
    devices: tuple[str, ...]
    epoch: int | None
    suspect: bool = False


class GroupPlan(NamedTuple):
    """Receivers that one broadcast serves."""

    transport: Transport
    members: tuple[Member, ...]


def choose_transport(setting: Literal["auto", "gloo", "nccl", "ipc"], sender: str, devices: tuple[str, ...]) -> Transport:
    """The transport from the sender's device to a receiver's workers.

    ``auto``: ``gloo`` where either side is a CPU; ``ipc`` where the only worker is on the sender's device; ``gloo`` through host
    memory where one of several is, for NCCL takes no device twice; ``nccl`` elsewhere.

    Raises:
        SchemaError: the setting cannot connect the two.
    """
    on_cpu = sender == CPU or CPU in devices
    shared = sender in devices
    if setting == "auto":
        if on_cpu or (shared and len(devices) > 1):
            return "gloo"
        return "ipc" if shared else "nccl"
    if setting != "gloo" and on_cpu:
        raise SchemaError(f"weights.transport {setting!r} must join GPUs, got {sender} and {', '.join(devices)}")
    if setting == "ipc" and devices != (sender,):
        raise SchemaError(f"weights.transport 'ipc' must stay on device {sender}, got {', '.join(devices)}")
    if setting == "nccl" and shared:
        raise SchemaError(f"weights.transport 'nccl' must join different devices, got {sender} on both sides")
    return setting


def plan_groups(setting: Literal["auto", "gloo", "nccl", "ipc"], sender: str, members: list[Member]) -> list[GroupPlan]:
    """The broadcasts of one publication: one ``gloo`` group, as many ``nccl`` groups as one device has engines, ``ipc`` one by one.

    A suspect (its last broadcast failed) is served alone, so that it can hold up nobody else. The order of ``members`` does not
    matter: equal sets give equal groups.
    """
    alone: list[GroupPlan] = []
    gloo: list[Member] = []
    nccl: list[list[Member]] = []
    for member in sorted(members, key=lambda m: m.name):
        transport = choose_transport(setting, sender, member.devices)
        if transport == "ipc" or member.suspect:
            alone.append(GroupPlan(transport, (member,)))
        elif transport == "gloo":
            gloo.append(member)
        else:
            free = next((g for g in nccl if not any(set(m.devices) & set(member.devices) for m in g)), None)
            if free is None:
                nccl.append([member])
            else:
                free.append(member)
    shared = [GroupPlan("gloo", tuple(gloo))] if gloo else []
    return shared + [GroupPlan("nccl", tuple(group)) for group in nccl] + alone
