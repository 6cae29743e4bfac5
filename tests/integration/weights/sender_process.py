"""A learner in a process of its own that publishes once and freezes before its second bucket.

Prints {"event": "serving", "url"} and, once a receiver holds the first bucket, {"event": "stalled"}.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from async_search_rl.config.replay import WeightsSection
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.groups import GlooGroup
from async_search_rl.weights.plan import plan_buckets
from async_search_rl.weights.schema import TensorSpec
from async_search_rl.weights.sender import WeightSender

SPECS = [TensorSpec(name=f"layer.{i}", shape=(512, 512), dtype="float32") for i in range(8)]


def freeze_before_the_second_bucket() -> None:
    start = GlooGroup.start
    started = []

    def start_once(group: GlooGroup, flat: torch.Tensor, timeout_s: float) -> Any:
        if started:
            started[0].wait()
            print(json.dumps({"event": "stalled"}), flush=True)
            time.sleep(3600)
        started.append(start(group, flat, timeout_s))
        return started[0]

    GlooGroup.start = start_once  # type: ignore[method-assign]


def main() -> None:
    freeze_before_the_second_bucket()
    sender = WeightSender(WeightsSection(deadline_s=120.0), None)
    sender.start()
    staged = sender.acquire_buffers(plan_buckets(SPECS, 1 << 20), PolicyVersion(1, 7).pack())
    for spec in SPECS:
        staged.write(spec.name, torch.ones(spec.shape))
    sender.publish(staged)
    print(json.dumps({"event": "serving", "url": sender.url}), flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
