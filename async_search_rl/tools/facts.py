"""Entities with facts, and the questions that templates make of them.

In: entities with their facts by relation. Out: one-hop questions (a fact of a named entity), two-hop questions (a fact of the
country that another fact names), and a split *by entity*: no question about a held-out entity, and no text that mentions one,
is among the training material.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from async_search_rl.questions import Question


class Entity(msgspec.Struct, frozen=True, kw_only=True):
    """A country, person or work."""

    name: str
    """How questions and passages name it."""
    facts: dict[str, str]
    """Value by relation."""
    held_out: bool = False
    """Whether only evaluation may ask about it."""


class Relation(NamedTuple):
    """How a relation is asked for and searched."""

    wordings: tuple[str, ...]
    """Questions with `{name}`."""
    phrase: str
    """The relation in a search query."""


RELATIONS = {
    "capital": Relation(("What is the capital of {name}?", "Which city is the capital of {name}?"), "capital"),
    "currency": Relation(("What is the currency of {name}?", "Which currency is used in {name}?"), "currency"),
    "anthem": Relation(
        ("What is the national anthem of {name}?", "What is the title of the national anthem of {name}?"), "national anthem"
    ),
    "highest": Relation(("What is the highest point in {name}?", "What is the highest point of {name}?"), "highest point"),
    "lowest": Relation(("What is the lowest point in {name}?", "What is the lowest point of {name}?"), "lowest point"),
    "independence_date": Relation(
        ("When did {name} become independent?", "On what date did {name} become independent?"), "independence date"
    ),
    "independence_from": Relation(
        ("From which country did {name} become independent?", "From whom did {name} gain independence?"), "independence from"
    ),
    "internet_code": Relation(
        ("What is the internet code of {name}?", "What is the internet country code of {name}?"), "internet code"
    ),
    "export": Relation(("What is the main export of {name}?", "What is the main export commodity of {name}?"), "main export"),
    "partner": Relation(
        ("What is the main trade partner of {name}?", "Which country is the main trade partner of {name}?"), "trade partner"
    ),
    "demonym": Relation(("What is a citizen of {name} called?", "What do you call a citizen of {name}?"), "citizen"),
    "symbol": Relation(("What is the national symbol of {name}?", "Which symbol stands for {name}?"), "national symbol"),
    "born": Relation(("In what year was {name} born?", "When was {name} born?"), "born"),
    "died": Relation(("In what year did {name} die?", "When did {name} die?"), "died"),
    "creator": Relation(("Who created {name}?", "Who is the creator of {name}?"), "creator"),
    "year": Relation(("In what year did {name} come out?", "When did {name} come out?"), "year"),
}
"""Every relation that templates know."""

BRIDGES = {
    "capital": "the country whose capital is {value}",
    "anthem": "the country whose national anthem is {value}",
    "highest": "the country whose highest point is {value}",
}
"""Relations of a country by which a two-hop question may describe it."""

NOT_OF_COUNTRIES = frozenset({"born", "died", "creator", "year"})

ALIASES = {"UK": ("United Kingdom", "Great Britain"), "US": ("United States", "USA"), "UAE": ("United Arab Emirates",)}
"""Other accepted spellings of an answer."""

_WORD = re.compile(r"\w+")


def hold_out(entities: Sequence[Entity], share: float, seed: int) -> list[Entity]:
    """The same entities with ``share`` of them, drawn by ``seed``, marked as held out."""
    names = sorted(entity.name for entity in entities)
    random.Random(seed).shuffle(names)
    chosen = set(names[: int(len(names) * share)])
    return [msgspec.structs.replace(entity, held_out=entity.name in chosen) for entity in entities]


class Mentions:
    """Finds out whether a text names one of some entities, as whole words."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_first_word: dict[str, list[str]] = defaultdict(list)
        for name in set(names):
            first = _WORD.search(name)
            if first:
                self._by_first_word[first.group()].append(name[first.start() :])

    def __call__(self, text: str) -> bool:
        """Whether ``text`` names any of them."""
        for word in _WORD.finditer(text):
            for name in self._by_first_word.get(word.group(), ()):
                end = word.start() + len(name)
                if text.startswith(name, word.start()) and not _WORD.match(text[end : end + 1]):
                    return True
        return False


def one_hop_questions(entities: Sequence[Entity], relations: Iterable[str], source: str, seed: int) -> list[Question]:
    """A question for each fact among ``relations``; its wording is drawn by ``seed``."""
    rng, wanted = random.Random(seed), set(relations)
    questions = []
    for entity in entities:
        for relation, value in entity.facts.items():
            if relation in wanted:
                text = rng.choice(RELATIONS[relation].wordings).format(name=entity.name)
                questions.append(_question(f"{source}/1/{entity.name}/{relation}", text, value, source, entity, relation, None))
    return questions


def two_hop_questions(entities: Sequence[Entity], relations: Iterable[str], source: str, seed: int) -> list[Question]:
    """Questions about a fact of a country that is described by another fact.

    The describing value must belong to one entity only, and neither contain the country's name nor be contained in it.
    """
    rng, wanted = random.Random(seed), set(relations) - NOT_OF_COUNTRIES
    owners = Counter((relation, entity.facts[relation]) for entity in entities for relation in BRIDGES if relation in entity.facts)
    questions = []
    for entity in entities:
        for bridge, description in BRIDGES.items():
            value = entity.facts.get(bridge, "")
            if not value or owners[bridge, value] > 1 or _overlap(value, entity.name):
                continue
            for relation in entity.facts:
                if relation in wanted and relation != bridge:
                    text = rng.choice(RELATIONS[relation].wordings).format(name=description.format(value=value))
                    name = f"{source}/2/{entity.name}/{bridge}/{relation}"
                    questions.append(_question(name, text, entity.facts[relation], source, entity, relation, bridge))
    return questions


def balanced(questions: Sequence[Question], per_relation: int, seed: int) -> list[Question]:
    """At most ``per_relation`` questions of each relation, shuffled."""
    rng, by_relation = random.Random(seed), defaultdict(list)
    for question in questions:
        by_relation[question.extra["relation"]].append(question)
    chosen = [
        q
        for relation in sorted(by_relation)
        for q in rng.sample(by_relation[relation], min(per_relation, len(by_relation[relation])))
    ]
    rng.shuffle(chosen)
    return chosen


def interleave(one_hop: Sequence[Question], two_hop: Sequence[Question]) -> list[Question]:
    """Two one-hop and three two-hop questions in turn, so that every prefix is about 60% two-hop, until either runs out."""
    mixed: list[Question] = []
    for start in range(min(len(one_hop) // 2, len(two_hop) // 3)):
        one, two = one_hop[2 * start : 2 * start + 2], two_hop[3 * start : 3 * start + 3]
        mixed += [two[0], one[0], two[1], one[1], two[2]]
    return mixed


def _question(name: str, text: str, value: str, source: str, entity: Entity, relation: str, bridge: str | None) -> Question:
    extra = {"hops": 2 if bridge else 1, "entity": entity.name, "relation": relation}
    if bridge:
        extra["bridge"] = bridge
    return Question(
        id=name.replace(" ", "_"),
        question=text,
        answers=(value, *ALIASES.get(value, ())),
        data_source=f"{source}_{extra['hops']}hop",
        extra=extra,
    )


def _overlap(value: str, name: str) -> bool:
    return value.lower() in name.lower() or name.lower() in value.lower()
