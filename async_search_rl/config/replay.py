"""Sections about tickets, replay and the weight channel."""

from __future__ import annotations

from typing import Literal

from async_search_rl.config.types import NonNegative, NonNegativeFloat, Port, Positive, PositiveFloat, Section


class ReplaySection(Section, frozen=True):
    """The replay service. Sizes count groups unless they say otherwise."""

    url: str = ""
    """Address of a running service; empty: `bin/launch` or `bin/learner` starts one on `host:port`."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: Port = 0
    """Port to bind; 0: a free one, announced in the run's folder."""
    batch_groups: Positive = 64
    """Groups a training step (B)."""
    max_staleness: NonNegative = 1
    """Most trained batches between the oldest trainable token of a group and the step that trains it (eta)."""
    max_inflight: Positive = 1024
    """Most groups running at once over all actors."""
    lease_s: PositiveFloat = 60.0
    """Seconds without a renewal after which a lease runs out."""
    poll_s: PositiveFloat = 30.0
    """Longest long poll."""
    max_attempts: Positive = 3
    """Attempts at a ticket before its question is parked."""
    filter_uniform: bool = True
    """Drop groups whose rewards are all equal, where they carry no gradient."""
    max_filtered_in_row: Positive = 512
    """Consecutive filtered groups after which the run stops and says why."""
    segment_mib: Positive = 256
    """Size of one segment of the trajectory log."""
    max_group_mib: Positive = 64
    """Size cap of one group on the wire."""
    eval_every: NonNegative = 0
    """Trained batches between two evaluations; 0: only before the first and after the last step."""
    eval_at_start: bool = True
    """Evaluate the starting policy."""
    eval_timeout_s: PositiveFloat = 600.0
    """Seconds an evaluation may take; what is missing then is reported as missing."""


class WeightsSection(Section, frozen=True):
    """The weight channel from the learner to the engines."""

    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """`gloo` (CPU), `nccl` (between devices), `ipc` (one device); `auto` chooses by where the two sides are."""
    staging: Literal["device", "host"] = "device"
    """Where each engine worker has its buffer for all the weights it receives; a swap from `host` memory takes longer."""
    host: str = "127.0.0.1"
    """Address the learner's first rank binds for control and rendezvous."""
    port: Port = 0
    """Control port; 0: a free one."""
    bucket_mib: PositiveFloat = 64.0
    """MiB of one bucket; at most two are held beyond the staged copy."""
    publish_every: Positive = 1
    """Trained batches between two publications."""
    deadline_s: PositiveFloat = 120.0
    """Seconds a broadcast may take before it is aborted and its group rebuilt without the silent members."""
    join_grace_s: NonNegativeFloat = 0.2
    """Seconds a publication waits for receivers that are about to poll."""
