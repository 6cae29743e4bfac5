"""Packed attention: every backend against one trajectory at a time, and against the explicit mask."""

import inspect

import pytest
import torch
from torch.nn import functional

from async_search_rl.errors import EngineError, SchemaError
from learner import attention
from learner.attention import PackedLayout, choose_backend

# Only the unfused form of flex attention runs on a CPU, which is enough for the masks; it warns of its speed.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

LENGTHS = (5, 1, 9)


def qkv(heads: int = 4, kv_heads: int = 2, tokens: int = 15) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((1, heads, tokens, 8), (1, kv_heads, tokens, 8), (1, kv_heads, tokens, 8))
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def one_at_a_time(query, key, value, window: int | None) -> torch.Tensor:
    parts = []
    for q, k, v in zip(*(x.split(list(LENGTHS), dim=2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        parts.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5))
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize("backend", ["segments", "sdpa", "flex"])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_no_trajectory_sees_another(backend: str, window: int | None) -> None:
    query, key, value = qkv()
    run = {"segments": attention._segments, "sdpa": attention._sdpa, "flex": attention._flex}[backend]
    got, _ = run(None, query, key, value, None, scaling=0.5, sliding_window=window, packing=PackedLayout.of(LENGTHS))
    torch.testing.assert_close(got, one_at_a_time(query, key, value, window))


@pytest.mark.parametrize("backend", ["segments", "sdpa"])
def test_gradients_stay_within_a_trajectory(backend: str) -> None:
    query, key, value = (x.requires_grad_(True) for x in qkv())
    run = {"segments": attention._segments, "sdpa": attention._sdpa}[backend]
    run(None, query, key, value, None, packing=PackedLayout.of(LENGTHS))[0][:, :5].sum().backward()
    assert value.grad[:, :, :5].any()
    assert not value.grad[:, :, 5:].any()
    assert not key.grad[:, :, 5:].any()


def test_flex_caps_scores_before_the_softmax() -> None:
    query, key, value = qkv(heads=2)
    got, _ = attention._flex(None, query, key, value, None, scaling=1.0, softcap=0.5, packing=PackedLayout.of(LENGTHS))
    scores = 0.5 * torch.tanh(query @ key.transpose(2, 3) / 0.5)
    weights = scores.masked_fill(~PackedLayout.of(LENGTHS).mask(), float("-inf")).softmax(-1)
    torch.testing.assert_close(got, (weights @ value).transpose(1, 2))


def test_the_layout_restarts_positions_and_pads_as_one_more_trajectory() -> None:
    layout = PackedLayout.of([3, 2], pad_to_multiple=4)
    assert layout.lengths == (3, 2, 3)
    assert (layout.tokens, layout.longest) == (8, 3)
    assert layout.position_ids_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert layout.segment_T.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.model_kwargs()["position_ids"].shape == (1, 8)


def test_block_masks_are_made_once_a_window() -> None:
    layout = PackedLayout.of(LENGTHS)
    assert layout.block_mask() is layout.block_mask()
    assert layout.block_mask(2) is not layout.block_mask()


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_layouts_are_refused(lengths: list[int]) -> None:
    with pytest.raises(SchemaError, match="trajectories of >= 1 token"):
        PackedLayout.of(lengths)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "model_kwargs"),
        ({"packing": PackedLayout.of([4])}, r"must be \[1, 4\], got \[1, 15\]"),
        ({"packing": PackedLayout.of(LENGTHS), "softcap": 5.0}, "soft-capping"),
        ({"packing": PackedLayout.of(LENGTHS), "s_aux": torch.zeros(1)}, "sinks"),
    ],
)
def test_what_a_backend_does_not_compute_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        attention._segments(None, *qkv(), None, **kwargs)


@pytest.mark.parametrize("run", [attention._flex, attention._varlen])
def test_fused_backends_refuse_dropout(run) -> None:
    with pytest.raises(EngineError, match=r"no dropout, got 0\.1"):
        run(None, *qkv(), None, dropout=0.1, packing=PackedLayout.of(LENGTHS))


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "head_dim", "chosen"),
    [
        ("auto", CPU, torch.float32, 64, "segments"),
        ("auto", CUDA, torch.bfloat16, 64, "varlen"),
        ("auto", CUDA, torch.float32, 64, "flex"),
        ("auto", CUDA, torch.float32, 8, "segments"),
        ("sdpa", CPU, torch.float32, 64, "sdpa"),
    ],
)
def test_the_choice_of_backend(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, chosen: str) -> None:
    assert choose_backend(backend, device, dtype, head_dim) == chosen


def test_flex_is_refused_for_heads_that_its_kernel_does_not_take() -> None:
    with pytest.raises(EngineError, match="heads of at least 16, got 8"):
        choose_backend("flex", CUDA, torch.float32, 8)


@pytest.mark.parametrize(
    ("backend", "message"), [("varlen", "needs torch"), ("flex", "no backward"), ("best", "must be auto or one of")]
)
def test_backends_that_cannot_run_are_refused(backend: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        choose_backend(backend, CPU, torch.bfloat16, 64)


@pytest.mark.parametrize("parameters", ["newest", "oldest"])
@pytest.mark.parametrize("window", [None, 4])
def test_varlen_is_called_as_each_torch_release_wants_it(
    monkeypatch: pytest.MonkeyPatch, parameters: str, window: int | None
) -> None:
    """The kernel itself needs a GPU; here a stand-in of each signature computes with the masks that the arguments mean."""
    calls: list[dict] = []

    def attend(query, key, value, starts, causal_window: int | None, scale: float | None) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        layout = PackedLayout.of(starts.diff().tolist())
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=layout.mask(causal_window), scale=scale)[0].transpose(
            0, 1
        )

    def newest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        calls.append({"max_q": max_q, "enable_gqa": enable_gqa, "window_size": window_size})
        return attend(query, key, value, cu_seq_q, window_size[0] + 1 if window_size[0] >= 0 else None, scale)

    def oldest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        calls.append({"max_q": max_q, "is_causal": is_causal})
        return attend(query, key, value, cu_seq_q, None, None)

    replaced = newest if parameters == "newest" else oldest
    monkeypatch.setattr(attention.varlen, "varlen_attn", replaced)
    monkeypatch.setattr(attention, "_VARLEN_PARAMETERS", frozenset(inspect.signature(replaced).parameters))
    query, key, value = qkv()
    arguments = {"scaling": 0.5, "sliding_window": window, "packing": PackedLayout.of(LENGTHS)}
    if parameters == "oldest" and window is not None:
        with pytest.raises(EngineError, match="sliding-window"):
            attention._varlen(None, query, key, value, None, **arguments)
        return
    got, _ = attention._varlen(None, query, key, value, None, **arguments)
    torch.testing.assert_close(got, one_at_a_time(query, key, value, window))
    assert calls[0]["max_q"] == 9
    assert calls[0].get("is_causal", True)
