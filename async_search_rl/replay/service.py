"""The replay service on the network: routes, long polls, and the order "decide, make durable, answer".

Who waits for whom: actors wait for tickets (pacing has room, an attempt failed, a round opened) or for a newer policy; the learner
waits for enough groups; both are woken by a :class:`~async_search_rl.replay.bell.Bell`. Every answer waits for the log's group
commit, so that nothing is promised that a crash could take back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from async_search_rl.codec import decode_group, decode_message, encode_message
from async_search_rl.http import MSGPACK, OverloadedError
from async_search_rl.metrics import prometheus_text
from async_search_rl.replay.actor_side import ActorSide
from async_search_rl.replay.bell import Bell
from async_search_rl.replay.buffer import Batch
from async_search_rl.replay.core import Core
from async_search_rl.replay.evaluation import Round
from async_search_rl.replay.facts import digest_of, facts_of
from async_search_rl.replay.journal import Journal
from async_search_rl.replay.learner_side import LearnerSide
from async_search_rl.replay.outcomes import Outcomes
from async_search_rl.replay.rounds import Rounds
from async_search_rl.replay.schema import (
    Ack,
    AcknowledgeRequest,
    CutReply,
    CutRequest,
    EvaluationResult,
    FinishReply,
    FinishRequest,
    LeaseReply,
    LeaseRequest,
    Message,
    PublishRequest,
    PutReply,
    PutRequest,
    StartReply,
    StartRequest,
)
from async_search_rl.replay.statistics import Statistics
from async_search_rl.replay.view import status_of

MESSAGE_OVERHEAD_BYTES = 1 << 20
"""Room of a request body beside the group it carries."""
_QUEUE_BYTES = 512 << 20
_THREAD_BYTES = 1 << 20

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class ReplayService:
    """Handlers around :class:`Core`. ``clock`` gives seconds; it need not be the time of day."""

    def __init__(self, core: Core, journal: Journal, outcomes: Outcomes, clock: Callable[[], float] = time.monotonic) -> None:
        self._core, self._journal, self._outcomes, self._clock = core, journal, outcomes, clock
        self._replay = core.config.replay
        self._rounds = Rounds(core)
        self._actors = ActorSide(core, self._rounds)
        self._learner = LearnerSide(core, self._rounds)
        self._statistics = Statistics(2 * self._replay.batch_groups)
        self._learner_metrics: dict[str, float] = {}
        self._for_actors, self._for_learner = Bell(), Bell()
        self._closing = False
        self._max_group_bytes = self._replay.max_group_mib << 20
        core.leases.restore(core.state.ledger.open.values(), clock())

    def add_routes(self, app: web.Application) -> None:
        """Put the handlers into ``app``."""
        posts: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "/lease": self._lease,
            "/put": self._put,
            "/start": self._start,
            "/cut": self._cut,
            "/publish": self._publish,
            "/acknowledge": self._acknowledge,
            "/finish": self._finish,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        app.router.add_get("/status", self._status)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)

    def close(self) -> None:
        """Let the long polls end now."""
        self._closing = True
        self._ring()

    async def tick(self) -> None:
        """What time alone brings about: leases that run out, rounds that are over. Call it about every second.

        Raises:
            OverloadedError: the disk refused, and the service must end.
        """
        if self._actors.expire(self._clock()):
            self._ring()
        if self._rounds.open_if_due(self._clock()):
            self._for_actors.ring()
        await self._conclude_round()
        await self._journal.durable()

    async def _lease(self, request: web.Request) -> web.Response:
        message = await self._read(request, LeaseRequest)
        self._actors.renew(message, self._clock())

        def answer() -> LeaseReply | None:
            gone = request.transport is None or request.transport.is_closing()
            going_on = self._core.state.stop is None
            reply = None if gone else self._actors.answer(message, self._clock())
            if going_on and self._core.state.stop is not None:
                self._ring()
            return reply

        reply = await self._poll(self._for_actors, answer, min(message.wait_s, self._replay.lease_s / 3))
        await self._conclude_round()
        return await self._reply(reply or LeaseReply())

    async def _put(self, request: web.Request) -> web.Response:
        message = await self._read(request, PutRequest)
        if self._journal.queued_bytes > _QUEUE_BYTES:
            raise OverloadedError(f"the disk is behind: {self._journal.queued_bytes} bytes wait to be written")
        if len(message.group) > _THREAD_BYTES:
            group = await asyncio.to_thread(decode_group, message.group, self._max_group_bytes)
        else:
            group = decode_group(message.group, self._max_group_bytes)
        facts, now = facts_of(group), self._clock()
        result, reason = self._actors.put(message.actor, group, facts, digest_of(message.group), message.group)
        if group.evaluation is None:
            self._statistics.put(result, facts, now)
            tickets = self._actors.training_tickets(message.actor, message.want, now)
        else:
            version = self._core.registry.version_of(message.actor)
            tickets = self._actors.evaluation_tickets(message.actor, version, message.want, now)
            await self._conclude_round()
        self._for_learner.ring()
        if self._core.room or self._core.leases.waiting or self._core.state.stop is not None:
            self._for_actors.ring()
        return await self._reply(PutReply(result=result, reason=reason, tickets=tickets))

    async def _start(self, request: web.Request) -> web.Response:
        incarnation = self._learner.start(await self._read(request, StartRequest))
        self._ring()
        return await self._reply(StartReply(incarnation=incarnation))

    async def _cut(self, request: web.Request) -> web.Response:
        message = await self._read(request, CutRequest)
        found = await self._poll(self._for_learner, lambda: self._try_cut(message) or self._core.state.stop, message.wait_s)
        await self._journal.durable()
        groups = None
        if isinstance(found, Batch):
            locations = [entry.location for entry in found.entries]
            groups = await asyncio.to_thread(lambda: [self._journal.read_group(location) for location in locations])
        reply = CutReply(
            groups=groups,
            waiting_for="" if groups else self._learner.waiting_for(),
            stop=None if groups else self._core.state.stop,
            evaluations=self._learner.new_evaluations(),
            counters=self._core.state.counters(),
        )
        return await self._reply(reply)

    def _try_cut(self, message: CutRequest) -> Batch | None:
        """The batch if there is one. What it changes may free tickets (stale groups) or doom running groups: actors are woken."""
        room, next_cut = self._core.room, self._core.state.buffer.next_cut
        batch = self._learner.cut(message)
        if batch is not None and self._core.state.buffer.next_cut > next_cut:
            self._statistics.cut(entry.lag(batch.step) for entry in batch.entries)
            self._for_actors.ring()
        elif self._core.room > room:
            self._for_actors.ring()
        return batch

    async def _publish(self, request: web.Request) -> web.Response:
        message = await self._read(request, PublishRequest)
        self._learner.publish(message, self._clock())
        self._learner_metrics = message.metrics
        self._ring()
        return await self._reply(Ack(stop=self._core.state.stop))

    async def _acknowledge(self, request: web.Request) -> web.Response:
        self._learner.acknowledge(await self._read(request, AcknowledgeRequest))
        await self._journal.durable()
        self._journal.prune()
        return await self._reply(Ack(stop=self._core.state.stop))

    async def _finish(self, request: web.Request) -> web.Response:
        message = await self._read(request, FinishRequest)
        done = await self._poll(self._for_learner, lambda: self._learner.finish(message) or None, message.wait_s)
        if done:
            self._for_actors.ring()
        evaluations = self._learner.new_evaluations()
        return await self._reply(FinishReply(done=bool(done), evaluations=evaluations, counters=self._core.state.counters()))

    async def _status(self, request: web.Request) -> web.Response:
        now = self._clock()
        status = status_of(self._core, self._statistics.recent(now), self._learner_metrics, self._learner.waiting_for(), now)
        if "json" in request.headers.get("Accept", "") or "html" in request.headers.get("Accept", ""):
            return web.Response(body=msgspec.json.encode(status), content_type="application/json")
        return web.Response(body=encode_message(status), content_type=MSGPACK)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"run": self._core.state.identity.run})

    async def _metrics(self, request: web.Request) -> web.Response:
        recent = self._statistics.recent(self._clock())
        text = prometheus_text("replay", self._core.state.counters()) + prometheus_text("recent", recent)
        return web.Response(text=text, content_type="text/plain")

    async def _conclude_round(self) -> None:
        """Close the open round if it is over. Its files are written first: a crash in between repeats them, and loses nothing."""
        while self._rounds.is_over(self._clock()):
            await self._journal.durable()
            now = self._clock()
            finished = self._core.state.evaluations.open
            if finished is None or not self._rounds.is_over(now):
                continue
            result = self._rounds.result(now)
            if result is not None:
                self._keep(result, finished)
            self._rounds.close(result, now)
            self._ring()

    def _keep(self, result: EvaluationResult, finished: Round) -> None:
        """Write the files of a finished round.

        Raises:
            OverloadedError: the disk refused. The round stays open, so that the service can conclude it when it is started again.
        """
        try:
            self._outcomes.write(result, finished, self._journal.read_group)
        except OSError as error:
            raise OverloadedError(f"the evaluation files cannot be written: {error.strerror}") from error

    async def _poll(self, bell: Bell, look: Callable[[], T | None], wait_s: float) -> T | None:
        """What ``look`` finds, looked for again at every ring, for at most ``wait_s`` seconds."""
        deadline = self._clock() + min(wait_s, self._replay.poll_s)
        while (found := look()) is None and not self._closing and (left := deadline - self._clock()) > 0:
            await bell.wait(left)
        return found

    async def _read(self, request: web.Request, kind: type[M]) -> M:
        return decode_message(await request.read(), kind, self._max_group_bytes + MESSAGE_OVERHEAD_BYTES)

    async def _reply(self, message: Message) -> web.Response:
        await self._journal.durable()
        return web.Response(body=encode_message(message), content_type=MSGPACK)

    def _ring(self) -> None:
        self._for_actors.ring()
        self._for_learner.ring()
