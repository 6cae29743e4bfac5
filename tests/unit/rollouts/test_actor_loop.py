import asyncio
import logging

import pytest

from async_search_rl.codec import decode_group, encode_message
from async_search_rl.config import parse_config
from async_search_rl.errors import EngineError
from async_search_rl.questions import Question
from async_search_rl.replay.schema import LeaseReply, Policy, PutReply, Ticket
from async_search_rl.version import PolicyVersion
from async_search_rl.weights.schema import Offer
from rollouts.actor_loop import ActorLoop
from rollouts.engine import EngineStats, Sample
from rollouts.gauges import Gauges
from rollouts.generator import counted, make_agent
from rollouts.prompts import Prompts
from rollouts.protocol import make_actions


def version(step):
    return PolicyVersion(1, step).pack()


def train(number, min_step=0, question="who", size=2):
    return Ticket(ticket=number, attempt=1, kind="train", question=ask(question), group_size=size, min_step=min_step)


def evaluation(number, step):
    return Ticket(ticket=number, attempt=1, kind="evaluation", question=ask(), group_size=1, evaluation=0, version=version(step))


def ask(text="who"):
    return Question(id="q", question=text, answers=("Paris",))


class Replay:
    """Answers lease requests from a queue of replies; an empty queue means a poll that stays silent."""

    def __init__(self):
        self.replies = asyncio.Queue()
        self.put_tickets = []
        self.requests, self.groups = [], []
        self.arrived = asyncio.Event()
        self.putting, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()

    async def lease(self, request):
        self.requests.append(request)
        if request.want_evaluations or not request.want:
            await asyncio.Event().wait()
        return await self.replies.get()

    async def put(self, request):
        self.putting.set()
        await self.open.wait()
        self.groups.append(decode_group(request.group))
        self.arrived.set()
        given, self.put_tickets = self.put_tickets[: request.want], self.put_tickets[request.want :]
        return PutReply(result="accepted", tickets=given)

    async def until(self, groups):
        async with asyncio.timeout(5):
            while len(self.groups) < groups:
                self.arrived.clear()
                await self.arrived.wait()


class Receiver:
    """Hands out offers from a queue."""

    def __init__(self):
        self.offers = asyncio.Queue()
        self.url = None

    def update_url(self, url):
        self.url = url

    async def next_offer(self):
        return await self.offers.get()

    async def receive(self, offer, engine):
        await engine.begin(encode_message(offer))
        return True


class Engine:
    """Answers at once, or when ``gate`` opens."""

    def __init__(self, text, step=None):
        self.version = None if step is None else version(step)
        self.text, self.dead, self.gate = text, False, asyncio.Event()
        self.gate.set()
        self.running = 0
        self.began, self.committed = [], asyncio.Queue()
        self.started = asyncio.Event()

    async def generate(self, prompt_ids, max_tokens, temperature):
        at = self.version
        self.running += 1
        self.started.set()
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        if self.dead:
            raise EngineError("the engine is dead: out of memory")
        return Sample(list(self.text), [-0.1] * len(self.text), [at] * len(self.text))

    async def begin(self, offer):
        self.began.append(offer)

    async def commit(self, to):
        self.version = to
        self.committed.put_nowait(to)

    def stats(self):
        return EngineStats(self.running, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)


class World:
    """An actor loop among fakes; must be made inside an event loop."""

    def __init__(self, tokenizer, step=0, groups=2, hold_s=5.0, stall_s=60.0):
        config = parse_config(
            {
                "rollout": {
                    "running_groups": groups,
                    "running_evaluations": 4,
                    "evaluation_hold_s": hold_s,
                    "space_after_tag": True,
                },
                "data": {"prompt": "raw", "template": "{question}"},
                "generator": {"stall_timeout_s": stall_s},
            }
        )
        self.engine, self.replay, self.receiver = Engine(tokenizer.encode("<answer> Paris</answer>"), step), Replay(), Receiver()
        self.gauges = Gauges()
        actions = make_actions("text", tokenizer)
        agent = make_agent(config, self.engine, counted(self.search, self.gauges), actions, tokenizer)
        prompts = Prompts(tokenizer, config.data, 20)
        self.loop = ActorLoop("actor", config, self.engine, agent, prompts, self.replay, self.receiver, self.gauges)

    async def search(self, query, topk):
        return []

    def tell(self, **reply):
        self.replay.replies.put_nowait(LeaseReply(**reply))

    def offer(self, step):
        self.receiver.offers.put_nowait(
            Offer(
                version=version(step), epoch=0, store_host="", store_port=1, first_rank=1, world=2,
                transport="gloo", buckets=(), deadline_s=1.0,
            )
        )  # fmt: skip


