"""Sections read by actors: the agent loop, the reward, and the inference engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from async_search_rl.config.types import Niceness, NonNegative, NonNegativeFloat, Positive, PositiveFloat, PositiveFraction, Section


class RolloutSection(Section, frozen=True):
    """One question's episode. Lengths are in tokens; defaults are Search-R1's."""

    group_size: Positive = 8
    """Trajectories a question (G)."""
    max_turns: NonNegative = 4
    """Searches an episode may make; one last generation without search follows."""
    max_prompt_tokens: Positive = 2048
    """Longest prompt; a longer one is refused, naming the question."""
    max_turn_tokens: Positive = 500
    """Most tokens sampled in one turn."""
    max_observation_tokens: Positive = 500
    """Most tokens of one observation; whole passages are left out to fit, the closing tag is kept."""
    max_context_tokens: Positive = 4096
    """Most tokens of prompt, turns and observations together."""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Sampling temperature of training episodes; behaviour log-probabilities are after temperature. 0 is refused for training."""
    eval_temperature: NonNegativeFloat = 1.0
    """Sampling temperature of evaluation episodes; 0 is greedy."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling; below 1 biases importance ratios and is warned about."""
    ignore_eos: bool = False
    """Go on past an end-of-sequence token (throughput measurements only)."""
    topk: Positive = 3
    """Passages a search."""
    running_groups: Positive = 16
    """Groups one generator rolls out at the same time."""
    running_evaluations: Positive = 64
    """Evaluation episodes one generator runs at the same time."""
    evaluation_hold_s: NonNegativeFloat = 120.0
    """Most seconds that new weights wait for running evaluations, which are sampled by one version only."""
    action_tokens: Literal["text", "special"] = "text"
    """`text`: tags are found in decoded text; `special`: each tag is one vocabulary token."""
    space_after_tag: bool = False
    """Insert observations with a blank after the opening tag and before each title, as small vocabularies want it."""


class RewardSection(Section, frozen=True):
    """Reward of an episode: the weighted sum of its parts, each in [0, 1]."""

    exact_match: float = 1.0
    """Weight of exact match with any target after SQuAD normalisation."""
    f1: float = 0.0
    """Weight of the best token F1 over the targets."""
    format: float = 0.0
    """Weight of a well-formed trajectory: balanced tags, every turn with one action, a final answer."""


class GeneratorSection(Section, frozen=True):
    """One vLLM engine a generator process."""

    processes: Positive = 1
    """Generator processes a node."""
    tensor_parallel: Positive = 1
    """Devices one engine spans."""
    max_num_seqs: Positive = 128
    """Most sequences an engine runs at once."""
    kv_cache_gib: PositiveFloat = 1.0
    """GiB of KV cache an engine."""
    enforce_eager: bool = False
    """No compilation or CUDA graphs; always on where there is no GPU."""
    block_size: NonNegative = 0
    """Tokens a KV block (on CPU a multiple of 32); 0: the engine decides."""
    attention_backend: str = ""
    """vLLM attention backend by name; empty: the engine decides."""
    threads: NonNegative = 0
    """CPU threads an engine; 0: the engine decides."""
    niceness: Niceness = 0
    """Niceness (0 to 19) of a generator that shares cores with the learner; above 0, training comes first where it takes longer."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds an engine may take to start."""
    stall_timeout_s: PositiveFloat = 300.0
    """Seconds that an engine with requests may go without a token before it counts as dead."""
    start_stagger_s: NonNegativeFloat = 6.0
    """Seconds between the starts of two engines on one device."""
    devices: list[int] = msgspec.field(default_factory=list)
    """GPUs the engines use, in turn; empty: all that are visible."""
    restart_limit: NonNegative = 3
    """Restarts of one generator process before the actor gives up."""
