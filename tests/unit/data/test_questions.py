import json

import pytest

from async_search_rl.errors import DataError
from async_search_rl.questions import Message, Question, read_questions, write_questions

ROW = {
    "data_source": "searchR1_nq",
    "prompt": [{"role": "user", "content": "Answer. Question: who wrote Emma?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": ["Jane Austen", "Austen"]}, "style": "rule"},
    "extra_info": {"split": "test", "index": 7},
}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_written_questions_read_back_equal(tmp_path):
    questions = [
        Question(id="a", question="Who?", answers=("Ångström", "x"), data_source="d", extra={"hops": 2}),
        Question(id="b", question="What?", answers=("y",), prompt=(Message("user", "What?"),)),
    ]
    write_questions(tmp_path / "q.jsonl", questions)
    assert read_questions(tmp_path / "q.jsonl") == questions
    assert [q.hops for q in questions] == [2, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["q.jsonl"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_search_r1_rows_are_read_from_parquet_and_json_lines(tmp_path, suffix):
    path = tmp_path / f"test.{suffix}"
    second = ROW | {"data_source": "hotpotqa", "question": "who?"}
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist([ROW | {"question": None}, second]), path)
    else:
        write_rows(path, [ROW, second])
    first, other = read_questions(path)
    assert first.id == "nq/test/7"
    assert first.question == "Answer. Question: who wrote Emma?"
    assert first.answers == ("Jane Austen", "Austen")
    assert first.data_source == "nq"
    assert first.prompt == (Message("user", "Answer. Question: who wrote Emma?\n"),)
    assert (other.id, other.question) == ("hotpotqa/test/7", "who?")


def test_a_plain_string_is_accepted_as_ground_truth(tmp_path):
    row = ROW | {"reward_model": {"ground_truth": "Austen"}, "extra_info": {"index": 0, "question": "who wrote Emma?"}}
    (question,) = read_questions(write_rows(tmp_path / "q.jsonl", [row]))
    assert question.answers == ("Austen",)
    assert question.question == "who wrote Emma?"
    assert question.id == "nq/train/0"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "a", "question": "Q", "answers": []}], "row 1: field answers must be a non-empty list"),
        ([{"id": "a", "question": " ", "answers": ["x"]}], "row 1: field question must not be empty"),
        ([{"id": "a", "question": "Q", "answers": ["x"]}, {"id": "b", "answers": ["x"]}], "row 2: .*question"),
        ([{"id": "a", "question": "Q", "answers": ["x"]}] * 2, "row 2: field id must be unique, got 'a', which is row 1 too"),
        ([{"id": 3, "question": "Q", "answers": ["x"]}], r"row 1: .*\$.id"),
        ([{"id": "a", "question": "Q", "answers": ["x"], "extra": {"hops": "two"}}], "row 1: field extra.hops must be an integer"),
        ([ROW | {"data_source": None}], "row 1: field data_source must be a str, got None"),
        ([ROW | {"prompt": "text"}], "row 1: field prompt must be a list"),
        ([ROW | {"prompt": [{"role": "user"}]}], "row 1: field prompt must be a list of {role, content}"),
        ([ROW | {"reward_model": {"ground_truth": {"target": []}}}], r"field reward_model.ground_truth.target must be"),
        ([[1]], "row 1: must be a JSON object"),
        ([], "must hold at least one question"),
    ],
)
def test_a_bad_row_is_refused_by_file_row_and_field(tmp_path, rows, message):
    path = write_rows(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataError, match=message) as caught:
        read_questions(path)
    assert str(path) in str(caught.value)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the questions .*none.jsonl: No such file"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('{"id": "1", "question": "Où ?", "answers": ["a"]}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.jsonl row 1: must be a JSON object"):
        read_questions(tmp_path / "latin.jsonl")
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="no such file"):
        read_questions(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="not valid Parquet"):
        read_questions(tmp_path / "bad.parquet")