async def until(condition):
    async with asyncio.timeout(5):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


def play(scenario):
    async def bounded():
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(bounded())


def test_tickets_become_groups_until_the_service_says_stop(tokenizer):
    async def scenario():
        world = World(tokenizer)
        world.tell(tickets=[train(1), train(2)], policy=Policy(version=version(0), weights_url="http://w"))
        running = asyncio.create_task(world.loop.run())
        await world.replay.until(2)
        world.tell(stop="finished")
        assert await running == "finished"
        assert world.receiver.url == "http://w"
        assert sorted(g.ticket for g in world.replay.groups) == [1, 2]
        group = world.replay.groups[0]
        assert (group.actor, group.question_id, len(group.trajectories)) == ("actor", "q", 2)
        assert group.rewards_G.tolist() == [1.0, 1.0]
        assert world.replay.requests[-1].known_policy == version(0)

    play(scenario)


def test_the_answer_to_a_put_carries_the_next_ticket(tokenizer):
    async def scenario():
        world = World(tokenizer, groups=1)
        world.replay.put_tickets = [train(2), train(3)]
        world.tell(tickets=[train(1)])
        running = asyncio.create_task(world.loop.run())
        await world.replay.until(3)
        world.tell(stop="finished")
        await running
        assert [g.ticket for g in world.replay.groups] == [1, 2, 3]

    play(scenario)


def test_room_that_no_put_refills_is_asked_for_again(tokenizer):
    async def scenario():
        world = World(tokenizer, groups=1)
        world.tell(tickets=[train(1)])
        world.tell(tickets=[train(2)])
        world.tell(stop="finished")
        assert await world.loop.run() == "finished"
        assert [g.ticket for g in world.replay.groups] == [1, 2]
        assert [r.want for r in world.replay.requests if not r.want_evaluations][:3] == [1, 0, 1]

    play(scenario)


def test_tickets_wait_for_the_weights_they_need(tokenizer):
    async def scenario():
        world = World(tokenizer, step=None)
        world.tell(tickets=[train(1), train(2, min_step=3)])
        running = asyncio.create_task(world.loop.run())
        world.offer(0)
        assert await world.engine.committed.get() == version(0)
        await world.replay.until(1)
        world.offer(3)
        await world.replay.until(2)
        running.cancel()
        assert [g.ticket for g in world.replay.groups] == [1, 2]
        assert {int(v) for v in world.replay.groups[1].trajectories[0].versions if v >= 0} == {version(3)}

    play(scenario)


def test_a_swap_waits_for_running_evaluations_and_not_for_training(tokenizer):
    async def scenario():
        world = World(tokenizer, step=4)
        world.engine.gate.clear()
        world.tell(tickets=[evaluation(1, 4), train(2)])
        running = asyncio.create_task(world.loop.run())
        await world.engine.started.wait()
        world.offer(5)
        await until(lambda: bool(world.engine.began))
        assert world.engine.version == version(4)
        world.engine.gate.set()
        assert await world.engine.committed.get() == version(5)
        await world.replay.until(2)
        running.cancel()
        judged = next(g for g in world.replay.groups if g.evaluation is not None)
        assert {int(v) for v in judged.trajectories[0].versions if v >= 0} == {version(4)}

    play(scenario)


