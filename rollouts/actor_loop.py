"""The actor: tickets in, groups out, for as long as the replay service has something to do; it never waits for the learner.

    ask for tickets -> begin those whose weights are here -> play each group -> put it, and take new tickets with the answer
    follow the weights: receive while generating, let running evaluations end, swap, begin what waited for the new ones

Two long polls (training, evaluation) renew the leases and hear of cancellations and of a stop; all groups run at once. The first
four methods are the whole actor; each verb in them is one method below.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Protocol

from async_search_rl.codec import encode_group
from async_search_rl.config.schema import Config
from async_search_rl.errors import EngineError
from async_search_rl.replay.schema import LeaseReply, LeaseRequest, PutReply, PutRequest, Running, Ticket, TicketKind
from async_search_rl.trajectory import Group
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.receiver import WeightReceiver
from rollouts.agent import Agent
from rollouts.engine import UpdatableEngine
from rollouts.gauges import Gauges
from rollouts.group_run import GroupRun
from rollouts.prompts import Prompts
from rollouts.roster import Roster, missed
from rollouts.stall_watch import StallWatch

_LAST_PUTS_S = 5.0
_WATCH_S = 1.0

_log = logging.getLogger(__name__)


class Replay(Protocol):
    """The two calls that the actor makes (:class:`async_search_rl.replay.client.ReplayClient`)."""

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Long poll for tickets and news."""

    async def put(self, request: PutRequest) -> PutReply:
        """Hand over a group."""


class _Stopped(Exception):  # noqa: N818  not an error: the service has nothing more to do
    """The replay service said stop; the argument says why."""


