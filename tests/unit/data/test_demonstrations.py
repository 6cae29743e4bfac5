import random

import numpy as np
import pytest

from async_search_rl.config import load_config
from async_search_rl.errors import DataError
from async_search_rl.questions import Question, read_questions
from async_search_rl.tools.demo import read_entities
from async_search_rl.tools.facts import RELATIONS, Entity, Mentions, two_hop_questions
from async_search_rl.tools.passages import Passage
from rollouts.demonstrations import ONE_HOP_MIX, TWO_HOP_MIX, SloppyDemonstrator
from rollouts.synthetic_names import SyntheticNames

PIECES = [" Bar", " Tol", " gold", " tea", "an", "ix", "o", "Lum", " 12", "é"]
MALI = Entity(name="Mali", facts={"capital": "Bamako", "currency": "francs", "anthem": "Le Mali Chant"})
CHAD = Entity(name="Chad", facts={"capital": "Ndjamena", "currency": "riyals"}, held_out=True)
PASSAGES = [
    Passage("Economy of Chad", "The currency of Chad is riyals."),
    Passage("Government of Mali", "The capital of Mali is Bamako."),
    Passage("Economy of Mali", "The currency of Mali is francs. Trade with Chad."),
    Passage("Economy of Mali", "The currency of Mali is francs."),
    Passage("Nigeria", "A country."),
]
ABOUT = {"hops": 1, "entity": "Mali", "relation": "currency"}
ONE_HOP = Question(id="1", question="What is the currency of Mali?", answers=("francs",), extra=ABOUT)
(TWO_HOP,) = [q for q in two_hop_questions([MALI], ["currency"], "t", 0) if q.extra["bridge"] == "capital"]


def demonstrator(renamed_share=0.0):
    return SloppyDemonstrator([ONE_HOP, TWO_HOP], [MALI, CHAD], lambda query, k: PASSAGES[:k], PIECES, 2, renamed_share)


def by_behaviour(question, draws=300):
    rng, maker = random.Random(0), demonstrator()
    return {made.behaviour: made for made in (maker.demonstrate(question, rng) for _ in range(draws))}


def test_one_hop_behaviours_search_and_answer_as_their_names_say():
    made = by_behaviour(ONE_HOP)
    assert set(made) == set(ONE_HOP_MIX)
    assert made["good"].turns[0].query in ("currency of Mali", "Mali currency")
    assert made["good"].answer == "francs"
    assert [turn.query for turn in made["entity_only"].turns] == ["Mali"]
    assert [turn.query for turn in made["relation_only"].turns] == ["currency"]
    assert made["relation_only"].answer != "francs"
    assert made["wrong_span"].turns
    assert made["wrong_span"].answer != "francs"
    assert made["no_search"].turns == ()


def test_two_hop_behaviours_search_and_answer_as_their_names_say():
    made = by_behaviour(TWO_HOP)
    assert set(made) == set(TWO_HOP_MIX)
    first, second = made["good"].turns
    assert first.query in ("capital Bamako", "Bamako capital")
    assert second.query in ("currency of Mali", "Mali currency")
    assert made["good"].answer == "francs"
    assert len(made["stop_after_first"].turns) == 1
    assert [turn.query for turn in made["direct"].turns] == ["currency Bamako"]
    assert made["no_search"].turns == ()
    assert all("Mali" not in TWO_HOP.question for _ in made)


def test_passages_that_name_a_held_out_entity_are_passed_over():
    made = by_behaviour(ONE_HOP)["good"]
    assert made.turns[0].passages == (PASSAGES[1], PASSAGES[3])


def test_renaming_is_the_same_in_question_query_passages_and_answer():
    rng, maker = random.Random(1), demonstrator(renamed_share=1.0)
    checked = 0
    for _ in range(200):
        made = maker.demonstrate(TWO_HOP, rng)
        assert not Mentions(["Mali", "Bamako", "francs"])(made.text)
        if made.behaviour == "good":
            first, second = made.turns
            value = first.query.removeprefix("capital ").removesuffix(" capital")
            name = second.query.removeprefix("currency of ").removesuffix(" currency")
            assert made.question.endswith(f"the country whose capital is {value}?") or f"capital is {value} " in made.question + " "
            assert f"The capital of {name} is {value}." in first.passages[0].text
            assert f"The currency of {name} is {made.answer}." in second.passages[1].text
            checked += 1
    assert checked > 20


def test_synthetic_names_use_the_pieces_and_are_never_a_refused_name():
    names = SyntheticNames(PIECES, Mentions(["Bar", "Tol"]))
    rng = random.Random(0)
    drawn = [names.name(rng) for _ in range(400)]
    assert not any(Mentions(["Bar", "Tol"])(name) for name in drawn)
    assert any("Bar" in name for name in drawn)
    assert any("Lum" in name for name in drawn)
    assert any("é" in name for name in drawn)
    assert all(name[0].isupper() for name in drawn)
    assert names.value("born", "1950", rng).isdigit()
    assert names.value("internet_code", ".ml", rng)[0] == "."
    assert set(RELATIONS) >= {"born", "internet_code"}


@pytest.fixture(scope="module")
def worker(demo_folder):
    pytest.importorskip("transformers")
    pytest.importorskip("bm25s")
    from rollouts.demonstration_set import DemonstrationSource, Worker

    config = load_config("configs/warmstart.toml")
    return Worker(DemonstrationSource(demo_folder, demo_folder / "tokenizer", config))


def test_demonstrations_of_the_demo_never_name_a_held_out_entity(worker, demo_folder):
    held_out = Mentions(entity.name for entity in read_entities(demo_folder / "entities.jsonl") if entity.held_out)
    rng = random.Random(0)
    texts = [worker.demonstrator.draw(rng, 0.5).text for _ in range(300)]
    assert not any(held_out(text) for text in texts)
    assert any(held_out(question.question) for question in read_questions(demo_folder / "eval.jsonl"))


def test_only_actions_are_trained_and_tokens_are_those_of_an_episode(worker, demo_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder / "tokenizer")
    rng = random.Random(0)
    made = next(
        m for m in (worker.demonstrator.draw(rng, 1.0) for _ in range(100)) if m.behaviour == "good" and m.turns[0].passages
    )
    ids, trained = worker.tokens(made)
    passages = "".join(f" {p.title}: {p.text}" for p in made.turns[0].passages)
    text = tokenizer.decode(ids)
    assert text.startswith(
        f"<s><|user|> {made.question}<|assistant|><search> {made.turns[0].query}</search><information>{passages}</information>"
    )
    assert text.endswith(f"<answer> {made.answer}</answer></s>")
    spoken = tokenizer.decode([token for token, own in zip(ids, trained, strict=True) if own])
    assert spoken == "".join(f"<search> {turn.query}</search>" for turn in made.turns) + f"<answer> {made.answer}</answer></s>"


def test_a_drawn_set_follows_from_its_seed(worker):
    first, again, other = worker.draw(20, "0/0"), worker.draw(20, "0/0"), worker.draw(20, "0/1")
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.trained, again.trained)
    assert not np.array_equal(first.tokens, other.tokens)
    ids, trained = first[7]
    assert len(ids) == len(trained) == first.lengths[7]


def test_a_folder_that_was_not_prepared_is_one_clear_error(tmp_path):
    from rollouts.demonstration_set import DemonstrationSource, draw_set

    with pytest.raises(DataError, match=r"train.jsonl, .* must exist; run bin/prepare demo --out"):
        draw_set(DemonstrationSource(tmp_path, tmp_path / "tokenizer", load_config("configs/warmstart.toml")))
