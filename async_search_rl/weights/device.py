"""The name by which sender and receivers recognise that they use the same device."""

from __future__ import annotations

import torch

from async_search_rl.weights.transport import CPU


def device_name(device: torch.device | str) -> str:
    """``"cpu"``, or the GPU's unique id: equal in every process that uses it, whatever is visible there, and on no other host."""
    place = torch.device(device)
    if place.type == "cpu":
        return CPU
    properties = torch.cuda.get_device_properties(place)
    return f"{place.type}-{properties.uuid}"
