"""Block-diagonal causal attention over packed trajectories, for any transformers causal LM and without extra packages.

In: a model, and a :class:`PackedLayout` (where each trajectory begins) given to every forward call as the keyword arguments of
:meth:`PackedLayout.model_kwargs`. Out: hidden states in which no trajectory has seen another, positions restarting with each.

Backends: ``varlen`` (torch's variable-length FlashAttention; CUDA, 16-bit), ``flex`` (torch's flex attention), ``segments``
(one scaled-dot-product call a trajectory; the choice on CPU), ``sdpa`` (one call with an explicit mask; the reference, of
quadratic memory). ``auto`` picks by device and dtype.

Legend: T packed tokens, S trajectories, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from async_search_rl.errors import EngineError, SchemaError

try:
    from torch.nn.attention import varlen
except ImportError:
    varlen = None  # type: ignore[assignment]

_VARLEN_PARAMETERS = frozenset(inspect.signature(varlen.varlen_attn).parameters) if varlen is not None else frozenset()
"""Of this torch's ``varlen_attn``: the causal flag, the scale and grouped heads came or changed between releases."""
PREFIX = "packed_"
"""The backends are registered with transformers under this prefix and their name."""
_FLEX_MIN_HEAD_DIM = 16


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where each trajectory of a packed micro-batch lies. Build it once a micro-batch, with :meth:`of`."""

    lengths: tuple[int, ...]
    """Tokens of each trajectory; padding, if any, is one more."""
    position_ids_T: Tensor
    """int64, restarting at 0 with each trajectory."""
    segment_T: Tensor
    """int32, index of each token's trajectory."""
    cu_seqlens: Tensor
    """int32 [S + 1], where each trajectory starts; the last entry is T."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu", pad_to_multiple: int = 1) -> PackedLayout:
        """The layout of trajectories of ``lengths`` tokens one after the other, filled up to a multiple of ``pad_to_multiple``.

        Raises:
            SchemaError: when there is no trajectory or an empty one.
        """
        if not lengths or min(lengths) < 1:
            raise SchemaError(f"a layout needs trajectories of >= 1 token, got lengths {list(lengths)}")
        padding = -sum(lengths) % pad_to_multiple
        full = (*lengths, padding) if padding else tuple(lengths)
        sizes = torch.tensor(full)
        starts = sizes.cumsum(0) - sizes
        segment_T = torch.repeat_interleave(torch.arange(len(full), dtype=torch.int32), sizes)
        position_ids_T = torch.arange(int(sizes.sum())) - torch.repeat_interleave(starts, sizes)
        cu_seqlens = torch.cat([starts, sizes.sum()[None]]).to(torch.int32)
        return cls(full, position_ids_T.to(device), segment_T.to(device), cu_seqlens.to(device))

    @property
    def tokens(self) -> int:
        """T, padding included."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory."""
        return max(self.lengths)

    def model_kwargs(self) -> dict[str, Any]:
        """What a model prepared by :func:`use_packed_attention` must be called with, beside ``input_ids`` [1, T]."""
        return {"position_ids": self.position_ids_T[None], "attention_mask": None, "use_cache": False, "packing": self}

    def mask(self, window: int | None = None) -> Tensor:
        """bool [T, T], true where a query (row) may look: its own trajectory, not later, and within ``window`` tokens."""
        position = self.position_ids_T
        distance_TT = position[:, None] - position[None, :]
        allowed_TT = (self.segment_T[:, None] == self.segment_T[None, :]) & (distance_TT >= 0)
        return allowed_TT if window is None else allowed_TT & (distance_TT < window)

    @cached_property
    def _block_masks(self) -> dict[int | None, Any]:
        return {}

    def block_mask(self, window: int | None = None) -> Any:
        """:meth:`mask` as a flex attention BlockMask, made once for each window."""
        if window not in self._block_masks:
            self._block_masks[window] = _flex_block_mask(self, window)
        return self._block_masks[window]


