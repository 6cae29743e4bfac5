"""A trained policy as a transformers folder, which transformers and vLLM load.

In: whole tensors by their transformers names, and the folder the policy started from. Out: safetensors in the model's dtype, with
that folder's configuration, tokenizer and templates. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from async_search_rl.config import Config
from async_search_rl.errors import CheckpointError, ConfigError
from learner.checkpoint import move_into_place, read_state
from learner.loading import DTYPES, check_model_folder

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_LARGEST_FILE = "5GB"
_POLICY_PREFIX = "model."


def write_model_folder(tensors: Mapping[str, Tensor], source: Path, out: Path, dtype: torch.dtype) -> None:
    """Write ``tensors`` and everything of ``source`` that is not weights to ``out``, replacing a model that is there.

    Raises:
        ConfigError: when ``out`` holds something else.
    """
    from huggingface_hub import save_torch_state_dict

    if out.exists() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise ConfigError(f"the folder to export to must be empty or a model folder, got {out}")
    partial = out.with_name(f".partial-{out.name}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns(*_WEIGHTS))
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    kept = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if settings.get("tie_word_embeddings"):
        kept.pop("lm_head.weight", None)
    save_torch_state_dict(kept, partial, max_shard_size=_LARGEST_FILE, metadata={"format": "pt"})
    move_into_place(partial, out)


def export_checkpoint(config: Config, checkpoint: Path, out: Path) -> None:
    """Write the policy of ``checkpoint`` as a transformers folder; needs neither ranks nor a device.

    Raises:
        CheckpointError: when the checkpoint is incomplete or not of this configuration's model.
    """
    from learner.deepspeed_checkpoint import whole_tensors

    source = check_model_folder(config.model.path, "model.path")
    read_state(checkpoint)
    tensors = whole_tensors(checkpoint / "policy")
    foreign = [name for name in tensors if not name.startswith(_POLICY_PREFIX)]
    if foreign:
        raise CheckpointError(f"{checkpoint} must hold a policy, got parameters such as {foreign[0]}")
    named = {name.removeprefix(_POLICY_PREFIX): tensor for name, tensor in tensors.items()}
    write_model_folder(named, source, out, DTYPES[config.model.dtype])
