"""New weights on their way to the actors: gathered between two steps, broadcast while the next one trains.

In: the policy after a step. Out: a staged copy on rank 0 for :class:`async_search_rl.weights.sender.WeightSender`, whose thread
brings it to the receivers. Gathering the partitioned parameters bucket by bucket is the only collective part and the only one that
training waits for.
"""

from __future__ import annotations

import time

from torch import Tensor, nn

from async_search_rl.config.replay import WeightsSection
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.plan import plan_buckets
from async_search_rl.weights.schema import TensorSpec
from async_search_rl.weights.sender import WeightSender
from learner.deepspeed_engine import Engine
from learner.ranks import Ranks


class Publisher:
    """Stages the policy's weights. ``sender`` is given on rank 0 alone, and nowhere where there are no actors.

    Args:
        engine: the policy.
        parameters: its parameters by their names in the transformers checkpoint.
        section: size of a bucket.
        ranks: the world.
        sender: started.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: dict[str, nn.Parameter],
        section: WeightsSection,
        ranks: Ranks,
        sender: WeightSender | None,
    ) -> None:
        self._engine, self._parameters, self._ranks, self._sender = engine, parameters, ranks, sender
        specs = [
            TensorSpec(name=name, shape=full_shape(p), dtype=str(p.dtype).removeprefix("torch.")) for name, p in parameters.items()
        ]
        self._plan = plan_buckets(specs, int(section.bucket_mib * 2**20))

    def stage(self, version: PolicyVersion) -> float:
        """Gather the weights, hand them to the sender as ``version``; seconds it took. Collective."""
        began = time.monotonic()
        staged = self._sender.acquire_buffers(self._plan, version.pack()) if self._sender is not None else None
        for bucket in self._plan:
            chosen = [self._parameters[spec.name] for spec in bucket]
            with self._engine.gathered(chosen):
                if staged is not None:
                    for spec, parameter in zip(bucket, chosen, strict=True):
                        staged.write(spec.name, parameter.detach())
        if self._sender is not None and staged is not None:
            self._sender.publish(staged)
        return time.monotonic() - began

    def collect(self) -> dict[str, Tensor]:
        """The whole policy on rank 0's host, by name; empty on the other ranks. Collective."""
        weights: dict[str, Tensor] = {}
        for bucket in self._plan:
            chosen = [self._parameters[spec.name] for spec in bucket]
            with self._engine.gathered(chosen):
                if self._ranks.first:
                    weights |= {spec.name: p.detach().cpu().clone() for spec, p in zip(bucket, chosen, strict=True)}
        return weights

    def figures(self) -> dict[str, float]:
        """Counters of the broadcasts since this start."""
        stats = self._sender.stats() if self._sender is not None else {}
        return {
            "publish_s": stats.get("broadcast_s", 0.0),
            "publications": stats.get("broadcasts", 0.0),
            "publications_aborted": stats.get("aborted", 0.0),
        }


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, also where only a partition is here."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