def test_a_swap_does_not_wait_beyond_its_deadline(tokenizer, caplog):
    async def scenario():
        world = World(tokenizer, step=4, hold_s=0.01)
        world.engine.gate.clear()
        world.tell(tickets=[evaluation(1, 4)])
        running = asyncio.create_task(world.loop.run())
        await world.engine.started.wait()
        world.offer(5)
        assert await world.engine.committed.get() == version(5)
        running.cancel()

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert "rollout.evaluation_hold_s" in caplog.text


def test_an_evaluation_of_a_version_that_is_gone_is_refused(tokenizer):
    async def scenario():
        world = World(tokenizer, step=6)
        world.tell(tickets=[evaluation(1, 4)])
        running = asyncio.create_task(world.loop.run())
        await world.replay.until(1)
        running.cancel()
        assert world.replay.groups[0].trajectories[0].fault == "the engine is past version 1.4"

    play(scenario)


def test_a_question_that_cannot_be_asked_comes_back_as_faults(tokenizer):
    async def scenario():
        world = World(tokenizer)
        world.tell(tickets=[train(1, question="who" * 30)])
        running = asyncio.create_task(world.loop.run())
        await world.replay.until(1)
        running.cancel()
        group = world.replay.groups[0]
        assert [t.outcome for t in group.trajectories] == ["fault", "fault"]
        assert "question 'q' must have 1 to 20 tokens" in group.trajectories[0].fault

    play(scenario)


def test_cancelled_groups_are_dropped_and_their_place_is_free(tokenizer):
    async def scenario():
        world = World(tokenizer, groups=2)
        world.engine.gate.clear()
        world.tell(tickets=[train(1)])
        running = asyncio.create_task(world.loop.run())
        await world.engine.started.wait()
        world.tell(cancelled=[1])
        world.tell(tickets=[train(2)])
        await until(lambda: not (world.replay.replies.qsize() or world.engine.running != 2))
        world.engine.gate.set()
        await world.replay.until(1)
        world.tell(stop="finished")
        await running
        assert [g.ticket for g in world.replay.groups] == [2]

    play(scenario)


def test_requests_name_what_runs_with_its_oldest_step(tokenizer):
    async def scenario():
        world = World(tokenizer, step=7, groups=2)
        world.engine.gate.clear()
        world.tell(tickets=[train(1), train(9, min_step=8)])
        running = asyncio.create_task(world.loop.run())
        await world.engine.started.wait()
        world.offer(7)
        await world.engine.committed.get()
        world.tell()
        await until(lambda: not (world.replay.requests[-1].want))
        world.loop._freed["train"].set()
        count = len(world.replay.requests)
        await until(lambda: len(world.replay.requests) > count)
        running.cancel()
        named = {r.ticket: r.oldest_step for r in world.replay.requests[-1].running}
        assert named == {1: 7, 9: None}

    play(scenario)


def test_a_dead_engine_hands_its_faults_over_and_ends_the_actor(tokenizer):
    async def scenario():
        world = World(tokenizer)
        world.engine.dead = True
        world.tell(tickets=[train(1)])
        with pytest.raises(EngineError, match="out of memory"):
            await world.loop.run()
        assert world.replay.groups[0].trajectories[0].fault == "the engine is dead: out of memory"

    play(scenario)


def test_a_finished_group_still_arrives_when_the_actor_is_asked_to_end(tokenizer):
    async def scenario():
        world = World(tokenizer)
        world.replay.open.clear()
        world.tell(tickets=[train(1)])
        running = asyncio.create_task(world.loop.run())
        await world.replay.putting.wait()
        running.cancel()
        asyncio.get_running_loop().call_soon(world.replay.open.set)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [g.ticket for g in world.replay.groups] == [1]

    play(scenario)


def test_an_engine_that_stands_still_ends_the_actor(tokenizer):
    async def scenario():
        world = World(tokenizer, stall_s=0.05)
        world.engine.gate.clear()
        world.tell(tickets=[train(1)])
        with pytest.raises(EngineError, match=r"must move within 0\.05 s"):
            await world.loop.run()

    play(scenario)
