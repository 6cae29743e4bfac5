"""DeepSpeed's configuration, derived from ours; and the settings of its process that keep it quiet and free of builds.

In: the optimiser, learner and model sections. Out: the dictionary for ``deepspeed.initialize``, and the imported package.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from async_search_rl.config.learner import LearnerSection, OptimizerSection

_REDUCE_BUCKET_ELEMENTS = 200_000_000
_PREFETCH_ELEMENTS = 50_000_000


def import_deepspeed() -> Any:
    """The package, set up for this machine.

    Without a GPU its shared-memory all-reduce is switched off (gloo does the work): it would be compiled for minutes at first use.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Without it DeepSpeed runs a program to count NUMA nodes at every reduction of gradients.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # DeepSpeed calls collectives by names that torch has renamed; the calls are right.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed
    import deepspeed.ops
    import deepspeed.utils.nvtx

    # Ranges for NVIDIA's profiler around thousands of calls a step.
    deepspeed.utils.nvtx.enable_nvtx = False
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def engine_config(optimizer: OptimizerSection, learner: LearnerSection, dtype: torch.dtype, parameters: int) -> dict[str, Any]:
    """Configuration of one engine.

    Args:
        optimizer: gradient clipping.
        learner: ZeRO stage, off-load, persistence.
        dtype: of weights and activations; with bfloat16 the optimiser keeps float32 master weights.
        parameters: elements of the model, which bound the buckets.
    """
    zero: dict[str, Any] = {
        "stage": learner.zero_stage,
        "reduce_bucket_size": min(_REDUCE_BUCKET_ELEMENTS, parameters + 1),
        "contiguous_gradients": True,
        "overlap_comm": torch.cuda.is_available(),
    }
    if learner.zero_stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": learner.persist_params_below,
            "stage3_prefetch_bucket_size": min(_PREFETCH_ELEMENTS, parameters + 1),
            "memory_efficient_linear": False,
        }
    if learner.offload_optimizer != "none":
        zero["offload_optimizer"] = _offload(learner.offload_optimizer, learner.nvme_path)
    if learner.offload_params != "none":
        zero["offload_param"] = _offload(learner.offload_params, learner.nvme_path)
    config: dict[str, Any] = {
        # Batches are counted in tokens by learner.step; these two only have to be consistent.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.grad_clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if dtype == torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return config


def frozen_config(learner: LearnerSection, dtype: torch.dtype) -> dict[str, Any]:
    """Configuration of an engine without optimiser: parameters partitioned, on the host with `learner.offload_reference`."""
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": learner.persist_params_below}
    if learner.offload_reference == "cpu":
        zero["offload_param"] = _offload("cpu", "")
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, "zero_optimization": zero}
    return config | ({"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {})


def _offload(where: str, nvme_path: str) -> dict[str, Any]:
    if where == "cpu":
        return {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {"device": "nvme", "nvme_path": nvme_path, "pin_memory": torch.cuda.is_available()}
