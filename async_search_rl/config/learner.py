"""Sections read by the learner: algorithm, optimiser, engine, critic, checkpoints, guards."""

from __future__ import annotations

from typing import Literal

from async_search_rl.config.types import BelowOne, Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

ADVANTAGES = {
    "grpo": "learner.advantages:grpo",
    "dr_grpo": "learner.advantages:dr_grpo",
    "rloo": "learner.advantages:rloo",
    "reinforce_pp": "learner.advantages:reinforce_pp",
    "gae": "learner.advantages:gae",
    "vtrace": "learner.advantages:vtrace",
}
"""Advantage estimators: name and function. The learner imports the function when it starts, nobody else does."""

LOSSES = {
    "ppo": "learner.losses:ppo",
    "gspo": "learner.losses:gspo",
    "cispo": "learner.losses:cispo",
    "reinforce": "learner.losses:reinforce",
}
"""Policy losses, likewise."""

CORRECTIONS = {
    "none": "learner.corrections:none",
    "tis": "learner.corrections:tis",
    "mis": "learner.corrections:mis",
    "icepop": "learner.corrections:icepop",
}
"""Off-policy corrections, likewise."""


class AlgorithmSection(Section, frozen=True):
    """Advantages, loss and off-policy correction, by their papers' names."""

    advantage: str = "grpo"
    """Advantage estimator: grpo, dr_grpo, rloo, reinforce_pp, gae, vtrace (these two need the critic), or `module:function`."""
    whiten: bool = False
    """Shift and scale advantages to mean 0 and variance 1 over the trainable tokens of the batch (`reinforce_pp` always does)."""
    gamma: Fraction = 1.0
    """Discount of `gae`, `vtrace` and `reinforce_pp`."""
    lam: Fraction = 1.0
    """Lambda of GAE."""
    rho_bar: PositiveFloat = 1.0
    """V-trace clip of the importance weight of the temporal difference."""
    c_bar: PositiveFloat = 1.0
    """V-trace clip of the trace coefficient."""
    loss: str = "ppo"
    """Policy loss: ppo, gspo, cispo or reinforce, or `module:function`."""
    clip_low: NonNegativeFloat = 0.2
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: NonNegativeFloat = 0.0
    """Dual-clip constant of `ppo` (> 1) for negative advantages; 0: off."""
    proximal: Literal["recompute", "behaviour"] = "recompute"
    """Proximal policy: the learner's at the start of the step (decoupled PPO), or the behaviour policy (plain PPO)."""
    correction: str = "tis"
    """Weight from behaviour to proximal policy: none, tis (truncated), mis (masked) or icepop (masked), or `module:function`."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio a token, its product over the trajectory, or the geometric mean."""
    correction_low: NonNegativeFloat = 0.5
    """Lower bound of `mis` and `icepop`."""
    correction_high: PositiveFloat = 2.0
    """Cap C of `tis`; upper bound of `mis` and `icepop`."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Denominator of the loss over the whole batch: trainable tokens, trajectories (of each one's mean), or a constant length."""
    constant_tokens: Positive = 1024
    """Tokens a trajectory that `constant` divides by (Dr. GRPO)."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the reference policy; 0: no reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term goes."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    minibatches: Positive = 1
    """Optimiser steps a batch; with one, clipping is inert."""


class OptimizerSection(Section, frozen=True):
    """AdamW and its schedule."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate of the policy."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegative = 0
    """Optimiser steps of linear warm-up."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a share of all steps; used where `warmup_steps` is 0."""
    min_lr_ratio: Fraction = 0.0
    """Floor of `linear` and `cosine`, as a share of the peak."""
    beta1: BelowOne = 0.9
    """AdamW beta 1."""
    beta2: BelowOne = 0.95
    """AdamW beta 2."""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay (matrices only)."""
    grad_clip: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""


class LearnerSection(Section, frozen=True):
    """The DeepSpeed engine and the train loop."""

    micro_batch_tokens: Positive = 16384
    """Token budget of one packed micro-batch; a longer trajectory has one to itself."""
    logits_chunk_tokens: NonNegative = 2048
    """Tokens whose logits exist at a time; 0: all."""
    attention: Literal["auto", "varlen", "flex", "segments", "sdpa"] = "auto"
    """Attention over packed trajectories: a varlen kernel, flex attention, one call a trajectory, or a mask (the reference)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """DeepSpeed ZeRO stage."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where optimiser state lives between steps."""
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """Where ZeRO-3 parameters live between uses."""
    offload_reference: Literal["none", "cpu"] = "none"
    """Where the reference policy of the KL term lives between uses."""
    nvme_path: str = ""
    """Folder for NVMe off-load."""
    compile: bool = False
    """Compile the transformer blocks."""
    leaf_modules: bool = True
    """Gather a whole transformer block at once instead of each of its modules (ZeRO-3)."""
    gather_whole_below: NonNegative = 500_000_000
    """Models of fewer elements are gathered once for a whole optimiser step (ZeRO-3 without off-load); 0: none."""
    persist_params_below: NonNegative = 10_000
    """ZeRO-3 keeps parameters of fewer elements whole."""
    skip_nonfinite: bool = True
    """Skip a step whose loss or gradient is not finite and save the groups; false: stop."""
    batch_timeout_s: PositiveFloat = 1800.0
    """Seconds the learner waits for a batch before it stops and says who was silent."""
    device_memory_gib: NonNegativeFloat = 0.0
    """Memory the start-up plan may use on a device; 0: what the device has."""

    def gathers_whole(self, parameters: int) -> bool:
        """Whether a model of so many elements is gathered once for a whole optimiser step."""
        offloaded = self.offload_params != "none" or self.offload_optimizer != "none"
        return self.zero_stage == 3 and not offloaded and parameters < self.gather_whole_below


class CriticSection(Section, frozen=True):
    """Value model of `gae` and `vtrace`."""

    path: str = ""
    """Backbone folder; empty: the policy's starting weights."""
    lr: PositiveFloat = 1e-5
    """Learning rate."""
    warmup_steps: NonNegative = 0
    """Optimiser steps of linear warm-up."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a share of all steps; used where `warmup_steps` is 0."""
    value_clip: NonNegativeFloat = 0.5
    """Clip range of the value update; 0: off."""
    policy_delay_steps: NonNegative = 0
    """Steps that train the critic alone at the start."""


class CheckpointSection(Section, frozen=True):
    """What is written, when, and how much is kept."""

    every: NonNegative = 50
    """Trained batches between two checkpoints; 0: only at the end."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out exact match too."""
    copy_to: str = ""
    """Folder to which finished checkpoints are copied in the background; empty: none."""
    export_at_end: bool = True
    """Write the final policy as a transformers folder."""


class GuardSection(Section, frozen=True):
    """Bounds that stop or roll back a run gone wrong. 0 turns a bound off."""

    action: Literal["stop", "rollback"] = "stop"
    """What happens when a bound is left for `patience` steps in a row."""
    patience: Positive = 3
    """Steps in a row outside the bounds."""
    max_kl: NonNegativeFloat = 0.0
    """Largest KL(behaviour, current), nats a token."""
    min_entropy: NonNegativeFloat = 0.0
    """Smallest entropy, nats a token."""
    min_ess: Fraction = 0.0
    """Smallest effective sample size, share of the trainable tokens."""