def use_packed_attention(model: Any, backend: str = "auto") -> str:
    """Make ``model`` attend over packed trajectories; afterwards every call needs :meth:`PackedLayout.model_kwargs`.

    Returns:
        The backend in use.

    Raises:
        EngineError: for a backend that cannot run here, or a model whose layers pass state along the tokens by other means
            than attention, or that does not use transformers' attention interface.
    """
    from transformers import AttentionInterface

    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise EngineError(f"packing needs layers of full or sliding attention only, got {sorted(other)}")
    if not getattr(model, "_supports_attention_backend", False):
        raise EngineError(f"packing needs a model on transformers' attention interface, got {type(model).__name__}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    chosen = choose_backend(backend, model.device, model.dtype, head_dim)
    AttentionInterface.register(PREFIX + chosen, _BACKENDS[chosen])
    model.set_attn_implementation(PREFIX + chosen)
    return chosen


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The backend that ``backend`` (a name or ``auto``) means on this device, for this dtype and size of a head.

    Raises:
        EngineError: when it cannot run there.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if backend == "auto":
        if device.type != "cuda":
            return "segments"
        if half and varlen is not None:
            return "varlen"
        return "flex" if head_dim >= _FLEX_MIN_HEAD_DIM else "segments"
    if backend not in _BACKENDS:
        raise EngineError(f"attention must be auto or one of {', '.join(_BACKENDS)}, got {backend!r}")
    if backend == "varlen" and not (half and device.type == "cuda" and varlen is not None):
        raise EngineError(
            f"attention 'varlen' needs torch >= 2.10, CUDA and a 16-bit dtype, got {torch.__version__}, {device}, {dtype}"
        )
    if backend == "flex" and device.type == "cpu":
        raise EngineError("attention 'flex' has no backward pass on CPU; use 'segments' or 'sdpa'")
    if backend == "flex" and head_dim < _FLEX_MIN_HEAD_DIM:
        raise EngineError(
            f"attention 'flex' needs heads of at least {_FLEX_MIN_HEAD_DIM}, got {head_dim}; use 'segments' or 'sdpa'"
        )
    return backend


def _varlen(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, None]:
    layout, window = _checked(query, kwargs)
    if kwargs.get("dropout"):
        raise EngineError(f"attention 'varlen' has no dropout, got {kwargs['dropout']}")
    causal: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if "window_size" not in _VARLEN_PARAMETERS:
        if window is not None and window < layout.longest:
            raise EngineError(f"sliding-window attention with 'varlen' needs torch >= 2.11, got {torch.__version__}")
        causal = {"is_causal": True}
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if "enable_gqa" in _VARLEN_PARAMETERS:
        causal["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        key, value = _repeat(key, query.shape[1], 1), _repeat(value, query.shape[1], 1)
    if "scale" in _VARLEN_PARAMETERS:
        causal["scale"] = kwargs.get("scaling")
    elif kwargs.get("scaling") is not None:
        query = query * (kwargs["scaling"] * query.shape[-1] ** 0.5)
    starts, longest = layout.cu_seqlens, layout.longest
    attended = varlen.varlen_attn(query, key, value, starts, starts, longest, longest, **causal)
    assert isinstance(attended, Tensor)
    return attended[None], None


def _flex(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, None]:
    layout, window = _checked(query, kwargs, softcap=True)
    if kwargs.get("dropout"):
        raise EngineError(f"attention 'flex' has no dropout, got {kwargs['dropout']}")
    cap = float(kwargs.get("softcap") or 0.0)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    attended = _flex_attention(query.device.type)(
        query,
        key,
        value,
        score_mod=capped if cap else None,
        block_mask=layout.block_mask(window),
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2), None


def _segments(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, None]:
    layout, window = _checked(query, kwargs)
    if query.device.type != "cpu":
        # Grouped heads as they are would take some CUDA kernels out of the choice and leave the one of quadratic memory.
        key, value = _repeat(key, query.shape[1], 1), _repeat(value, query.shape[1], 1)
    parts = []
    for q, k, v in zip(*(torch.split(x, list(layout.lengths), dim=2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        band = None
        if window is not None and window < length:
            row, column = torch.arange(length, device=q.device)[:, None], torch.arange(length, device=q.device)
            band = (column <= row) & (row - column < window)
        parts.append(_attend(q, k, v, band, kwargs))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, None]:
    layout, window = _checked(query, kwargs)
    key, value = _repeat(key, query.shape[1], 1), _repeat(value, query.shape[1], 1)
    return _attend(query, key, value, layout.mask(window), kwargs).transpose(1, 2), None


_BACKENDS = {"varlen": _varlen, "flex": _flex, "segments": _segments, "sdpa": _sdpa}


def _checked(query: Tensor, kwargs: dict[str, Any], softcap: bool = False) -> tuple[PackedLayout, int | None]:
    """The layout and the sliding window of this call, after refusing what the backend does not compute."""
    layout = kwargs.get("packing")
    if not isinstance(layout, PackedLayout):
        raise EngineError(f"the model must be called with PackedLayout.model_kwargs(), got packing = {layout!r}")
    if query.shape[0] != 1 or query.shape[2] != layout.tokens:
        raise EngineError(f"input_ids must be [1, {layout.tokens}], got [{query.shape[0]}, {query.shape[2]}]")
    if kwargs.get("softcap") and not softcap:
        raise EngineError(f"a model with attention soft-capping needs attention = 'flex', got softcap = {kwargs['softcap']}")
    if kwargs.get("s_aux") is not None:
        raise EngineError("packing needs attention without sinks, got a model with sinks (s_aux)")
    return layout, kwargs.get("sliding_window")


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=kwargs.get("dropout", 0.0),
        is_causal=mask is None,
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _repeat(heads: Tensor, count: int, dim: int) -> Tensor:
    """Key-value heads repeated to ``count`` heads along ``dim``."""
    return heads if heads.shape[dim] == count else heads.repeat_interleave(count // heads.shape[dim], dim)


@cache
def _flex_attention(device_type: str) -> Any:
    """flex attention, compiled where that is what makes it a fused kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


def _flex_block_mask(layout: PackedLayout, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    segment_T, position_T = layout.segment_T, layout.position_ids_T

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (segment_T[query] == segment_T[key]) & (query >= key)
        return inside if window is None else inside & (position_T[query] - position_T[key] < window)

    return create_block_mask(allowed, None, None, layout.tokens, layout.tokens, device=str(layout.segment_T.device))
