"""The memory a rank will need, added up before anything large is allocated.

In: the model's shape and the configuration. Out: a table of what lies on the device and on the host, and a refusal where that is
more than there is. Estimates err on the high side by design; for what they cannot know (fragmentation, kernels' scratch) there is
a reserve.

Legend of formulas: P parameters, W ranks, T tokens of a micro-batch, V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from async_search_rl.config.learner import LearnerSection
from async_search_rl.config.schema import Config
from async_search_rl.errors import EngineError
from learner.flops import ModelShape

GIB = 1 << 30
RESERVE = 0.08
"""Share of device memory that is left to fragmentation and kernels' scratch."""


@dataclass(frozen=True)
class MemoryItem:
    """One line of the plan."""

    name: str
    device_bytes: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank will hold at its fullest moment."""

    items: tuple[MemoryItem, ...]
    start_bytes: int = 0
    """One whole copy of the largest network: each rank holds it on its device while it starts, before partitioning."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return sum(item.device_bytes for item in self.items)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory beside the process itself."""
        return sum(item.host_bytes for item in self.items)

    def table(self) -> str:
        """The plan as text, one line an item, in GiB."""
        rows = [*self.items, MemoryItem("total", self.device_bytes, self.host_bytes, sum(item.nvme_bytes for item in self.items))]
        lines = [f"{'memory a rank, GiB':<28}{'device':>10}{'host':>10}{'nvme':>10}"]
        for item in rows:
            amounts = (item.device_bytes, item.host_bytes, item.nvme_bytes)
            lines.append(f"{item.name:<28}" + "".join(f"{amount / GIB:>10.3f}" for amount in amounts))
        return "\n".join(lines)

    def check(self, device_limit: float, host_limit: float, reserve: float = RESERVE) -> None:
        """Refuse a plan that cannot fit.

        Args:
            device_limit: bytes of device memory of this rank.
            host_limit: bytes of host memory of this rank (the host's, divided by its ranks).
            reserve: share of the device that must stay free.

        Raises:
            EngineError: naming what is too much, the largest items, and the keys that make it smaller.
        """
        if device_limit and self.start_bytes > device_limit * (1 - reserve):
            raise EngineError(
                f"one whole copy of the weights must fit on a rank's device while it starts: {self.start_bytes / GIB:.2f} GiB, "
                f"got {device_limit * (1 - reserve) / GIB:.2f} GiB"
            )
        for place, need, limit in (
            ("device", self.device_bytes, device_limit * (1 - reserve)),
            ("host", self.host_bytes, host_limit),
        ):
            if need > limit:
                largest = sorted(self.items, key=lambda item: -getattr(item, f"{place}_bytes"))[:3]
                named = ", ".join(f"{item.name} {getattr(item, f'{place}_bytes') / GIB:.2f}" for item in largest)
                raise EngineError(
                    f"the plan must fit into {limit / GIB:.2f} GiB of {place} memory a rank, got {need / GIB:.2f} ({named}); "
                    "smaller: learner.micro_batch_tokens, learner.logits_chunk_tokens, learner.gradient_checkpointing = true, "
                    "learner.offload_optimizer, learner.offload_params, more ranks"
                )


def plan_memory(
    shape: ModelShape,
    learner: LearnerSection,
    *,
    dtype_bytes: int,
    ranks: int,
    longest_tokens: int,
    on_cpu: bool = False,
    critic: ModelShape | None = None,
    reference: ModelShape | None = None,
    buffers: Mapping[str, tuple[int, int]] | None = None,
) -> MemoryPlan:
    """The plan of one rank.

    Args:
        shape: the policy.
        learner: its section of the configuration.
        dtype_bytes: bytes of a weight in the forward pass, 2 or 4.
        ranks: ranks of the training job.
        longest_tokens: longest trajectory; one over the token budget has a micro-batch to itself.
        on_cpu: training runs on the CPU, where the "device" is the host: all is counted as host memory.
        critic: backbone of the value model, trained alike.
        reference: frozen reference policy, partitioned like the policy.
        buffers: other memory by name, ``(device bytes, host bytes)``: weight publication, communication buckets.
    """
    tokens = max(learner.micro_batch_tokens, longest_tokens)
    items = _trained("policy", shape, learner, dtype_bytes, ranks)
    if critic is not None:
        items += _trained("critic", critic, learner, dtype_bytes, ranks)
    if reference is not None:
        weights = reference.parameters * dtype_bytes // (ranks if learner.zero_stage == 3 else 1)
        items.append(_placed("reference weights", weights, learner.offload_reference))
    widest = max((s for s in (shape, critic) if s is not None), key=lambda s: activation_bytes(s, tokens, dtype_bytes, False))
    items.append(MemoryItem("activations", activation_bytes(widest, tokens, dtype_bytes, learner.gradient_checkpointing)))
    items.append(MemoryItem("logits", logits_bytes(shape, tokens, learner.logits_chunk_tokens, dtype_bytes)))
    items += [MemoryItem(name, device, host) for name, (device, host) in (buffers or {}).items()]
    if on_cpu:
        items = [MemoryItem(item.name, 0, item.device_bytes + item.host_bytes, item.nvme_bytes) for item in items]
    largest = max(network.parameters for network in (shape, critic, reference) if network is not None)
    return MemoryPlan(tuple(items), start_bytes=largest * dtype_bytes)


