"""The frozen reference policy of the KL term.

In: micro-batches. Out: log-probabilities of their trainable tokens. With several ranks its parameters are partitioned like the
policy's; with `learner.offload_reference` they live on the host and visit the device block by block.
"""

from __future__ import annotations

from torch import Tensor

from async_search_rl.config.schema import Config
from learner.batch import MicroBatch
from learner.deepspeed_engine import freeze
from learner.loading import block_classes, load_policy
from learner.policy import PackedPolicy
from learner.ranks import Ranks


class Reference:
    """The reference policy; every call is collective where it is partitioned."""

    def __init__(self, policy: PackedPolicy, config: Config, ranks: Ranks) -> None:
        self._run = freeze(policy, block_classes(policy.model), config.learner, ranks)

    def __call__(self, micro: MicroBatch) -> Tensor:
        """Log-probabilities of the trainable tokens, float32 [N], without gradient."""
        logprobs_N: Tensor = self._run(micro.input_ids_T, micro.layout, micro.positions_N)[0]
        return logprobs_N


def build_reference(config: Config, ranks: Ranks) -> Reference | None:
    """The policy of `model.reference_path`, or the starting policy; ``None`` where there is no KL term."""
    if config.algorithm.kl_coef == 0:
        return None
    reference, start = (config.model.reference_path, "model.reference_path"), (config.model.path, "model.path")
    path, key = reference if reference[0] else start
    return Reference(load_policy(config, path, key, ranks, trained=False), config, ranks)
