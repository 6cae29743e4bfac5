"""One question's episode: generate until an action, search, append the passages, go on; at last a rewarded trajectory.

In: prompt ids and a question. Out: a :class:`Trajectory`. It waits for the engine (a turn at a time) and for retrieval (each search
with a deadline); nobody waits for it but its group. Token in, token out: what was sampled is appended as it was sampled.

An episode has at most ``max_turns`` searches and then one last generation without search. A turn without an action gets a masked
message and is used up. A search in the last turn ends the episode as ``no_answer``; no context left ends it as ``length``; both are
valid, with reward 0. A failed search or a dead engine makes the trajectory invalid, which is never reward 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from async_search_rl.config.rollout import RewardSection, RolloutSection
from async_search_rl.errors import DeadlineError, EngineError, SearchFailedError
from async_search_rl.trajectory import Outcome, PassageRecord, Trajectory
from rollouts.engine import Engine, Sample
from rollouts.episode import Episode
from rollouts.observation import Observation, Observations
from rollouts.protocol import ActionFormat, ParsedTurn
from rollouts.reward import PARTS, reward_parts, weigh
from search.schema import Passage

Search = Callable[[str, int], Awaitable[Sequence[Passage]]]
"""(query, topk) to passages, best first; raises SearchFailedError, and never returns an empty list for a failure."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an episode ended by the policy's own doing."""

    outcome: Outcome
    answer: str | None = None


class Agent:
    """Plays episodes; holds no state of its own between them, so any number may run at once."""

    def __init__(
        self,
        engine: Engine,
        search: Search,
        actions: ActionFormat,
        observations: Observations,
        rollout: RolloutSection,
        reward: RewardSection,
        search_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._search = search
        self._actions = actions
        self._observations = observations
        self._rollout = rollout
        self._reward = reward
        self._search_timeout_s = search_timeout_s

    async def play(self, episode: Episode, answers: Sequence[str], temperature: float) -> Trajectory:
        """Play ``episode`` (a fresh one over the prompt) to its end and reward it against the accepted ``answers``.

        The caller may read ``episode.oldest_step`` meanwhile. Never raises for a fault of engine or retrieval: the trajectory
        then has the outcome ``fault`` and the tokens so far.
        """
        start = time.monotonic()
        try:
            verdict = await self._turns(episode, temperature)
        except (SearchFailedError, EngineError, DeadlineError) as error:
            return episode.finish("fault", None, fault=str(error), seconds=time.monotonic() - start)
        parts = dict.fromkeys(PARTS, 0.0)
        if verdict.outcome == "answered":
            actions = [turn.action for turn in episode.turns]
            parts = reward_parts(verdict.answer or "", answers, episode.texts, actions)
        return episode.finish(
            verdict.outcome,
            weigh(parts, self._reward),
            parts,
            answer=verdict.answer,
            seconds=time.monotonic() - start,
        )

    async def _turns(self, episode: Episode, temperature: float) -> Verdict:
        for searches_left in range(self._rollout.max_turns, -1, -1):
            room = self._rollout.max_context_tokens - episode.length
            if room <= 0:
                return Verdict("length")
            sample, turn = await self._generate(episode, room, temperature)
            if turn.kind == "answer":
                episode.add_turn(sample, turn.text, "answer")
                return Verdict("answered", turn.content)
            if turn.kind == "search" and searches_left:
                goes_on = await self._look_up(episode, sample, turn)
            elif not turn.complete and turn.length == room:
                episode.add_turn(sample, turn.text, "length")
                return Verdict("length")
            else:
                goes_on = self._complain(episode, sample, turn, last=not searches_left)
            if not goes_on:
                return Verdict("length")
        return Verdict("no_answer")

    async def _generate(self, episode: Episode, room: int, temperature: float) -> tuple[Sample, ParsedTurn]:
        """Sample one turn and cut it after its first complete tag."""
        episode.begin_turn(self._engine.version)
        max_tokens = min(self._rollout.max_turn_tokens, room)
        sample = await self._engine.generate(episode.token_ids, max_tokens, temperature)
        if not sample.token_ids:
            raise EngineError(f"the engine must sample at least one of {max_tokens} tokens, got none")
        turn = self._actions.parse(sample.token_ids)
        return sample.head(turn.length), turn

    async def _look_up(self, episode: Episode, sample: Sample, turn: ParsedTurn) -> bool:
        """Search and append the passages; false where they no longer fit."""
        start = time.monotonic()
        passages = await self._retrieve(episode, sample, turn)
        room = self._rollout.max_context_tokens - episode.length - turn.length
        observation = self._observations.passages(passages, room)
        shown = () if observation is None else _records(observation)
        episode.add_turn(sample, turn.text, "search", turn.content, shown, time.monotonic() - start)
        if observation is not None:
            episode.insert(observation.token_ids)
        return observation is not None

    async def _retrieve(self, episode: Episode, sample: Sample, turn: ParsedTurn) -> Sequence[Passage]:
        """The passages of a search; a failure keeps the sampled tokens and goes up."""
        try:
            async with asyncio.timeout(self._search_timeout_s):
                return await self._search(turn.content, self._rollout.topk)
        except (SearchFailedError, TimeoutError) as error:
            episode.add_turn(sample, turn.text, "search", turn.content)
            if isinstance(error, SearchFailedError):
                raise
            raise DeadlineError(f"the search for {turn.content!r} must be answered within {self._search_timeout_s} s") from error

    def _complain(self, episode: Episode, sample: Sample, turn: ParsedTurn, last: bool) -> bool:
        """Append a turn without a permitted action, and unless it was the last one the message; false where it does not fit."""
        episode.add_turn(sample, turn.text, "invalid")
        if last:
            return True
        fits = episode.length + len(self._observations.invalid_action) <= self._rollout.max_context_tokens
        if fits:
            episode.insert(self._observations.invalid_action)
        return fits


def _records(observation: Observation) -> tuple[PassageRecord, ...]:
    return tuple(PassageRecord(id=p.id, title=p.title, text=p.text, score=p.score) for p in observation.passages)
