"""One network under DeepSpeed: partitioned parameters, exact gradients over uneven micro-batches, optimiser, state on disk.

In: a module, and from :mod:`learner.step` one loss sum a micro-batch. Out: gradients that equal those of one device with the
whole batch, and optimiser steps. All ranks call the same methods in the same order: most of them are collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from async_search_rl.config.learner import LearnerSection, OptimizerSection
from async_search_rl.errors import CheckpointError, EngineError
from learner.deepspeed_config import engine_config, frozen_config, import_deepspeed
from learner.ranks import Ranks
from learner.whole_step import WholeStep

TAG = "state"
"""Name of the one state in a folder; DeepSpeed wants one."""


@dataclass(frozen=True)
class StepReport:
    """What an optimiser step did."""

    grad_norm: float
    """Global gradient norm before clipping; infinite where it was not finite."""
    applied: bool
    """False: gradient or loss was not finite, the weights are what they were."""


class Engine:
    """A module that ZeRO partitions and AdamW trains.

    Args:
        module: the network, whole, on the host or the device; its blocks are the modules named in ``blocks``.
        blocks: class names of the modules that are gathered whole (``learner.leaf_modules``), such as decoder layers.
        optimizer: AdamW and clipping; the learning rate comes with each step.
        learner: ZeRO stage, off-load, persistence, compilation.
        ranks: the world.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        blocks: Sequence[str],
        optimizer: OptimizerSection,
        learner: LearnerSection,
        ranks: Ranks,
    ) -> None:
        deepspeed = import_deepspeed()
        self._zero = deepspeed.zero
        self._ranks, self._stage = ranks, learner.zero_stage
        self.module = module
        self.parameters = sum(p.numel() for p in module.parameters())
        self.dtype = next(module.parameters()).dtype
        whole = learner.gathers_whole(self.parameters)
        _mark_blocks(module, blocks, leaf=learner.leaf_modules and learner.zero_stage == 3 and not whole, compiled=learner.compile)
        if whole:
            deepspeed.utils.set_z3_leaf_module(module, True)
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        groups = parameter_groups(module, optimizer.weight_decay)
        adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps, fused=True)
        config = engine_config(optimizer, learner, self.dtype, self.parameters)
        module.train()
        self._engine, self._optimizer, _, _ = deepspeed.initialize(model=module, optimizer=adamw, config=config)
        self._whole = WholeStep(module, self._optimizer, self._zero.GatheredParameters, ranks.world) if whole else None

    @property
    def unpartitioned(self) -> int:
        """Parameters that every rank keeps whole: those below ``persist_params_below``, or all below ZeRO-3."""
        return sum(
            getattr(p, "ds_numel", p.numel()) for p in self.module.parameters() if getattr(p, "ds_persist", not hasattr(p, "ds_id"))
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; under ``torch.no_grad()`` for figures alone."""
        return self._whole.forward(*args, **kwargs) if self._whole else self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of ``loss``, this rank's share of a sum over micro-batches and ranks.

        DeepSpeed averages over ranks, hence the factor; nothing else is scaled, so shares of any size add up exactly.

        Args:
            loss: scalar with gradient.
            last: whether this is the last micro-batch before :meth:`step`.
        """
        if self._whole:
            self._whole.backward(loss, last)
            return
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks.world, scale_wrt_gas=False)

    def step(self, lr: float, finite: bool = True) -> StepReport:
        """Clip, apply AdamW at ``lr``, forget the gradients.

        Where ``finite`` is false (the loss was not), or the gradient's norm is not finite, they are forgotten unapplied.
        """
        self._partition()
        if not finite:
            self._forget_gradients()
            return StepReport(float("inf"), False)
        norm = None
        if self._stage == 0:
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]))
            if not math.isfinite(norm):
                return self.step(lr, finite=False)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        norm = norm if norm is not None else float(self._engine.get_global_grad_norm())
        return StepReport(norm if applied else float("inf"), applied)

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within it ``parameters`` are whole on every rank, to be read. Collective."""
        self._partition()
        partitioned = [p for p in parameters if hasattr(p, "ds_id")]
        with self._zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            yield

    def save(self, folder: Path) -> None:
        """Write parameters and optimiser state of all ranks under ``folder``. Collective."""
        self._partition()
        folder.mkdir(parents=True, exist_ok=True)
        self._ranks.barrier()
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def load(self, folder: Path, universal: bool = False) -> None:
        """Read what :meth:`save` wrote at the same world size, or a ``universal`` checkpoint made from it. Collective.

        Raises:
            CheckpointError: when it is incomplete or does not fit.
        """
        self._partition()
        # DeepSpeed takes this from the engine's configuration, but looks at it only while it loads.
        self._engine._config.load_universal_checkpoint = universal
        try:
            loaded, _ = self._engine.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)
        except (RuntimeError, ValueError, KeyError, AssertionError, OSError) as error:
            raise CheckpointError(f"{folder} does not fit this model and world size: {error}") from error
        if loaded is None:
            raise CheckpointError(f"{folder} must hold a DeepSpeed checkpoint, got none")

    def destroy(self) -> None:
        """Free hooks and buffers."""
        self._partition()
        self._engine.destroy()

    def _forget_gradients(self) -> None:
        optimizer = self._engine.optimizer
        optimizer.zero_grad()
        # At stages 1 and 2 sums over micro-batches are kept apart from the parameters' own gradients, and zero_grad leaves them.
        if self._stage in (1, 2) and hasattr(optimizer, "averaged_gradients"):
            optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))
            optimizer.micro_step_id = -1

    def _partition(self) -> None:
        """End what :class:`WholeStep` keeps whole."""
        if self._whole:
            self._whole.release()


def freeze(module: nn.Module, blocks: Sequence[str], learner: LearnerSection, ranks: Ranks) -> Any:
    """``module`` for figures alone: partitioned where that saves memory, unchanged otherwise."""
    module.eval().requires_grad_(False)
    if ranks.world == 1 and learner.offload_reference == "none":
        return module
    deepspeed = import_deepspeed()
    _mark_blocks(module, blocks, leaf=learner.leaf_modules, compiled=False)
    config = frozen_config(learner, next(module.parameters()).dtype)
    return deepspeed.initialize(model=module, config=config)[0]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay, vectors (norms, biases) do not; one group where nothing decays."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if weight_decay == 0:
        return [{"params": trained, "weight_decay": 0.0}]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _mark_blocks(module: nn.Module, blocks: Sequence[str], *, leaf: bool, compiled: bool) -> None:
    """Make the modules of the classes ``blocks`` the units that ZeRO-3 gathers, and compile them."""
    from deepspeed.utils import set_z3_leaf_module

    found = [m for m in module.modules() if type(m).__name__ in blocks]
    if not found and (leaf or compiled):
        raise EngineError(f"the model must have modules of class {' or '.join(blocks) or '?'}, got none")
    for block in found:
        if compiled:
            # ZeRO's hooks stay outside of what is compiled, where the block's parameters are whole.
            block.forward = torch.compile(block.forward, dynamic=True)
        if leaf:
            set_z3_leaf_module(block, True)
