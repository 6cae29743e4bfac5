"""What DeepSpeed's checkpoint files can be turned into: a universal checkpoint for another world size, or whole tensors.

In: a folder that :meth:`learner.deepspeed_engine.Engine.save` wrote. Out: another folder, or a state dict; one process, no ranks.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor

from async_search_rl.errors import CheckpointError
from learner.deepspeed_config import import_deepspeed
from learner.deepspeed_engine import TAG


def to_universal(folder: Path, out: Path) -> None:
    """Write the universal form of ``folder`` to ``out``: one file a parameter, which any number of ranks can load.

    Raises:
        CheckpointError: when the checkpoint cannot be converted.
    """
    import_deepspeed()
    from deepspeed.checkpoint import ds_to_universal

    out.mkdir(parents=True, exist_ok=True)
    options = Namespace(
        input_folder=str(folder / TAG),
        output_folder=str(out / TAG),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            ds_to_universal.main(options)
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError, NotImplementedError) as error:
        raise CheckpointError(f"{folder} must be convertible to DeepSpeed's universal format, got: {error}") from error


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """All parameters of ``folder``, whole, on the host, by their names in the module; float32 where ZeRO has master weights.

    Raises:
        CheckpointError: when files are missing.
    """
    import_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    states = folder / TAG
    said = io.StringIO()
    try:
        if any(states.glob("*_optim_states.pt")):
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                tensors = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=TAG)
        else:
            tensors = torch.load(states / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)["module"]
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} must be a complete checkpoint, got: {error}") from error
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
