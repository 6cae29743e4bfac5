import pytest

from async_search_rl.questions import read_questions
from async_search_rl.tools.corpus import build_corpus
from async_search_rl.tools.factbook import read_countries
from async_search_rl.tools.passages import read_corpus
from async_search_rl.tools.wikipedia import Summary, life_years, read_summaries, work


def test_countries_are_read_without_markup_notes_and_units(wheels):
    countries = read_countries(wheels[0])
    assert len(countries) == 40
    assert countries[0].name.startswith("Republic of ")
    country = countries[1]
    assert country.facts["capital"] == "Tababa"
    assert country.facts["highest"].startswith("Mount ")
    assert country.facts["lowest"].endswith(" Sea")
    assert country.facts["independence_date"] == "2 May 1960"
    assert country.facts["independence_from"].endswith(" Empire")
    assert country.facts["anthem"].endswith(" Forever")
    assert country.facts["currency"].endswith(" pounds")
    assert country.facts["symbol"] == "lion"
    assert country.facts["export"] == "gold"
    assert country.notes["highest_m"] == "1,234"
    assert not any(set(value) & set('";<') for value in country.facts.values())


def test_summaries_are_read_without_double_quotes(wheels):
    summaries = read_summaries(wheels[1])
    assert len(summaries) == 90
    assert all('"' not in summary.extract for summary in summaries)


@pytest.mark.parametrize(
    ("description", "years"),
    [
        ("Italian polymath (1452–1519)", ("1452", "1519")),
        ("Roman philosopher (c. 480 – c. 524)", ("480", "524")),
        ("Empire in Asia (1299–1922)", None),
        ("War between states (1618-1648)", None),
        ("Living writer (born 1950)", None),
    ],
)
def test_only_people_have_years_of_life(description, years):
    assert life_years(Summary("Somebody", description, "")) == years


def test_a_work_has_a_kind_a_creator_and_perhaps_a_year():
    assert work(Summary("Emma (novel)", "1815 novel by Jane Austen", "")) == ("novel", "Jane Austen", "1815")
    assert work(Summary("Aeneid", "Latin epic poem by Virgil", "")) == ("Latin epic poem", "Virgil", "")
    assert work(Summary("Oak", "Kind of tree", "")) is None
    assert Summary("Emma (novel)", "", "").name == "Emma"


def test_the_large_corpus_answers_its_questions_and_asks_nothing_that_changes(tmp_path, wheels):
    build_corpus(tmp_path, *wheels)
    text = "\n".join(passage.text for passage in read_corpus(tmp_path / "corpus.jsonl"))
    train, held_out = read_questions(tmp_path / "train.jsonl"), read_questions(tmp_path / "eval.jsonl")
    assert {q.extra["entity"] for q in train}.isdisjoint(q.extra["entity"] for q in held_out)
    assert {q.hops for q in train} == {q.hops for q in held_out} == {1, 2}
    assert not {q.extra["relation"] for q in train} & {"export", "partner"}
    assert all(q.answers[0] in text for q in train + held_out)
