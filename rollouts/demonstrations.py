"""The sloppy demonstrator: episodes for a supervised start that reinforcement learning can improve quickly.

In: template questions with their facts, and a search. Out: demonstrations: queries, what they found, an answer. On purpose
only a part of them is good. The others search for the entity alone or the relation alone, stop after the first of two searches,
do not search, or answer with a wrong span, so that a policy that imitates them perfectly copies well, knows every behaviour,
and is right about every fourth time: copying has been learned, choosing is left to learn.

Entities are renamed in most demonstrations, consistently in question, queries, passages and answer, so that nothing can be
recalled. Held-out entities never occur: passages that name one are passed over, and a demonstration that would is drawn again.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from async_search_rl.questions import Question
from async_search_rl.tools.facts import RELATIONS, Entity, Mentions
from async_search_rl.tools.passages import Passage
from rollouts.synthetic_names import SyntheticNames

Search = Callable[[str, int], Sequence[Passage]]
"""``search(query, k)``: at most k passages, best first."""

ONE_HOP_MIX = {"good": 0.22, "entity_only": 0.18, "relation_only": 0.15, "no_search": 0.22, "wrong_span": 0.23}
"""Shares of behaviours on one-hop questions."""
TWO_HOP_MIX = {"good": 0.28, "stop_after_first": 0.25, "no_search": 0.15, "direct": 0.15, "wrong_span": 0.17}
"""Shares of behaviours on two-hop questions."""
SPARE_PASSAGES = 6
"""Further passages asked for, to replace those that name a held-out entity."""
MAX_DRAWS = 100
"""Draws of one demonstration that may name a held-out entity before that is an error."""


class Turn(NamedTuple):
    """A search of the policy and what it found."""

    query: str
    passages: tuple[Passage, ...]


class Demonstration(NamedTuple):
    """One episode: searches, then an answer."""

    question: str
    turns: tuple[Turn, ...]
    answer: str
    behaviour: str
    """Key of the mix it was drawn from."""

    @property
    def text(self) -> str:
        """Everything that is said in it, a line each, for checks and for people."""
        lines = [self.question]
        for turn in self.turns:
            lines += [turn.query, *(f"{passage.title}: {passage.text}" for passage in turn.passages)]
        return "\n".join([*lines, self.answer])


class _Plan(NamedTuple):
    queries: list[str]
    answers_truly: bool
    guesses: bool


class SloppyDemonstrator:
    """Draws demonstrations for ``questions``, none of which may be about or name a held-out entity of ``entities``."""

    def __init__(
        self,
        questions: Sequence[Question],
        entities: Sequence[Entity],
        search: Search,
        pieces: Sequence[str],
        topk: int = 2,
        renamed_share: float = 0.8,
    ) -> None:
        self._facts = {entity.name: entity.facts for entity in entities if not entity.held_out}
        self._held_out = Mentions(entity.name for entity in entities if entity.held_out)
        self._by_hops = {hops: [q for q in questions if q.hops == hops] for hops in (1, 2)}
        self._values: dict[str, list[str]] = defaultdict(list)
        for question in questions:
            self._values[question.extra["relation"]].append(question.answers[0])
        self._search = search
        self._names = SyntheticNames(pieces, self._held_out)
        self._topk, self._renamed_share = topk, renamed_share
        self._found: dict[str, list[Passage]] = {}

    def draw(self, rng: random.Random, two_hop_share: float) -> Demonstration:
        """A demonstration of a random question, two-hop with probability ``two_hop_share``."""
        question = rng.choice(self._by_hops[2 if rng.random() < two_hop_share else 1])
        for _ in range(MAX_DRAWS):
            demonstration = self.demonstrate(question, rng)
            if not self._held_out(demonstration.text):
                return demonstration
        raise ValueError(f"question {question.id} must not name a held-out entity, got only demonstrations that do")

    def demonstrate(self, question: Question, rng: random.Random) -> Demonstration:
        """A demonstration of ``question`` with a behaviour drawn from the mix of its hops."""
        mix = TWO_HOP_MIX if question.hops == 2 else ONE_HOP_MIX
        behaviour = rng.choices(list(mix), list(mix.values()))[0]
        plan = self._plan(question, behaviour, rng)
        found = [self._passages(query) for query in plan.queries]
        answer = self._answer(question, plan, found[-1] if found else [], rng)
        rename = self._renaming(question, [p for passages in found for p in passages], rng)
        turns = tuple(
            Turn(rename(query), tuple(Passage(rename(p.title), rename(p.text)) for p in passages))
            for query, passages in zip(plan.queries, found, strict=True)
        )
        return Demonstration(rename(question.question), turns, rename(answer), behaviour)

    def _plan(self, question: Question, behaviour: str, rng: random.Random) -> _Plan:
        name, phrase = question.extra["entity"], RELATIONS[question.extra["relation"]].phrase
        proper = rng.choice((f"{phrase} of {name}", f"{name} {phrase}"))
        if question.hops == 2:
            value, bridge = self._facts[name][question.extra["bridge"]], RELATIONS[question.extra["bridge"]].phrase
            first = rng.choice((f"{bridge} {value}", f"{value} {bridge}"))
            queries = {"stop_after_first": [first], "no_search": [], "direct": [f"{phrase} {value}"]}.get(
                behaviour, [first, proper]
            )
            return _Plan(queries, answers_truly=behaviour == "good", guesses=behaviour == "no_search")
        queries = {"entity_only": [name], "relation_only": [phrase], "no_search": []}.get(behaviour, [proper])
        return _Plan(queries, answers_truly=behaviour in ("good", "entity_only"), guesses=behaviour == "no_search")

    def _passages(self, query: str) -> list[Passage]:
        if query not in self._found:
            found = self._search(query, self._topk + SPARE_PASSAGES)
            self._found[query] = [p for p in found if not self._held_out(f"{p.title} {p.text}")][: self._topk]
        return self._found[query]

    def _answer(self, question: Question, plan: _Plan, passages: Sequence[Passage], rng: random.Random) -> str:
        name, relation, answer = question.extra["entity"], question.extra["relation"], question.answers[0]
        text = " ".join(f" {p.title}: {p.text}" for p in passages)
        if plan.guesses:
            return rng.choice(self._values[relation])
        if plan.answers_truly and f" {answer}" in text:
            return answer
        others = [value for other, value in self._facts[name].items() if other != relation and value in text]
        if others and rng.random() < (1.0 if plan.answers_truly else 0.75):
            return rng.choice(others)
        if passages and not plan.answers_truly:
            return " ".join(rng.choice(passages).title.split()[-2:])
        return str(name)

    def _renaming(self, question: Question, passages: Sequence[Passage], rng: random.Random) -> Callable[[str], str]:
        if rng.random() >= self._renamed_share:
            return lambda text: text
        name = question.extra["entity"]
        asked = (question.extra["relation"], question.extra.get("bridge"))
        new = {name: self._names.name(rng)}
        for relation, value in self._facts[name].items():
            distinct = len(value) > 1 and value not in name and name not in value
            if distinct and (relation in asked or rng.random() < 0.7):
                new.setdefault(value, self._names.value(relation, value, rng))
        for passage in passages:
            other = passage.title.split(" of ", 1)[-1]
            if other not in new and other not in name and rng.random() < 0.5:
                new[other] = self._names.name(rng)
        longest_first = sorted(new, key=len, reverse=True)
        pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, longest_first)) + r")(?!\w)")
        return lambda text: pattern.sub(lambda match: new[match.group()], text)
