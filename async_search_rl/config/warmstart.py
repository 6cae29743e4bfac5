"""Section of the supervised start (`bin/warmstart`)."""

from __future__ import annotations

from async_search_rl.config.types import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class WarmstartSection(Section, frozen=True):
    """Demonstrations, the model that imitates them, and how long. Prompt and observations are as `data` and `rollout` say."""

    data: str = ".cache/demo"
    """Folder that `bin/prepare demo` made: questions, entities, corpus and tokenizer."""
    base: str = ""
    """Model folder to start from; empty: a new Llama of the sizes below with the tokenizer of `data`."""
    out: str = "runs/warmstart"
    """Folder that receives the model."""
    demonstrations: Positive = 400_000
    """Demonstrations drawn."""
    two_hop_share: Fraction = 0.55
    """Share of demonstrations on two-hop questions."""
    renamed_share: Fraction = 0.8
    """Share of demonstrations whose entities are renamed, so that they can only be copied."""
    processes: NonNegative = 0
    """Processes that draw demonstrations; 0: one a core."""
    hidden_size: Positive = 128
    """Width of a new model."""
    intermediate_size: Positive = 352
    """Width of the feed-forward layers of a new model."""
    layers: Positive = 4
    """Transformer blocks of a new model."""
    head_dim: Positive = 32
    """Width of an attention head of a new model."""
    max_positions: Positive = 512
    """Longest context of a new model, tokens."""
    steps: Positive = 8000
    """Optimiser steps."""
    batch_size: Positive = 128
    """Demonstrations a step."""
    micro_batch_tokens: Positive = 65_536
    """Token slots, padding included, of one forward pass."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate; cosine decay to 3% of it."""
    warmup_steps: NonNegative = 100
    """Steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay."""
