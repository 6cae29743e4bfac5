"""The whole configuration, and the combinations that cannot work.

Derived limits are properties here, never second settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from async_search_rl.config.learner import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    AlgorithmSection,
    CheckpointSection,
    CriticSection,
    GuardSection,
    LearnerSection,
    OptimizerSection,
)
from async_search_rl.config.replay import ReplaySection, WeightsSection
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.config.rollout import GeneratorSection, RewardSection, RolloutSection
from async_search_rl.config.run import DataSection, LaunchSection, LoggingSection, ModelSection, RunSection, SecuritySection
from async_search_rl.config.types import Section
from async_search_rl.config.warmstart import WarmstartSection
from async_search_rl.errors import ConfigError

GROUP_BASELINES = ("grpo", "dr_grpo", "rloo")
CRITIC_ADVANTAGES = ("gae", "vtrace")


class Config(Section, frozen=True):
    """One run, as one TOML file describes it."""

    run: RunSection = msgspec.field(default_factory=RunSection)
    model: ModelSection = msgspec.field(default_factory=ModelSection)
    data: DataSection = msgspec.field(default_factory=DataSection)
    rollout: RolloutSection = msgspec.field(default_factory=RolloutSection)
    reward: RewardSection = msgspec.field(default_factory=RewardSection)
    generator: GeneratorSection = msgspec.field(default_factory=GeneratorSection)
    retrieval: RetrievalSection = msgspec.field(default_factory=RetrievalSection)
    replay: ReplaySection = msgspec.field(default_factory=ReplaySection)
    weights: WeightsSection = msgspec.field(default_factory=WeightsSection)
    algorithm: AlgorithmSection = msgspec.field(default_factory=AlgorithmSection)
    optimizer: OptimizerSection = msgspec.field(default_factory=OptimizerSection)
    learner: LearnerSection = msgspec.field(default_factory=LearnerSection)
    critic: CriticSection = msgspec.field(default_factory=CriticSection)
    checkpoint: CheckpointSection = msgspec.field(default_factory=CheckpointSection)
    guard: GuardSection = msgspec.field(default_factory=GuardSection)
    logging: LoggingSection = msgspec.field(default_factory=LoggingSection)
    security: SecuritySection = msgspec.field(default_factory=SecuritySection)
    launch: LaunchSection = msgspec.field(default_factory=LaunchSection)
    warmstart: WarmstartSection = msgspec.field(default_factory=WarmstartSection)

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.algorithm.advantage in CRITIC_ADVANTAGES

    @property
    def filters_uniform_groups(self) -> bool:
        """Whether the replay service drops groups of equal rewards: only where they carry no gradient at all."""
        a = self.algorithm
        return (
            self.replay.filter_uniform
            and a.advantage in GROUP_BASELINES
            and self.rollout.group_size > 1
            and a.kl_coef == 0
            and a.entropy_coef == 0
        )

    @property
    def min_valid_members(self) -> int:
        """Fewest valid trajectories with which a group can be trained."""
        return 2 if self.algorithm.advantage in GROUP_BASELINES else 1

    @property
    def max_trajectory_tokens(self) -> int:
        """Longest trajectory, prompt included."""
        return self.rollout.max_context_tokens


def check(config: Config) -> list[str]:
    """Refuse impossible combinations; return warnings.

    Raises:
        ConfigError: naming the keys that cannot work together and their values.
    """
    _check_names(config)
    _check_rollout(config)
    _check_algorithm(config)
    _require(
        config.weights.publish_every <= config.replay.max_staleness + 1,
        f"weights.publish_every must be <= replay.max_staleness + 1 ({config.replay.max_staleness + 1})",
        config.weights.publish_every,
    )
    warnings = []
    if config.rollout.top_p < 1:
        warnings.append(f"rollout.top_p = {config.rollout.top_p}: truncated sampling biases importance ratios; 1.0 is unbiased")
    if config.rollout.ignore_eos:
        warnings.append("rollout.ignore_eos = true: meant for throughput measurements, not for training")
    return warnings


def _check_names(c: Config) -> None:
    name = c.run.name
    _require(name == Path(name).name and name not in ("", ".."), "run.name must be the name of one folder", name)
    urls = [("replay.url", c.replay.url), *(("retrieval.url", url) for url in c.retrieval.url.split(","))]
    for key, url in urls:
        _require(not url.strip() or _is_address(url.strip()), f"{key} must be http://host:port", url)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_rollout(c: Config) -> None:
    r = c.rollout
    _require(r.temperature > 0, "rollout.temperature must be > 0 in training", r.temperature)
    _require(
        r.max_prompt_tokens < r.max_context_tokens,
        f"rollout.max_prompt_tokens must be < rollout.max_context_tokens ({r.max_context_tokens})",
        r.max_prompt_tokens,
    )
    _require(r.topk <= c.retrieval.max_topk, f"rollout.topk must be <= retrieval.max_topk ({c.retrieval.max_topk})", r.topk)
    _require(
        c.data.prompt == "dataset" or "{question}" in c.data.template, "data.template must contain {question}", c.data.template
    )
    weights = (c.reward.exact_match, c.reward.f1, c.reward.format)
    _require(any(weights), "one of reward.exact_match, reward.f1 and reward.format must not be 0", weights)


def _check_algorithm(c: Config) -> None:
    a = c.algorithm
    for key, table in (("advantage", ADVANTAGES), ("loss", LOSSES), ("correction", CORRECTIONS)):
        name = getattr(a, key)
        _require(name in table or ":" in name, f"algorithm.{key} must be one of {', '.join(map(repr, table))}", name)
    if a.advantage in GROUP_BASELINES:
        _require(
            c.rollout.group_size > 1,
            f"rollout.group_size must be >= 2 with algorithm.advantage = {a.advantage!r}",
            c.rollout.group_size,
        )
    if a.advantage == "vtrace":
        _require(
            a.correction == "none",
            "algorithm.correction must be 'none' with advantage = 'vtrace', which has its own weights",
            a.correction,
        )
        _require(
            a.proximal == "recompute",
            "algorithm.proximal must be 'recompute' with advantage = 'vtrace', whose weights are from behaviour to proximal policy",
            a.proximal,
        )
    if a.proximal == "behaviour":
        _require(
            a.correction == "none",
            "algorithm.correction must be 'none' with proximal = 'behaviour', whose weight is 1",
            a.correction,
        )
    if a.loss == "gspo":
        _require(
            a.correction == "none" or a.correction_level != "token",
            "algorithm.correction_level must be 'sequence' or 'geometric' with loss = 'gspo'",
            a.correction_level,
        )
    if a.correction in ("mis", "icepop"):
        _require(
            a.correction_low < a.correction_high,
            f"algorithm.correction_low must be < correction_high ({a.correction_high})",
            a.correction_low,
        )
    _require(a.dual_clip == 0 or a.dual_clip > 1, "algorithm.dual_clip must be 0 or > 1", a.dual_clip)
    _require(a.clip_low < 1, "algorithm.clip_low must be < 1", a.clip_low)
    _require(
        a.minibatches <= c.replay.batch_groups,
        f"algorithm.minibatches must be <= replay.batch_groups ({c.replay.batch_groups})",
        a.minibatches,
    )
    _require(
        c.learner.zero_stage > 0 or c.model.dtype == "float32",
        "learner.zero_stage must be >= 1 with model.dtype = 'bfloat16', for float32 master weights",
        c.learner.zero_stage,
    )
    nvme = "nvme" in (c.learner.offload_optimizer, c.learner.offload_params)
    _require(not nvme or c.learner.nvme_path != "", "learner.nvme_path must be set with off-load to nvme", c.learner.nvme_path)
    _require(
        c.learner.offload_params == "none" or c.learner.zero_stage == 3,
        "learner.zero_stage must be 3 with learner.offload_params",
        c.learner.zero_stage,
    )


def _require(condition: bool, must: str, got: Any) -> None:
    if not condition:
        raise ConfigError(f"{must}, got {got!r}")
