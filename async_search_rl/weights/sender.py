"""The learner's side of the weight channel: takes staged copies, brings each to every receiver, and never makes the learner wait.

In: ``acquire_buffers`` gives the learner's main thread a copy to fill, ``publish`` queues it and returns. Out: offers to receivers
(:mod:`async_search_rl.weights.control`) and broadcasts (:mod:`async_search_rl.weights.delivery`). One broadcast thread waits for a
publication or for a receiver that is behind, and serves all who wait at once. Only the newest version is ever sent.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from async_search_rl.config.replay import WeightsSection
from async_search_rl.errors import ConfigError, WeightSyncError
from async_search_rl.http import require_safe_bind
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.control import ControlServer
from async_search_rl.weights.delivery import Delivery, Outcome, discard
from async_search_rl.weights.device import device_name, use_side_stream
from async_search_rl.weights.groups import BroadcastGroup
from async_search_rl.weights.ipc import export_handle
from async_search_rl.weights.registry import Registry, worker_devices
from async_search_rl.weights.rendezvous import serve_store
from async_search_rl.weights.schema import Offer, OfferRequest
from async_search_rl.weights.staging import Plan, StagedWeights, StagingPool
from async_search_rl.weights.transport import CPU, GroupPlan, Member, choose_transport, plan_groups

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
_EPOCH_BITS = 30
GroupKey = tuple[str, tuple[tuple[str, int], ...]]


class WeightSender:
    """Publishes staged weights, which live on ``device``. Start it before the first publication, close it at the end."""

    def __init__(self, section: WeightsSection, token: str | None, device: torch.device | str = "cpu") -> None:
        self._section = section
        self._token = token
        self._device = torch.device(device)
        self._device_name = device_name(self._device)
        if section.transport in ("nccl", "ipc") and self._device_name == CPU:
            raise ConfigError(f"weights.transport must be 'auto' or 'gloo' for a learner on the CPU, got {section.transport!r}")
        self._changed = threading.Condition()
        self._registry = Registry(self._changed)
        self._pool = StagingPool(self._changed, self._device)
        self._control = ControlServer(self._registry, self._admit, self.status, token)
        self._groups: dict[GroupKey, tuple[int, BroadcastGroup]] = {}
        self._next_epoch = secrets.randbits(_EPOCH_BITS) << _EPOCH_BITS
        self._stats: dict[str, float] = dict.fromkeys(
            ("published", "superseded", "broadcasts", "aborted", "members", "epoch", "broadcast_s", "megabytes_per_s"), 0.0
        )
        self._closing = False
        self._store: TCPStore | None = None
        self._thread: threading.Thread | None = None
        self.url = ""
        """Address of the control server, once started."""

    def start(self) -> None:
        """Bind the control server and the store, and start the broadcast thread.

        Raises:
            ConfigError: the bind is unsafe without a token, or the port is busy.
        """
        require_safe_bind(self._section.host, self._token)
        self._store = serve_store(self._section.host)
        self.url = self._control.start(self._section.host, self._section.port)
        self._thread = threading.Thread(target=self._run, name="weights-broadcast", daemon=True)
        self._thread.start()

    def acquire_buffers(self, plan: Plan, version: int) -> StagedWeights:
        """A staged copy to be filled with ``version`` (packed); never the one that is being sent. Never blocks.

        There are two copies: if one is being sent and the other is queued, the queued publication gives its copy up (superseded).

        Raises:
            WeightSyncError: ``version`` is not newer than the last one published.
        """
        return self._pool.acquire(plan, version)

    def publish(self, staged: StagedWeights) -> None:
        """Queue a filled copy for broadcast and return at once.

        Raises:
            WeightSyncError: parameters are missing, or the copy is not the last one acquired.
        """
        self._pool.submit(staged)
        with self._changed:
            self._stats["published"] += 1

    @property
    def current_version(self) -> int | None:
        """Packed version that is offered now, ``None`` before the first."""
        current = self._pool.current
        return None if current is None else current.version

    def wait_received(self, version: int, timeout_s: float) -> bool:
        """Wait until there are receivers and all that are here hold ``version`` (packed) or a newer one; false at ``timeout_s``."""
        ends_at = time.monotonic() + timeout_s
        with self._changed:
            while self._registry.unconfirmed(version, now := time.monotonic()) != []:
                if now >= ends_at:
                    return False
                self._changed.wait(min(_IDLE_S, ends_at - now))
        return True

    def stats(self) -> dict[str, float]:
        """Counters since the start (``published``, ``superseded``, ``broadcasts``, ``aborted``) and gauges of the last broadcast.

        Gauges: ``members``, ``epoch``, ``broadcast_s`` (seconds from the offer to the last bucket), ``megabytes_per_s``.
        """
        with self._changed:
            return {**self._stats, "superseded": float(self._pool.superseded)}

    def status(self) -> dict[str, Any]:
        """What ``GET /status`` answers."""
        version = self.current_version
        return {
            "version": None if version is None else str(PolicyVersion.unpack(version)),
            "queued": self._pool.queued is not None,
            "stats": self.stats(),
            "receivers": self._registry.describe(time.monotonic()),
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """Break off a running broadcast, stop both threads, and release the copies; at most about ``timeout_s`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        ends_at = time.monotonic() + timeout_s
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._control.stop(max(0.1, ends_at - time.monotonic()))
        for _, group in self._groups.values():
            discard(group)
        self._groups.clear()
        self._pool.clear()
        self._store = None

    def _admit(self, request: OfferRequest) -> None:
        choose_transport(self._section.transport, self._device_name, worker_devices(request))

    def _run(self) -> None:
        """The broadcast thread: wait for something to do, do it for all who wait, until closed."""
        use_side_stream(self._device)
        while self._wait_for_work():
            try:
                staged = self._newest()
                members = self._registry.waiting(staged.version, time.monotonic())
                if members:
                    self._serve(staged, members)
                self._drop_groups(set(self._registry.forget_silent(time.monotonic())))
            except Exception:
                _log.exception("a weight broadcast failed; the next publication or poll tries again")
                with self._changed:
                    self._stats["aborted"] += 1
                    self._changed.wait_for(lambda: self._closing, _IDLE_S)

    def _wait_for_work(self) -> bool:
        """Block until a copy is queued or a receiver that may be served is behind; false when closing."""
        with self._changed:
            while not self._closing:
                if self._pool.queued is not None:
                    return True
                current = self._pool.current
                now = time.monotonic()
                if current is not None and self._registry.waiting(current.version, now):
                    return True
                retry_s = None if current is None else self._registry.next_retry(current.version, now)
                self._changed.wait(_IDLE_S if retry_s is None else min(_IDLE_S, retry_s))
            return False

    def _newest(self) -> StagedWeights:
        """The copy to serve: a queued one becomes current, is sealed, and waits a moment for receivers that are about to poll."""
        with self._changed:
            fresh = self._pool.queued is not None
            staged = self._pool.advance() if fresh else self._pool.current
        if staged is None:
            raise WeightSyncError("there must be a published version to serve, got none")
        if fresh:
            staged.seal()
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or not self._registry.about_to_poll(time.monotonic()), self._section.join_grace_s
                )
        return staged

    def _serve(self, staged: StagedWeights, members: list[Member]) -> None:
        """One delivery for each group of members, side by side; returns when all have ended."""
        deliveries = []
        for plan in plan_groups(self._section.transport, self._device_name, members):
            prepared = self._prepare(staged, plan)
            if prepared is not None:
                deliveries.append(prepared)
        results: list[Outcome | None] = [None] * len(deliveries)

        def carry_out(index: int) -> None:
            results[index] = deliveries[index][1].run()

        threads = [
            threading.Thread(target=carry_out, args=(i,), name="weights-delivery", daemon=True) for i in range(1, len(deliveries))
        ]
        for thread in threads:
            thread.start()
        if deliveries:
            carry_out(0)
        for thread in threads:
            thread.join(self._section.deadline_s + 30.0)
        for (key, delivery), outcome in zip(deliveries, results, strict=True):
            self._conclude(key, delivery, staged, outcome or Outcome(error="the delivery did not return"))

    def _prepare(self, staged: StagedWeights, plan: GroupPlan) -> tuple[GroupKey, Delivery] | None:
        """Settle the epoch (a reused group's, or a new one), hand out the offers, and set the delivery up."""
        key = (plan.transport, tuple((m.name, len(m.devices)) for m in plan.members))
        epoch, group = self._groups.pop(key, (0, None))
        if group is not None and any(member.epoch != epoch for member in plan.members):
            discard(group)
            group = None
        if group is None:
            self._next_epoch += 1
            epoch = self._next_epoch
        offers = self._offers(staged, plan, epoch)
        left = [name for name, (offer, _) in offers.items() if not self._registry.assign(name, offer)]
        if left:
            _log.info("receivers left just before their offer, so the group of epoch %d misses them: %s", epoch, ", ".join(left))
        hurried = all(member.suspect for member in plan.members)
        names = {member.name for member in plan.members}

        def should_stop() -> str:
            return self._stop_reason(staged, hurried, names)

        delivery = Delivery(staged, offers, group, self._require_store(), self._registry, self._device, should_stop)
        return key, delivery

    def _offers(self, staged: StagedWeights, plan: GroupPlan, epoch: int) -> dict[str, tuple[Offer, int]]:
        if plan.transport == "ipc" and not staged.handles:
            staged.handles = tuple(export_handle(flat) for flat in staged.flats)
        world = 1 + sum(len(member.devices) for member in plan.members)
        offers: dict[str, tuple[Offer, int]] = {}
        rank = 1
        for member in plan.members:
            offer = Offer(
                version=staged.version,
                epoch=epoch,
                store_host=str(urlsplit(self.url).hostname),
                store_port=self._require_store().port,
                first_rank=rank,
                world=world,
                transport=plan.transport,
                buckets=staged.buckets,
                deadline_s=self._section.deadline_s,
                handles=staged.handles if plan.transport == "ipc" else (),
            )
            offers[member.name] = (offer, len(member.devices))
            rank += len(member.devices)
        return offers

    def _stop_reason(self, staged: StagedWeights, hurried: bool, names: set[str]) -> str:
        """Why a delivery must be broken off: closing; or only suspects are served while others have something to wait for."""
        if self._closing:
            return "the sender closes"
        if hurried:
            others = [m for m in self._registry.waiting(staged.version, time.monotonic()) if m.name not in names and not m.suspect]
            if others or self._pool.queued is not None:
                return "others wait while only receivers that failed before are served"
        return ""

    def _conclude(self, key: GroupKey, delivery: Delivery, staged: StagedWeights, outcome: Outcome) -> None:
        if outcome.error:
            blamed = f"; served alone from now on: {', '.join(outcome.blamed)}" if outcome.blamed else ""
            _log.warning("broadcast of version %s aborted: %s%s", PolicyVersion.unpack(staged.version), outcome.error, blamed)
        elif outcome.group is not None:
            self._drop_groups({name for name, _ in key[1]})
            self._groups[key] = (delivery.epoch, outcome.group)
        with self._changed:
            self._stats["aborted" if outcome.error else "broadcasts"] += 1
            self._stats["epoch"] = float(self._next_epoch % (1 << _EPOCH_BITS))
            if not outcome.error:
                self._stats["members"] = float(delivery.world - 1)
                self._stats["broadcast_s"] = outcome.seconds
                self._stats["megabytes_per_s"] = staged.nbytes / 1e6 / max(outcome.seconds, 1e-9)
            self._changed.notify_all()

    def _drop_groups(self, names: set[str]) -> None:
        """Discard groups that one of ``names`` was in: a receiver has one group open, or is gone."""
        for key in [key for key in self._groups if any(name in names for name, _ in key[1])]:
            discard(self._groups.pop(key)[1])

    def _require_store(self) -> TCPStore:
        if self._store is None:
            raise WeightSyncError("the sender must be started before it sends")
        return self._store
