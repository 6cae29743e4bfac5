"""Builders of questions, groups and a replay service without network, shared by this folder's tests."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from async_search_rl.codec import encode_group
from async_search_rl.config.load import parse_config
from async_search_rl.questions import Question
from async_search_rl.replay.actor_side import ActorSide
from async_search_rl.replay.core import Core, identity_of
from async_search_rl.replay.facts import digest_of, facts_of
from async_search_rl.replay.learner_side import LearnerSide
from async_search_rl.replay.records import Location, decode_record, encode_record
from async_search_rl.replay.rounds import Rounds
from async_search_rl.replay.schema import AcknowledgeRequest, CutRequest, LeaseRequest, PublishRequest, Running, StartRequest
from async_search_rl.replay.state import State
from async_search_rl.trajectory import Group, Trajectory, Turn
from async_search_rl.version import PolicyVersion


def _questions(count, prefix="q"):
    return [Question(id=f"{prefix}{i}", question=f"Which {i}?", answers=("a",), data_source=f"s{i % 2}") for i in range(count)]


def _trajectory(reward, versions, prompt=3):
    sampled = np.asarray(versions, dtype=np.int64)
    length = prompt + sampled.size
    mask = np.arange(length) >= prompt
    return Trajectory(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.concatenate([np.full(prompt, -1), sampled]).astype(np.int64),
        prompt_length=prompt,
        turns=(Turn(start=prompt, end=length, action="answer"),),
        reward=reward,
        reward_parts={} if reward is None else {"exact_match": reward, "f1": reward / 2},
        outcome="fault" if reward is None else "answered",
        fault="the search failed" if reward is None else None,
    )


def _group(ticket, rewards, step=0, incarnation=1, actor="a", tokens=2, **changes):
    """A group for ``ticket``; a reward of None is a fault."""
    version = PolicyVersion(incarnation, step).pack()
    fields = {
        "ticket": ticket.ticket,
        "attempt": ticket.attempt,
        "question_id": ticket.question.id,
        "actor": actor,
        "evaluation": ticket.evaluation,
        "trajectories": tuple(_trajectory(reward, [version] * tokens) for reward in rewards),
    }
    return Group(**{**fields, **changes})


class Bench:
    """The service without network or disk: its records are kept in a list, its clock is set by hand."""

    def __init__(self, train=20, evaluation=0, **sections):
        tree = {"rollout": {"group_size": 2}, "replay": {"batch_groups": 2, "lease_s": 10.0, "max_inflight": 8}}
        for section, values in sections.items():
            tree[section] = {**tree.get(section, {}), **values}
        self.config = parse_config(tree)
        self.train, self.evaluation = _questions(train), _questions(evaluation, "e")
        self.records = []
        self.now = 0.0
        self._begin(State(identity=identity_of(self.config, self.train, self.evaluation)))

    def use(self, journal):
        """Go on with the state and the log of ``journal``."""
        self.journal, self._commit = journal, journal.commit
        self._begin(journal.state)

    def _begin(self, state):
        self.state = state
        self.core = Core(config=self.config, train=self.train, evaluation=self.evaluation, state=state, commit=self._commit)
        self.rounds = Rounds(self.core)
        self.actors, self.learner = ActorSide(self.core, self.rounds), LearnerSide(self.core, self.rounds)
        self.core.leases.restore(state.ledger.open.values(), self.now)

    def _commit(self, record):
        data = encode_record(record)
        location = Location(1, len(self.records), len(data))
        self.records.append((data, location))
        self.state.apply(record, location)

    def replayed(self, count=None):
        """The state that the first ``count`` records make."""
        state = State(identity=identity_of(self.config, self.train, self.evaluation))
        for data, location in self.records[:count]:
            state.apply(decode_record(data), location)
        return state

    def crash(self, lost=0):
        """Lose everything in memory and the last ``lost`` records; recover."""
        del self.records[len(self.records) - lost :]
        self._begin(self.replayed())

    def start(self, step=0, cut=0):
        return self.learner.start(StartRequest(run="run", step=step, cut=cut, weights_url="w"))

    def publish(self, step, cut=None):
        cut = step if cut is None else cut
        self.learner.publish(PublishRequest(incarnation=self.state.incarnation, step=step, cut=cut), self.now)

    def cut(self, cut, step=None):
        step = cut if step is None else step
        return self.learner.cut(CutRequest(incarnation=self.state.incarnation, cut=cut, step=step, wait_s=0.0))

    def acknowledge(self, cut, oldest_cut):
        request = AcknowledgeRequest(incarnation=self.state.incarnation, step=cut, cut=cut, oldest_cut=oldest_cut)
        self.learner.acknowledge(request)

    def lease(self, want=0, actor="a", running=(), want_evaluations=0, version=None, known=None):
        """The reply, if there is something to say. ``running``: (ticket, oldest step) pairs."""
        request = LeaseRequest(
            actor=actor,
            running=[Running(ticket=t.ticket, attempt=t.attempt, oldest_step=oldest) for t, oldest in running],
            want=want,
            want_evaluations=want_evaluations,
            wait_s=0.0,
            version=version,
            known_policy=known,
        )
        self.actors.renew(request, self.now)
        return self.actors.answer(request, self.now)

    def tickets(self, want, **more):
        reply = self.lease(want, **more)
        return reply.tickets if reply else []

    def put(self, group):
        data = encode_group(group)
        return self.actors.put(group.actor, group, facts_of(group), digest_of(data), data)

    def running(self):
        """A service with a learner whose first weights are announced."""
        self.start()
        self.publish(0)
        return self

    def encoded(self):
        return msgspec.msgpack.encode(self.state)


@pytest.fixture(scope="session")
def make_group():
    return _group


@pytest.fixture(scope="session")
def make_questions():
    return _questions


@pytest.fixture(scope="session")
def bench():
    return Bench
