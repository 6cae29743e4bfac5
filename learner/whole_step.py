"""Small models under ZeRO-3: parameters gathered once an optimiser step, gradients reduced once, instead of once a micro-batch.

ZeRO-3's bookkeeping is done by the host for every parameter in every micro-batch. The kernels of a small model are shorter than
that. Here the parameters are whole from the first forward pass of a step to its last backward pass, gradients are added up in
float32 on each rank, and one reduce-scatter hands them to DeepSpeed. Between steps parameters, gradients and optimiser state are
partitioned as ever; within a step a rank of several holds the weights and two float32 copies of the gradient besides.

In: a module and DeepSpeed's ZeRO-3 optimiser of it. Out: forward passes, backward passes, and gradients where the optimiser looks
for them. All ranks call the same methods in the same order.

Legend: W ranks, P parameters, C elements of a rank's share of one parameter (the last one padded).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class WholeStep:
    """The module of one engine, whole while it is in use.

    Args:
        module: partitioned, and marked as one leaf before DeepSpeed saw it, so that no hook is on any module inside.
        optimizer: DeepSpeed's ZeRO-3 optimiser, without off-load.
        gathering: makes the context in which a list of parameters is whole.
        ranks: W.
    """

    def __init__(self, module: nn.Module, optimizer: Any, gathering: Any, ranks: int) -> None:
        self._module, self._optimizer, self._gathering, self._ranks = module, optimizer, gathering, ranks
        self._parameters = [p for p in module.parameters() if hasattr(p, "ds_id")]
        self._trained = [p for group in optimizer.fp16_groups for p in group]
        self._whole: AbstractContextManager[None] | None = None
        self._share: Tensor = optimizer.grad_partitions_flat_buffer
        """[sum of C], this rank's share of the gradient, where the optimiser reads it."""
        self._buffer = self._share if ranks == 1 else None
        self._sums: list[Tensor] = []
        for part in module.modules():
            # DeepSpeed's own dictionary gathers what it is asked for; here nothing is left to gather, and compiled code guards it.
            part._parameters = getattr(part, "_original_parameters", part._parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, gathered; it stays so until :meth:`release`."""
        if self._whole is None:
            self._whole = self._gathering(self._parameters)
            self._whole.__enter__()
        return self._module.forward(*args, **kwargs)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of ``loss``, a share of a sum over micro-batches and ranks; after the ``last`` one reduce it."""
        loss.backward()  # type: ignore[no-untyped-call]
        first = not self._sums
        if first:
            self._start_sums()
        used = [(total, p.grad) for total, p in zip(self._sums, self._trained, strict=True) if p.grad is not None]
        if first and len(used) < len(self._sums):
            torch._foreach_zero_(self._sums)
        combine = torch._foreach_copy_ if first else torch._foreach_add_
        combine([total for total, _ in used], [gradient for _, gradient in used])
        self._forget_micro_batch()
        if last:
            self._reduce()
            # One tensor a group, where DeepSpeed would list one a parameter: the norm is the same, and nothing is copied together.
            sizes = [sum(p.partition_numel() for p in group) for group in self._optimizer.fp16_groups]
            self._optimizer.averaged_gradients = {i: [part] for i, part in enumerate(torch.split(self._share, sizes))}

    def release(self) -> None:
        """Partition the parameters again and forget sums that were not reduced."""
        self._sums = []
        self._forget_micro_batch()
        if self._ranks > 1:
            self._buffer = None
        if self._whole is not None:
            whole, self._whole = self._whole, None
            whole.__exit__(None, None, None)

    def _start_sums(self) -> None:
        sizes = [p.ds_numel for p in self._trained]
        if self._buffer is None:
            self._buffer = self._share.new_empty(sum(sizes))
        flat = torch.split(self._buffer, sizes)
        self._sums = [part.view(p.ds_shape) for part, p in zip(flat, self._trained, strict=True)]

    def _forget_micro_batch(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    @torch.no_grad()
    def _reduce(self) -> None:
        """Sum over ranks, each rank's share of it into ``self._share``."""
        if self._ranks == 1:
            return
        by_rank_WC = self._share.new_zeros(self._ranks, self._share.numel())
        at, targets, sources = 0, [], []
        for total, parameter in zip(self._sums, self._trained, strict=True):
            width, flat = parameter.partition_numel(), total.view(-1)
            for rank, piece in enumerate(torch.split(flat, width)):
                targets.append(by_rank_WC[rank, at : at + piece.numel()])
                sources.append(piece)
            at += width
        torch._foreach_copy_(targets, sources)
        self._sums, self._buffer = [], None
        dist.reduce_scatter_tensor(self._share, by_rank_WC.view(-1))
