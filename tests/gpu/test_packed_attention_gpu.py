"""Packed attention's CUDA kernels against the explicit mask, forward and backward; memory of chunked log-probabilities."""

import pytest
import torch

from learner import attention
from learner.attention import PackedLayout
from learner.logprobs import chunked_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (130, 1, 700, 64, 333)
BACKENDS = {"varlen": attention._varlen, "flex": attention._flex, "segments": attention._segments}


def run(backend, dtype: torch.dtype, kv_heads: int, window: int | None) -> list[torch.Tensor]:
    """Output and the gradients of query, key and value, in float32."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    # Rounded to bfloat16 for every dtype, so that only the kernels' own arithmetic differs.
    inputs = [torch.randn(1, heads, tokens, 64, device="cuda").bfloat16().to(dtype) for heads in (8, kv_heads, kv_heads)]
    inputs = [x.requires_grad_(True) for x in inputs]
    layout = PackedLayout.of(LENGTHS, "cuda")
    output, _ = backend(None, *inputs, None, scaling=0.1, sliding_window=window, packing=layout)
    torch.manual_seed(1)
    (output.float() * torch.randn(output.shape, device="cuda")).sum().backward()
    return [output.float(), *(x.grad.float() for x in inputs)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("varlen", torch.bfloat16), ("flex", torch.bfloat16), ("flex", torch.float32), ("segments", torch.float32)],
)
def test_kernels_agree_with_the_explicit_mask(backend: str, dtype: torch.dtype, kv_heads: int, window: int | None) -> None:
    if backend == "varlen" and window is not None and "window_size" not in attention._VARLEN_PARAMETERS:
        pytest.skip("this torch's varlen_attn has no window")
    got = run(BACKENDS[backend], dtype, kv_heads, window)
    reference = run(attention._sdpa, torch.float32, kv_heads, window)
    tolerance = 0.06 if dtype == torch.bfloat16 else 5e-3
    for ours, theirs in zip(got, reference, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < tolerance


def test_chunked_logprobs_at_32k_tokens_and_a_152k_vocabulary_stay_small() -> None:
    tokens, vocab, hidden = 32768, 151936, 1536
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16)).requires_grad_(True)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropy = chunked_logprobs(states, weight, targets, chunk_tokens=2048)
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert torch.isfinite(logprobs).all()
    assert peak < 0.3 * tokens * vocab * 4, (
        f"peak {peak / 2**30:.1f} GiB, whole float32 logits {tokens * vocab * 4 / 2**30:.1f} GiB"
    )
