"""The memory there is, and the plan that must fit into it, before a weight is loaded.

In: the configuration and the rank. Out: the plan's table, printed by rank 0, or a refusal.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from async_search_rl.config import Config
from async_search_rl.weights.schema import STAGED_COPIES
from learner.flops import ModelShape
from learner.loading import DTYPES, check_model_folder, read_model_config
from learner.memory_plan import GIB, plan_of_run
from learner.ranks import Ranks

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_memory(config: Config, ranks: Ranks) -> None:
    """Print what a rank will hold, and refuse what cannot fit.

    Raises:
        EngineError: naming what is too much and the keys that make it smaller.
        DataError: a model folder cannot be read.
    """
    shape = ModelShape.of(read_model_config(check_model_folder(config.model.path, "model.path")))
    critic = _shape_of_other(config.critic.path, "critic.path", needed=config.uses_critic)
    reference = _shape_of_other(config.model.reference_path, "model.reference_path", needed=config.algorithm.kl_coef > 0)
    dtype_bytes = DTYPES[config.model.dtype].itemsize
    staged = STAGED_COPIES * shape.parameters * dtype_bytes if ranks.first else 0
    on_cpu = ranks.device.type == "cpu"
    buffers = {"staged weights (rank 0)": (staged, 0)}
    plan = plan_of_run(config, shape, ranks=ranks.world, on_cpu=on_cpu, critic=critic, reference=reference, buffers=buffers)
    if ranks.first:
        print(plan.table(), flush=True)
    plan.check(0 if on_cpu else device_bytes(config, ranks.device), host_bytes() / local_ranks())


def _shape_of_other(path: str, key: str, *, needed: bool) -> ModelShape | None:
    """Shape of the model at ``path``; ``None`` where it is not needed, or is the policy's own."""
    if not (needed and path):
        return None
    return ModelShape.of(read_model_config(check_model_folder(path, key, tokenizer=False)))


def device_bytes(config: Config, device: torch.device) -> float:
    """Memory of the device, or `learner.device_memory_gib`."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return config.learner.device_memory_gib * GIB or total


def host_bytes() -> float:
    """Memory of this host, or of the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip() if _CGROUP_LIMIT.is_file() else "max"
    return float(min(total, int(limit)) if limit.isdigit() else total)


def local_ranks() -> int:
    """Ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
