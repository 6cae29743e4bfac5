"""One ticket being rolled out: ``group_size`` episodes of one question at once, and the group they make.

In: a ticket. Out: a :class:`Group`, complete even where members failed: a question that cannot be asked makes a group of faults,
so that the replay service hears of it at once. Episodes of a group wait for the engine and retrieval, never for one another.
"""

from __future__ import annotations

import asyncio

from async_search_rl.config.rollout import RolloutSection
from async_search_rl.errors import DataError
from async_search_rl.replay.schema import Running, Ticket
from async_search_rl.trajectory import Group, Trajectory
from rollouts.agent import Agent
from rollouts.episode import Episode, refused
from rollouts.prompts import Prompts


class GroupRun:
    """One attempt at one ticket by the actor ``actor``."""

    def __init__(self, ticket: Ticket, actor: str) -> None:
        self.ticket = ticket
        self._actor = actor
        self._episodes: list[Episode] = []

    @property
    def progress(self) -> Running:
        """What a lease request says about this group."""
        steps = [episode.oldest_step for episode in self._episodes if episode.oldest_step is not None]
        return Running(ticket=self.ticket.ticket, attempt=self.ticket.attempt, oldest_step=min(steps, default=None))

    async def play(self, agent: Agent, prompts: Prompts, rollout: RolloutSection) -> Group:
        """Roll out all members."""
        try:
            prompt_ids = prompts.ids(self.ticket.question)
        except DataError as error:
            return self.refuse(str(error))
        training = self.ticket.kind == "train"
        temperature = rollout.temperature if training else rollout.eval_temperature
        self._episodes = [Episode(prompt_ids) for _ in range(self.ticket.group_size)]
        plays = (agent.play(episode, self.ticket.question.answers, temperature) for episode in self._episodes)
        return self._group(await asyncio.gather(*plays))

    def refuse(self, fault: str) -> Group:
        """A group of faults, of which not a token was sampled."""
        return self._group([refused(fault) for _ in range(self.ticket.group_size)])

    def _group(self, trajectories: list[Trajectory]) -> Group:
        return Group(
            ticket=self.ticket.ticket,
            attempt=self.ticket.attempt,
            question_id=self.ticket.question.id,
            actor=self._actor,
            trajectories=tuple(trajectories),
            evaluation=self.ticket.evaluation,
        )
