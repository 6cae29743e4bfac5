import io
import zipfile

import pytest

from async_search_rl.errors import DataError
from async_search_rl.questions import Question, read_questions
from async_search_rl.tools.open_questions import ARCHIVE, AnswerFilter, normalise, read_topics, write_parquet
from async_search_rl.tools.passages import Passage


@pytest.fixture
def pyserini(tmp_path):
    rows = (
        "who wrote emma\t['Jane Austen', 'Austen']\n"
        'which river flows through Paris\t"[""Seine"", \'The Seine\']"\n'
        "broken row\tnot a list\n"
        "empty answers\t[]\n"
        "no tab at all\n"
    )
    jar = io.BytesIO()
    with zipfile.ZipFile(jar, "w") as archive:
        archive.writestr("topics-and-qrels/topics.nq.dev.txt", rows)
    path = tmp_path / "pyserini.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(ARCHIVE, jar.getvalue())
    return path


def test_topics_are_read_past_stray_quotes_and_broken_rows(pyserini):
    assert list(read_topics(pyserini, "topics.nq.dev.txt")) == [
        ("who wrote emma", ["Jane Austen", "Austen"]),
        ("which river flows through Paris", ["Seine", "The Seine"]),
    ]
    with pytest.raises(DataError, match=r"must hold topics-and-qrels/topics.nq.none.txt"):
        list(read_topics(pyserini, "topics.nq.none.txt"))


def test_a_question_is_kept_when_a_passage_holds_an_answer_and_is_about_it():
    pytest.importorskip("bm25s")
    passages = [
        Passage("Emma (novel)", "Emma is a novel written by Jane Austen in 1815."),
        Passage("Oak", "An oak is a tree that grows slowly."),
        Passage("Paris", "Paris is the capital of France. The Seine flows through the city of Paris."),
    ]
    rows = [
        ("who wrote the novel Emma", ["Jane Austen"]),
        ("which river flows through Paris", ["Seine", "The Seine"]),
        ("who painted the Seine at Argenteuil in summer light", ["Jane Austen"]),
        ("what grows slowly on tree farms of Saturn and Jupiter", ["oak"]),
        ("is Jane Austen the author of Emma", ["Jane Austen"]),
        ("how many moons has Jupiter", ["79"]),
    ]
    assert list(AnswerFilter(passages)(rows)) == [(0, 0), (1, 2)]


def test_normalise_drops_case_punctuation_and_articles():
    assert normalise("The “Great” Gatsby—a novel!") == "great gatsby novel"


def test_the_parquet_rows_are_read_back_as_questions(tmp_path):
    pytest.importorskip("pyarrow")
    question = Question(id="nq/dev/3", question="who wrote {emma}", answers=("Jane Austen", "Austen"), data_source="nq")
    write_parquet(tmp_path / "eval.parquet", [question], "eval")
    (read,) = read_questions(tmp_path / "eval.parquet")
    assert (read.question, read.answers, read.data_source, read.id) == (question.question, question.answers, "nq", "nq/eval/0")
    assert read.prompt is not None
    assert "who wrote {emma}" in read.prompt[0].content
