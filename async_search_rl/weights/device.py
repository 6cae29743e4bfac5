"""A device's name, by which sender and receivers recognise that they share it, and a stream of its own for a side thread."""

from __future__ import annotations

import torch

from async_search_rl.weights.transport import CPU


def resolve_device(device: torch.device | str) -> torch.device:
    """The device with its index: ``"cuda"`` is the process's current GPU."""
    place = torch.device(device)
    index: int | None = place.index
    if place.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def device_name(device: torch.device | str) -> str:
    """``"cpu"``, or the GPU's unique id: equal in every process that uses it, whatever is visible there, and on no other host."""
    place = torch.device(device)
    if place.type == "cpu":
        return CPU
    properties = torch.cuda.get_device_properties(place)
    return f"{place.type}-{properties.uuid}"


def use_side_stream(device: torch.device) -> None:
    """Let the calling thread's work on a GPU run beside that of the thread which trains or generates, not behind it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
