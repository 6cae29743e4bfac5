"""Model FLOPs of a training step from the model's configuration, and the peak rates of known devices.

In: a transformers configuration, trajectory lengths, a device's name. Out: floating-point operations of the mathematics (no
recomputation counted), and peak operations a second, or None for a device that is not in the table: then there is no MFU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_TWO_MATRIX_MLPS = frozenset(
    {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2"}
)
"""Model types whose MLP has two matrices; all others are taken as gated, with three."""

_QK_NORMS = ("gemma3", "gemma4", "olmo2", "olmo3", "qwen3")
"""Beginnings of the model types that normalise queries and keys."""

PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200",), 2500.0),
    (("B200",), 2250.0),
    (("B100",), 1750.0),
    (("GH200",), 989.4),
    (("H200", "NVL"), 835.5),
    (("H200",), 989.4),
    (("H100", "PCIE"), 756.5),
    (("H100", "NVL"), 835.5),
    (("H100",), 989.4),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("A40",), 149.7),
    (("A30",), 165.0),
    (("A10",), 125.0),
    (("L40S",), 362.1),
    (("L40",), 181.1),
    (("L4",), 121.0),
)
"""Words in a device's name and its peak of dense 16-bit tensor operations, in 10^12 a second, from the vendor's data sheets."""


@dataclass(frozen=True)
class ModelShape:
    """What the estimate needs to know of a decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Whether the embedding is the output projection too."""
    active_per_layer: int
    """Matrix entries of a layer that one token meets."""
    stored_per_layer: int
    """Matrix entries of a layer, all experts included."""
    mlp_width: int
    """Intermediate features of a token in one layer, all its experts together."""
    windows: tuple[int | None, ...]
    """Attention window of each layer; None: the whole trajectory."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, which keeps more activations."""

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The shape a transformers configuration describes, mixtures of experts included."""
        config = config.get_text_config()
        hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
        matrices = 2 if config.model_type in _TWO_MATRIX_MLPS else 3
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
        active = stored = attention + matrices * hidden * width
        if experts:
            width = getattr(config, "moe_intermediate_size", None) or width
            shared = getattr(config, "shared_expert_intermediate_size", None) or 0
            always = attention + hidden * experts + matrices * hidden * shared
            active = always + config.num_experts_per_tok * matrices * hidden * width
            stored = always + experts * matrices * hidden * width
            width = config.num_experts_per_tok * width + shared
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=config.vocab_size,
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            active_per_layer=active,
            stored_per_layer=stored,
            mlp_width=width,
            windows=_windows(config, layers),
            qk_norm=config.model_type.startswith(_QK_NORMS),
        )

    @property
    def parameters(self) -> int:
        """Stored matrix entries, embeddings included; norms and biases are left out."""
        return self.layers * self.stored_per_layer + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def quadratic_tokens(self) -> int:
        """Length at which a trajectory's attention costs as much as its layers' projections; for :func:`learner.packing.pack`."""
        return max(self.active_per_layer // (self.heads * self.head_dim), 1)


def forward_flops(shape: ModelShape, lengths: Iterable[int], head_tokens: int | None = None) -> float:
    """Operations of one forward pass over trajectories of ``lengths`` tokens; a multiplication and an addition are two.

    ``2 P`` a token for the layers' P matrix entries, ``2 V d`` for each of ``head_tokens`` tokens at the vocabulary projection
    (None: every token), and ``4 H D`` for each pair of a query and a key it may see (Kaplan et al. 2020; Chowdhery et al. 2022,
    with causal attention counted once).
    """
    lengths = list(lengths)
    tokens = sum(lengths)
    layers = 2.0 * shape.layers * shape.active_per_layer * tokens
    head = 2.0 * shape.vocab * shape.hidden * (tokens if head_tokens is None else head_tokens)
    pairs = sum(_visible_pairs(length, window) for window in shape.windows for length in lengths)
    return layers + head + 4.0 * shape.heads * shape.head_dim * pairs


def training_flops(shape: ModelShape, lengths: Iterable[int], head_tokens: int | None = None) -> float:
    """Operations of a forward and a backward pass, which costs two forward passes."""
    return 3.0 * forward_flops(shape, lengths, head_tokens)


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Peak operations a second of a device, by the name its driver gives it; None where unknown, or not 16-bit."""
    if dtype not in ("bfloat16", "float16"):
        return None
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    return next((peak * 1e12 for needed, peak in PEAK_TFLOPS if words.issuperset(needed)), None)


def _visible_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key not after it, at most ``window`` keys a query."""
    within = length if window is None else min(length, window)
    return within * (within + 1) // 2 + (length - within) * within


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (window if getattr(config, "use_sliding_window", True) else None,) * layers
