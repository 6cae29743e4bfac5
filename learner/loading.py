"""Models from transformers folders, with one clear line for whatever is wrong with a folder.

In: a folder with config.json, safetensors and tokenizer. Out: the model on the host, in the dtype asked for; each rank reads its
own copy, which DeepSpeed then partitions.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from async_search_rl.config.schema import Config
from async_search_rl.errors import DataError
from learner.policy import PackedPolicy
from learner.ranks import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def check_model_folder(path: str, key: str, *, tokenizer: bool = True) -> Path:
    """The folder ``path`` if it holds a model.

    Raises:
        DataError: naming the configuration key and what is missing.
    """
    folder = Path(path)
    if not path or not folder.is_dir():
        raise DataError(f"{key} must be a folder with a transformers model, got {path!r}")
    if not (folder / "config.json").is_file():
        raise DataError(f"{key} must hold config.json, got {path!r} without it")
    if not any(folder.glob("*.safetensors")):
        raise DataError(f"{key} must hold *.safetensors, got {path!r} without any")
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise DataError(f"{key} must hold a tokenizer ({', '.join(_TOKENIZERS)}), got {path!r} without one")
    return folder


def read_model_config(folder: Path) -> Any:
    """The transformers configuration of ``folder``.

    Raises:
        DataError: when transformers does not know such a model.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder} must hold a config.json that transformers can read: {error}") from error


def load_causal_lm(folder: Path, dtype: torch.dtype, *, gradient_checkpointing: bool = False) -> Any:
    """The causal language model of ``folder`` on the host.

    Raises:
        DataError: when transformers cannot make a model of it, or weights are missing.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    quiet = logging.getLogger("transformers")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{folder} must hold a causal language model that transformers can load: {error}") from error
    finally:
        quiet.setLevel(level)
    missing = sorted(report["missing_keys"])
    if missing:
        raise DataError(f"{folder} must hold all weights, got a model without {', '.join(missing[:5])}")
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def load_policy(config: Config, path: str, key: str, ranks: Ranks, *, trained: bool = True) -> PackedPolicy:
    """The policy of folder ``path`` (named by the configuration key ``key``) on the rank's device."""
    folder = check_model_folder(path, key)
    model = load_causal_lm(
        folder, DTYPES[config.model.dtype], gradient_checkpointing=trained and config.learner.gradient_checkpointing
    )
    return PackedPolicy(
        model.to(ranks.device),
        temperature=config.rollout.temperature,
        attention=config.learner.attention,
        chunk_tokens=config.learner.logits_chunk_tokens,
    )


def block_classes(model: Any) -> list[str]:
    """Class names of a transformers model's repeated blocks."""
    return list(getattr(model, "_no_split_modules", None) or [])
