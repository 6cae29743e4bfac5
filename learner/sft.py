"""Supervised start: a causal language model imitates demonstrations before reinforcement learning.

In: a :class:`~async_search_rl.supervised.SupervisedSet` and a model (an existing one, or a new small Llama). Out: the trained
model. Plain torch on one device. A step is the mean cross-entropy over all trained tokens of its batch, computed in
micro-batches of sequences of like length; how the batch is split changes memory and padding, not the gradient.

Dimensions: B sequences of a micro-batch, T tokens, N trained tokens.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from async_search_rl.config.warmstart import WarmstartSection
from async_search_rl.supervised import SupervisedSet

MIN_LR_RATIO = 0.03
"""Floor of the cosine schedule, as a share of the peak."""
REPORT_EVERY = 100
"""Steps between two progress reports."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files that make up a tokenizer, as far as a folder has them."""


def new_llama(settings: WarmstartSection, tokenizer: Any, seed: int) -> Any:
    """A randomly initialised Llama with tied embeddings, of the sizes in ``settings``, for ``tokenizer``'s vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = settings.hidden_size // settings.head_dim
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_positions,
        rms_norm_eps=1e-6,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def imitate(
    model: Any, data: SupervisedSet, settings: WarmstartSection, seed: int, report: Callable[[int, float], None] | None = None
) -> None:
    """Train ``model`` in place for `settings.steps` steps; ``report(step, mean loss in nats a token)`` every 100 steps.

    Sequences are drawn without replacement, epoch after epoch, in an order that follows from ``seed``.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=device.type == "cuda"
    )
    model.train()
    losses: list[torch.Tensor] = []
    for step, batch in enumerate(_batches(len(data), settings.batch_size, settings.steps, seed), start=1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * schedule(step, settings.steps, settings.warmup_steps)
        losses.append(backward(model, data, batch, settings.micro_batch_tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if report and (step % REPORT_EVERY == 0 or step == settings.steps):
            report(step, float(torch.stack(losses).mean()))
            losses.clear()
    model.eval()


def backward(model: Any, data: SupervisedSet, batch: Sequence[int], slots: int) -> torch.Tensor:
    """Add the gradient of the batch's mean cross-entropy over trained tokens; returns that mean, detached, shape ()."""
    device = next(model.parameters()).device
    trained_tokens = sum(int(data[index][1][1:].sum()) for index in batch)
    total = torch.zeros((), device=device)
    for members in micro_batches([int(data.lengths[index]) for index in batch], slots):
        ids_BT, trained_BT = _padded([data[batch[member]] for member in members])
        ids_BT, trained_BT = ids_BT.to(device), trained_BT.to(device)
        hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
        logits_NV = model.lm_head(hidden_BTD[trained_BT[:, 1:]]).float()
        loss = F.cross_entropy(logits_NV, ids_BT[:, 1:][trained_BT[:, 1:]], reduction="sum") / max(1, trained_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


def micro_batches(lengths: Sequence[int], slots: int) -> list[list[int]]:
    """Indices of sequences that run together, longest first: count times longest is at most ``slots`` (a longer one runs alone)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= slots:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def schedule(step: int, steps: int, warmup_steps: int) -> float:
    """Share of the peak learning rate at ``step`` (from 1): linear warm-up, then a cosine to :data:`MIN_LR_RATIO`."""
    if step <= warmup_steps:
        return step / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return MIN_LR_RATIO + (1 - MIN_LR_RATIO) * 0.5 * (1 + math.cos(math.pi * done))


def save(model: Any, tokenizer_folder: Path, folder: Path) -> None:
    """Write ``model`` in half precision, with the tokenizer files of ``tokenizer_folder``, as a transformers folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    model.cpu().half().save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file() and tokenizer_folder != folder:
            shutil.copyfile(tokenizer_folder / name, folder / name)


def _batches(count: int, size: int, steps: int, seed: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(seed)
    waiting: list[int] = []
    for _ in range(steps):
        while len(waiting) < size:
            waiting += rng.permutation(count).tolist()
        yield waiting[:size]
        del waiting[:size]


def _padded(rows: Sequence[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and trained masks padded on the right, where a causal model needs no attention mask: padding is never attended to."""
    longest = max(len(ids) for ids, _ in rows)
    ids_BT = np.zeros((len(rows), longest), np.int64)
    trained_BT = np.zeros((len(rows), longest), np.bool_)
    for row, (ids, trained) in enumerate(rows):
        ids_BT[row, : len(ids)] = ids
        trained_BT[row, : len(trained)] = trained
    return torch.from_numpy(ids_BT), torch.from_numpy(trained_BT)
