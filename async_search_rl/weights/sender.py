"""The learner's side of the weight channel: takes staged copies, brings each to every receiver, and never makes the learner wait.

In: ``acquire_buffers`` gives the learner's main thread a copy to fill, ``publish`` queues it and returns. Out: offers to receivers
(:mod:`async_search_rl.weights.control`) and broadcasts (:mod:`async_search_rl.weights.delivery`). One broadcast thread waits for a
publication or for a receiver that is behind, and serves all who wait at once. Only the newest version is ever sent.
"""

from __future__ import annotations

import logging
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
from async_search_rl.weights.delivery import Delivery, Outcome
from async_search_rl.weights.device import device_name, resolve_device, use_side_stream
from async_search_rl.weights.epochs import OpenGroups, make_offers
from async_search_rl.weights.registry import Registry, worker_devices
from async_search_rl.weights.rendezvous import serve_store
from async_search_rl.weights.schema import OfferRequest
from async_search_rl.weights.staging import Plan, StagedWeights, StagingPool
from async_search_rl.weights.transport import CPU, GroupPlan, Member, choose_transport, plan_groups

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
_DELIVERY_SLACK_S = 30.0


class WeightSender:
    """Publishes staged weights, which live on ``device``. Start it before the first publication, close it at the end."""

    def __init__(self, section: WeightsSection, token: str | None, device: torch.device | str = "cpu") -> None:
        self._section = section
        self._token = token
        self._device = resolve_device(device)
        self._device_name = device_name(self._device)
        if section.transport in ("nccl", "ipc") and self._device_name == CPU:
            raise ConfigError(f"weights.transport must be 'auto' or 'gloo' for a learner on the CPU, got {section.transport!r}")
        self._changed = threading.Condition()
        self._registry = Registry(self._changed)
        self._pool = StagingPool(self._changed, self._device)
        self._control = ControlServer(self._registry, self._admit, self.status, token)
        self._groups = OpenGroups()
        self._stats: dict[str, float] = dict.fromkeys(
            ("published", "superseded", "broadcasts", "aborted", "epochs", "members", "broadcast_s", "megabytes_per_s"), 0.0
        )
        self._error = ""
        self._closing = False
        self._store: TCPStore | None = None
        self._thread: threading.Thread | None = None
        self.url = ""
        """Address of the control server, once started."""

    def start(self) -> None:
        """Bind the control server and the store, and start the broadcast thread.

        Raises:
            ConfigError: the bind is unsafe without a token, the host is not this machine's, or the port is busy.
        """
        host = self._section.host
        require_safe_bind(host, self._token)
        try:
            self._store = serve_store(host)
        except OSError as error:
            raise ConfigError(f"weights.host must be an address of this machine, got {host!r}: {error.strerror}") from error
        self.url = self._control.start(host, self._section.port)
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

    def stats(self) -> dict[str, float]:
        """Counters since the start (``published``, ``superseded``, ``broadcasts``, ``aborted``, ``epochs``) and gauges.

        Gauges are of the last broadcast: ``members``, ``broadcast_s`` (from the offers to the last bucket), ``megabytes_per_s``.
        """
        with self._changed:
            return {**self._stats, "superseded": float(self._pool.superseded)}

    def status(self) -> dict[str, Any]:
        """What ``GET /status`` answers; ``error`` is why the last broadcast that failed did."""
        version = self.current_version
        return {
            "version": None if version is None else str(PolicyVersion.unpack(version)),
            "queued": self._pool.queued is not None,
            "error": self._error,
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
        self._groups.close()
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
                self._groups.drop(set(self._registry.forget_silent(time.monotonic())))
            except Exception as error:
                _log.exception("a weight broadcast failed; the next publication or poll tries again")
                with self._changed:
                    self._error = f"{type(error).__name__}: {error}"
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
        plans = plan_groups(self._section.transport, self._device_name, members)
        deliveries = [self._prepare(staged, plan) for plan in plans]
        outcomes = [Outcome(error="the delivery did not return") for _ in plans]

        def carry_out(index: int) -> None:
            outcomes[index] = deliveries[index].run()

        threads = [threading.Thread(target=carry_out, args=(i,), name="weights-delivery", daemon=True) for i in range(len(plans))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._section.deadline_s + _DELIVERY_SLACK_S)
        for plan, delivery, outcome in zip(plans, deliveries, outcomes, strict=True):
            self._conclude(plan, delivery, staged, outcome)

    def _prepare(self, staged: StagedWeights, plan: GroupPlan) -> Delivery:
        """Settle the epoch (a reused group's, or a new one), hand out the offers, and set the delivery up."""
        epoch, group = self._groups.enter(plan)
        store = self._require_store()
        offers = make_offers(plan, staged, epoch, (str(urlsplit(self.url).hostname), store.port), self._section.deadline_s)
        now = time.monotonic()
        left = [name for name, (offer, _) in offers.items() if not self._registry.assign(name, offer, now)]
        if left:
            _log.info("receivers left just before their offer, so the broadcast starts anew without them: %s", ", ".join(left))

        def should_stop() -> str:
            return self._stop_reason(staged, plan)

        return Delivery(staged, offers, group, store, self._registry, self._device, should_stop)

    def _stop_reason(self, staged: StagedWeights, plan: GroupPlan) -> str:
        """Why a delivery must be broken off: closing; or only suspects are served while others have something to wait for."""
        if self._closing:
            return "the sender closes"
        if all(member.suspect for member in plan.members):
            served = {member.name for member in plan.members}
            waiting = self._registry.waiting(staged.version, time.monotonic())
            if self._pool.queued is not None or any(m.name not in served and not m.suspect for m in waiting):
                return "others wait while only receivers that failed before are served"
        return ""

    def _conclude(self, plan: GroupPlan, delivery: Delivery, staged: StagedWeights, outcome: Outcome) -> None:
        if outcome.error:
            blamed = f"; served alone from now on: {', '.join(outcome.blamed)}" if outcome.blamed else ""
            _log.warning("broadcast of version %s aborted: %s%s", PolicyVersion.unpack(staged.version), outcome.error, blamed)
        elif outcome.group is not None:
            self._groups.keep(plan, delivery.epoch, outcome.group)
        with self._changed:
            self._error = outcome.error or self._error
            self._stats["aborted" if outcome.error else "broadcasts"] += 1
            self._stats["epochs"] = float(self._groups.epochs)
            if not outcome.error:
                self._stats["members"] = float(delivery.world - 1)
                self._stats["broadcast_s"] = outcome.seconds
                self._stats["megabytes_per_s"] = staged.nbytes / 1e6 / max(outcome.seconds, 1e-9)
            self._changed.notify_all()

    def _require_store(self) -> TCPStore:
        if self._store is None:
            raise WeightSyncError("the sender must be started before it sends")
        return self._store