def plan_of_run(
    config: Config,
    shape: ModelShape,
    *,
    ranks: int,
    on_cpu: bool = False,
    critic: ModelShape | None = None,
    reference: ModelShape | None = None,
    buffers: Mapping[str, tuple[int, int]] | None = None,
) -> MemoryPlan:
    """:func:`plan_memory` of a configuration; ``critic`` and ``reference`` (None: the policy's shape) count where it has them."""
    return plan_memory(
        shape,
        config.learner,
        dtype_bytes=4 if config.model.dtype == "float32" else 2,
        ranks=ranks,
        longest_tokens=config.max_trajectory_tokens,
        on_cpu=on_cpu,
        critic=(critic or shape) if config.uses_critic else None,
        reference=(reference or shape) if config.algorithm.kl_coef > 0 else None,
        buffers=buffers,
    )


def activation_bytes(shape: ModelShape, tokens: int, dtype_bytes: int, checkpointing: bool) -> int:
    """What the backward pass needs of the forward pass, attention computed without a [T, T] matrix.

    A layer keeps, for each token: the inputs of its seven projections, rotated queries and keys, values, the attention's
    output, the gate's parts, its two norms in float32, and norms of queries and keys where there are any (after Korthikanti
    et al. 2022, for a gated MLP). With checkpointing each layer keeps its input, and one layer at a time is whole.
    """
    attention = 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    layer = tokens * (dtype_bytes * (4 * shape.hidden + attention + 4 * shape.mlp_width) + 4 * 4 * shape.hidden)
    if shape.qk_norm:
        layer += tokens * (dtype_bytes + 6) * (shape.heads + shape.kv_heads) * shape.head_dim
    if checkpointing:
        return shape.layers * tokens * shape.hidden * dtype_bytes + layer
    return shape.layers * layer


def logits_bytes(shape: ModelShape, tokens: int, chunk_tokens: int, dtype_bytes: int) -> int:
    """Chunk of logits in the model's dtype and two float32 copies, and the float32 sum of the projection's gradient."""
    chunk = min(chunk_tokens or tokens, tokens)
    return chunk * shape.vocab * (dtype_bytes + 8) + shape.vocab * shape.hidden * (4 + dtype_bytes)


def _trained(name: str, shape: ModelShape, learner: LearnerSection, dtype_bytes: int, ranks: int) -> list[MemoryItem]:
    """Weights, gradients and AdamW state of one model (Rajbhandari et al. 2020, ZeRO)."""
    parameters, stage = shape.parameters, learner.zero_stage
    weights = parameters * dtype_bytes // (ranks if stage == 3 else 1)
    gradients = parameters * dtype_bytes // (ranks if stage >= 2 else 1)
    state = parameters * (8 + (4 if dtype_bytes == 2 else 0)) // (ranks if stage >= 1 else 1)
    items = [
        _placed(f"{name} weights", weights, learner.offload_params),
        _placed(f"{name} gradients", gradients, "cpu" if learner.offload_optimizer != "none" else "none"),
        _placed(f"{name} optimizer", state, learner.offload_optimizer),
    ]
    if learner.gathers_whole(parameters):
        if ranks > 1:
            # The weights for a whole step, the float32 sum of the gradient, and its copy by ranks.
            items.append(MemoryItem(f"{name} gathered whole", parameters * (dtype_bytes + 8)))
    elif stage == 3 and (ranks > 1 or learner.offload_params != "none"):
        # Two blocks whole at a time: the one that computes and the one that is fetched ahead; the embedding is a block of its own.
        block = max(shape.stored_per_layer, shape.vocab * shape.hidden)
        items.append(MemoryItem(f"{name} gathered blocks", 2 * block * dtype_bytes))
    return items


def _placed(name: str, size: int, offload: str) -> MemoryItem:
    if offload == "nvme":
        return MemoryItem(name, nvme_bytes=size)
    return MemoryItem(name, host_bytes=size) if offload == "cpu" else MemoryItem(name, device_bytes=size)
