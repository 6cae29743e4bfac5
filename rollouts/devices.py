"""Which devices and threads each generator process of a node gets. Needs no torch: the answer is an environment.

In: the generator section and what the machine shows. Out: variables for each process: engines take the devices in turn, so
with more engines than devices several share one.
"""

from __future__ import annotations

import os
from pathlib import Path

from async_search_rl.config.rollout import GeneratorSection
from async_search_rl.errors import ConfigError

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def visible_devices(generator: GeneratorSection) -> list[str]:
    """Devices the engines of this node may use: ``generator.devices``, else ``CUDA_VISIBLE_DEVICES``, else all; none on a CPU."""
    if generator.devices:
        return [str(device) for device in generator.devices]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device.strip() for device in named.split(",") if device.strip()]
    return [str(i) for i in range(len(list(_NVIDIA.iterdir())))] if _NVIDIA.is_dir() else []


def assign(generator: GeneratorSection, devices: list[str], cores: int) -> list[dict[str, str]]:
    """The environment of each of ``generator.processes`` processes on a node with ``devices`` and ``cores``.

    Raises:
        ConfigError: one engine spans more devices than there are.
    """
    width = generator.tensor_parallel
    if not devices:
        share = max(1, (cores - 1) // generator.processes)
        alone = generator.processes == 1 or generator.threads
        return [{} if alone else {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(share)}] * generator.processes
    if width > len(devices):
        raise ConfigError(f"generator.tensor_parallel must be <= {len(devices)} (devices of this node), got {width}")
    whole = len(devices) // width
    sets = [",".join(devices[i * width : (i + 1) * width]) for i in range(whole)]
    return [{"CUDA_VISIBLE_DEVICES": sets[i % whole]} for i in range(generator.processes)]


def start_after_s(generator: GeneratorSection, environments: list[dict[str, str]]) -> list[float]:
    """Seconds after which each process starts: engines that share a device (or the CPU) one after the other."""
    seen: dict[str, int] = {}
    delays = []
    for environment in environments:
        place = environment.get("CUDA_VISIBLE_DEVICES", "cpu")
        delays.append(seen.get(place, 0) * generator.start_stagger_s)
        seen[place] = seen.get(place, 0) + 1
    return delays
