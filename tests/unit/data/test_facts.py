import re

from hypothesis import given
from hypothesis import strategies as st

from async_search_rl.tools.facts import Entity, Mentions, balanced, hold_out, interleave, one_hop_questions, two_hop_questions

MALI = Entity(name="Mali", facts={"capital": "Bamako", "currency": "francs", "partner": "UAE", "anthem": "Le Mali"})
CHAD = Entity(name="Chad", facts={"capital": "Ndjamena", "currency": "francs", "anthem": "La Marche", "born": "1960"})
TWIN = Entity(name="Twin", facts={"capital": "Ndjamena", "currency": "pounds"})
ENTITIES = [MALI, CHAD, TWIN]
ASKED = ("capital", "currency", "partner", "anthem", "born")


def test_one_hop_questions_ask_each_fact_and_know_aliases():
    questions = {q.id: q for q in one_hop_questions(ENTITIES, ASKED, "t", 0)}
    assert len(questions) == 10
    partner = questions["t/1/Mali/partner"]
    assert partner.answers == ("UAE", "United Arab Emirates")
    assert "Mali" in partner.question
    assert (partner.hops, partner.data_source, partner.extra["entity"]) == (1, "t_1hop", "Mali")


def test_two_hop_questions_describe_the_country_uniquely_and_without_its_name():
    questions = two_hop_questions(ENTITIES, ASKED, "t", 0)
    described = {(q.extra["entity"], q.extra["bridge"]) for q in questions}
    assert described == {("Mali", "capital"), ("Chad", "anthem")}
    assert all(q.extra["entity"] not in q.question and q.hops == 2 for q in questions)
    assert all(q.extra["relation"] not in (q.extra["bridge"], "born") for q in questions)


def test_the_split_holds_out_the_share_asked_for_whatever_the_order():
    entities = [Entity(name=f"E{n}", facts={}) for n in range(50)]
    held = {e.name for e in hold_out(entities, 0.2, 3) if e.held_out}
    assert len(held) == 10
    assert held == {e.name for e in hold_out(entities[::-1], 0.2, 3) if e.held_out}
    assert held != {e.name for e in hold_out(entities, 0.2, 4) if e.held_out}


def test_balanced_keeps_at_most_so_many_of_a_relation():
    questions = one_hop_questions(ENTITIES, ASKED, "t", 0)
    kept = balanced(questions, 1, 0)
    assert sorted(q.extra["relation"] for q in kept) == ["anthem", "born", "capital", "currency", "partner"]


def test_every_prefix_of_the_interleaved_questions_is_about_three_fifths_two_hop():
    one, two = one_hop_questions(ENTITIES * 9, ASKED, "t", 0), two_hop_questions(ENTITIES, ASKED, "t", 0) * 20
    mixed = interleave(one, two)
    assert len(mixed) >= 100
    for end in range(1, len(mixed) + 1):
        assert abs(sum(q.hops == 2 for q in mixed[:end]) - 0.6 * end) < 0.5


NAMES = st.lists(st.sampled_from(["Mali", "Guinea", "Guinea-Bissau", "South Africa", "A", "of", "Côte d'Ivoire"]), max_size=4)
TEXTS = st.lists(
    st.sampled_from(["Mali", "Malian", "Guinea", "-", "Bissau", " ", "South", "Africa", "A", "Côte d'Ivoire", ".", "x"]), max_size=9
)


@given(NAMES, TEXTS)
def test_mentions_finds_whole_words_as_a_regular_expression_would(names, pieces):
    text = "".join(pieces)
    expected = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)
    assert Mentions(names)(text) == expected
