"""Models of known shapes with random weights, made-up batches, and the plain torch loop: material of the learner's benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from async_search_rl.config.learner import AlgorithmSection, OptimizerSection
from async_search_rl.trajectory import NO_VERSION, Group, Trajectory, Turn
from learner.batch import Batch, MicroBatch, batch_from_groups, micro_batch
from learner.losses import TokenBatch, policy_loss
from learner.packing import pack

SHAPES: dict[str, dict[str, Any]] = {
    "demo": {"hidden": 128, "layers": 4, "heads": 4, "kv": 4, "ffn": 352, "vocab": 4096, "mean_tokens": 110},
    "deep": {"hidden": 320, "layers": 30, "heads": 5, "kv": 5, "ffn": 320, "vocab": 512, "mean_tokens": 24},
    "135m": {"hidden": 576, "layers": 30, "heads": 9, "kv": 3, "ffn": 1536, "vocab": 49152, "mean_tokens": 1200},
    "1.5b": {"hidden": 1536, "layers": 28, "heads": 12, "kv": 2, "ffn": 8960, "vocab": 151936, "mean_tokens": 1200},
}
"""The demo's policy; one so narrow that the host is the bottleneck, as with short kernels on a GPU; SmolLM2-135M; Qwen2.5-1.5B."""
_TURNS = 3
_TRAINABLE = 0.3


def make_model(shape: str, device: torch.device, dtype: torch.dtype, checkpointing: bool) -> Any:
    """A transformers causal LM with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=s["hidden"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"],
        intermediate_size=s["ffn"],
        vocab_size=s["vocab"],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_batch(shape: str, tokens: int, seed: int = 0) -> Batch:
    """About ``tokens`` tokens of made-up episodes of three turns; lengths are log-normal, a third of the tokens is trainable."""
    rng, s, made = np.random.default_rng(seed), SHAPES[shape], []
    total = 0
    while total < tokens:
        length = int(np.clip(rng.lognormal(np.log(s["mean_tokens"]), 0.5), 24, 4 * s["mean_tokens"]))
        total += length
        made.append(_episode(rng, length, s["vocab"], float(len(made) % 2)))
    group = Group(ticket=0, attempt=1, question_id="q", actor="benchmark", trajectories=tuple(made))
    return batch_from_groups([group])


def make_micro_batches(batch: Batch, budget: int, device: torch.device) -> list[MicroBatch]:
    """The batch packed into rows of at most ``budget`` tokens."""
    plan = pack(batch.lengths_S.tolist(), budget)
    return [micro_batch(batch, members, device) for members in plan.ranks[0]]


def micro_loss(batch: Batch, micro: MicroBatch, logprobs: tuple[Tensor, Tensor]) -> Tensor:
    """This micro-batch's share of a policy loss with made-up advantages."""
    advantages_N = micro.pick(np.cos(np.arange(batch.trainable_tokens)))
    tokens = TokenBatch(
        current_N=logprobs[0],
        behaviour_N=micro.pick(batch.behaviour_N),
        advantages_N=advantages_N,
        sequence_N=micro.sequence_N,
        sequences=len(micro.members),
        weights_N=torch.ones_like(advantages_N),
        entropy_N=logprobs[1],
    )
    return policy_loss(tokens, AlgorithmSection()).loss / batch.trainable_tokens


class PlainLoop:
    """The same training without DeepSpeed: float32 master weights where the weights are 16-bit, fused AdamW, clipping."""

    def __init__(self, module: nn.Module, optimizer: OptimizerSection) -> None:
        self.module = module
        self._clip = optimizer.grad_clip
        self._weights = [p for p in module.parameters() if p.requires_grad]
        self._mixed = self._weights[0].dtype != torch.float32
        self._masters = [p.detach().float().clone() for p in self._weights] if self._mixed else self._weights
        self._adamw = torch.optim.AdamW(self._masters, lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), fused=True)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient; 16-bit ones are added up in float32."""
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._mixed:
            return
        gradients = [p.grad for p in self._weights]
        if self._masters[0].grad is None:
            for master, gradient in zip(self._masters, gradients, strict=True):
                master.grad = gradient.float() if gradient is not None else torch.zeros_like(master)
        else:
            torch._foreach_add_([m.grad for m in self._masters], gradients)  # type: ignore[arg-type]
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Clip, AdamW, copy the masters back."""
        torch.nn.utils.clip_grad_norm_(self._masters, self._clip, foreach=True)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if self._mixed:
            torch._foreach_copy_(self._weights, self._masters)

    def __call__(self, *args: Any) -> Any:
        """Run the module."""
        return self.module(*args)


def padded_rows(batch: Batch, slots: int, device: torch.device) -> list[tuple[Tensor, Sequence[int]]]:
    """The batch as padded rows of like length, ``count * longest <= slots``: ids [B, T] and the trajectories in them."""
    order, rows = np.argsort(-batch.lengths_S, kind="stable"), []
    at = 0
    while at < len(order):
        longest = int(batch.lengths_S[order[at]])
        members = [int(i) for i in order[at : at + max(1, slots // longest)]]
        ids_BT = np.zeros((len(members), longest), dtype=np.int64)
        for row, i in enumerate(members):
            ids_BT[row, : batch.lengths_S[i]] = batch.trajectories[i].token_ids
        rows.append((torch.from_numpy(ids_BT).to(device), members))
        at += len(members)
    return rows


def _episode(rng: np.random.Generator, length: int, vocabulary: int, reward: float) -> Trajectory:
    mask, turns = np.zeros(length, dtype=bool), []
    for turn in range(_TURNS):
        end = length * (turn + 1) // _TURNS
        start = end - max(1, int(length * _TRAINABLE / _TURNS))
        mask[start:end] = True
        search = turn < _TURNS - 1
        turns.append(Turn(start=start, end=end, action="search" if search else "answer", query="q" if search else None))
    return Trajectory(
        token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        versions=np.where(mask, 0, NO_VERSION).astype(np.int64),
        prompt_length=turns[0].start,
        turns=tuple(turns),
        reward=reward,
        outcome="answered",
    )