class ActorLoop:
    """One generator's work. Use :meth:`run` once."""

    def __init__(
        self,
        name: str,
        config: Config,
        engine: UpdatableEngine,
        agent: Agent,
        prompts: Prompts,
        replay: Replay,
        receiver: WeightReceiver,
        gauges: Gauges,
    ) -> None:
        self._name = name
        self._config = config
        self._engine = engine
        self._agent = agent
        self._prompts = prompts
        self._replay = replay
        self._receiver = receiver
        self._gauges = gauges
        self._roster = Roster(config.rollout.running_groups, config.rollout.running_evaluations)
        self._runs: dict[int, tuple[GroupRun, asyncio.Task[None]]] = {}
        self._known_policy: int | None = None
        self._freed: dict[TicketKind, asyncio.Event] = {"train": asyncio.Event(), "evaluation": asyncio.Event()}
        self._evaluating: set[asyncio.Task[None]] = set()
        self._evaluation_over = asyncio.Event()
        self._puts: set[asyncio.Future[PutReply]] = set()

    async def run(self) -> str:
        """Work until the replay service says stop; its reason.

        Raises:
            EngineError: the engine died.
            ServiceError, DeadlineError: the replay service stayed silent beyond the client's patience.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._ask("train"))
                self._tasks.create_task(self._ask("evaluation"))
                self._tasks.create_task(self._follow_weights())
                self._tasks.create_task(self._watch_engine())
        except ExceptionGroup as ended:
            first = ended.exceptions[0]
            if isinstance(first, _Stopped):
                return str(first)
            raise first from None
        finally:
            await self._let_puts_end()
        return "nothing is left to do"

    async def _ask(self, kind: TicketKind) -> None:
        """Long poll after long poll for one kind of ticket."""
        while True:
            reply = await self._poll(kind, self._roster.room(kind))
            if reply is not None:
                self._obey(reply)
                self._begin(reply.tickets)

    async def _play(self, run: GroupRun) -> None:
        """One group, from its first token to the answer of the replay service."""
        self._gauges.episodes_running += run.ticket.group_size
        try:
            if missed(run.ticket, self._engine.version):
                group = run.refuse(f"the engine is past version {PolicyVersion.unpack(run.ticket.version or 0)}")
            else:
                group = await run.play(self._agent, self._prompts, self._config.rollout)
        finally:
            self._gauges.episodes_running -= run.ticket.group_size
            self._end(run)
        await self._hand_over(group, run.ticket.kind)
        if self._engine.dead:
            raise EngineError(next((t.fault for t in group.trajectories if t.fault), "the engine is dead"))

    async def _follow_weights(self) -> None:
        """Publication after publication: receive, let evaluations end, swap, begin what waited."""
        while True:
            offer = await self._receiver.next_offer()
            start = time.monotonic()
            if await self._receiver.receive(offer, self._engine):
                self._gauges.receive_s = time.monotonic() - start
                await self._let_evaluations_end()
                await self._engine.commit(offer.version)
                self._begin([])

    async def _watch_engine(self) -> None:
        """End the actor when the engine stands still, so that its tickets go elsewhere."""
        watch, limit_s = StallWatch(time.monotonic()), self._config.generator.stall_timeout_s
        while True:
            if watch.stalled_s(self._engine.stats(), time.monotonic()) > limit_s:
                raise EngineError(f"the engine must move within {limit_s:g} s (generator.stall_timeout_s), it stands still")
            await asyncio.sleep(min(_WATCH_S, limit_s / 4))

    async def _poll(self, kind: TicketKind, want: int) -> LeaseReply | None:
        """One lease request; ``None`` if it asked for nothing and was given up because there is room now.

        A request that asks for tickets is never given up: the service might be granting them.
        """
        replay = self._config.replay
        self._freed[kind].clear()
        request = LeaseRequest(
            actor=self._name,
            running=[self._progress(ticket) for ticket in self._roster.tickets],
            want=want if kind == "train" else 0,
            want_evaluations=want if kind == "evaluation" else 0,
            wait_s=min(replay.poll_s, replay.lease_s / 3),
            version=self._engine.version,
            known_policy=self._known_policy,
            gauges=self._gauges.read(self._engine.stats(), time.monotonic()),
        )
        with self._roster.asking(kind, want):
            lease = asyncio.ensure_future(self._replay.lease(request))
            freed = asyncio.ensure_future(self._freed[kind].wait())
            try:
                await asyncio.wait({lease} if want else {lease, freed}, return_when=asyncio.FIRST_COMPLETED)
                return lease.result() if lease.done() else None
            finally:
                freed.cancel()
                lease.cancel()

    def _obey(self, reply: LeaseReply) -> None:
        """Cancel what can no longer be used, learn where the weights are, stop when told to."""
        if reply.stop is not None:
            raise _Stopped(reply.stop)
        for ticket in reply.cancelled:
            self._cancel(ticket)
        if reply.policy is not None:
            self._known_policy = reply.policy.version
            self._receiver.update_url(reply.policy.weights_url)

    def _begin(self, tickets: list[Ticket]) -> None:
        """Hold new tickets, and start every held one that the engine's version permits."""
        for ticket in tickets:
            self._cancel(ticket.ticket)
            self._roster.hold(ticket)
        for ticket in self._roster.take_runnable(self._engine.version):
            run = GroupRun(ticket, self._name)
            task = self._tasks.create_task(self._play(run))
            self._runs[ticket.ticket] = run, task
            if ticket.kind == "evaluation":
                self._evaluating.add(task)
                task.add_done_callback(self._evaluation_ended)

    def _end(self, run: GroupRun) -> None:
        """The group no longer generates; its place is free."""
        number = run.ticket.ticket
        if number in self._runs and self._runs[number][0] is run:
            del self._runs[number]
            self._roster.drop(number)

    def _cancel(self, number: int) -> None:
        """Drop a ticket, whether it is held, running, or not here."""
        run = self._runs.pop(number, None)
        if run is not None:
            run[1].cancel()
            self._freed[run[0].ticket.kind].set()
        self._roster.drop(number)

    async def _hand_over(self, group: Group, kind: TicketKind) -> None:
        """Put the group; new tickets may come with the answer."""
        want = min(1, self._roster.room(kind))
        with self._roster.asking(kind, want):
            put = asyncio.ensure_future(self._replay.put(PutRequest(actor=self._name, group=encode_group(group), want=want)))
            self._puts.add(put)
            put.add_done_callback(self._puts.discard)
            reply = await asyncio.shield(put)
        self._gauges.finished(group)
        if reply.result in ("failed", "unknown"):
            _log.info("group %d was not taken: %s", group.ticket, reply.reason)
        self._begin(reply.tickets)
        if self._roster.room(kind):
            self._freed[kind].set()

    async def _let_evaluations_end(self) -> None:
        """Evaluations are sampled by one version only: put the swap off until none runs, but not beyond a deadline."""
        hold_s = self._config.rollout.evaluation_hold_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                while self._evaluating:
                    self._evaluation_over.clear()
                    await self._evaluation_over.wait()
        if self._evaluating:
            _log.warning("evaluations still ran after %g s (rollout.evaluation_hold_s); new weights come in regardless", hold_s)

    async def _let_puts_end(self) -> None:
        """Finished groups that are on their way when the actor ends still arrive."""
        if self._puts:
            await asyncio.wait(self._puts, timeout=_LAST_PUTS_S)
        for put in self._puts:
            put.cancel()

    def _evaluation_ended(self, task: asyncio.Task[None]) -> None:
        self._evaluating.discard(task)
        self._evaluation_over.set()

    def _progress(self, ticket: Ticket) -> Running:
        run = self._runs.get(ticket.ticket)
        return (run[0] if run else GroupRun(ticket, self._name)).progress
