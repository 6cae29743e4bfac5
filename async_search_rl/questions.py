"""Questions with their accepted answers: the data contract between question files, the replay service and the actors.

In: JSON lines of :class:`Question`, or rows as Search-R1 and verl write them (parquet, or the same rows as JSON lines).
Out: a list of questions with unique ids, in the file's order. A bad row is refused by file, row and field; rows count from 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from async_search_rl.errors import DataError


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat prompt."""

    role: str
    """`system`, `user` or `assistant`."""
    content: str
    """Text of the turn."""


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One question; `id` is unique within its file."""

    id: str
    """Name that survives restarts and appears in logs."""
    question: str
    """Plain text, without instructions."""
    answers: tuple[str, ...]
    """Accepted answers, at least one."""
    data_source: str = ""
    """Data set the question comes from; evaluation is reported by it."""
    prompt: tuple[Message, ...] | None = None
    """Messages rendered by the data set, for `data.prompt = "dataset"`; None: the configured template is used."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further JSON values of the row, for example `hops` and `entity`."""

    @property
    def hops(self) -> int:
        """Searches the question needs; 0 where the data set does not say."""
        return int(self.extra.get("hops", 0))


def read_questions(path: str | Path) -> list[Question]:
    """All questions of ``path``: Parquet (`.parquet`) or JSON lines (anything else).

    Raises:
        DataError: for a missing, empty or unreadable file, a bad row (named with its field), or a repeated id.
    """
    path = Path(path)
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    questions: list[Question] = []
    row_of_id: dict[str, int] = {}
    for number, row in rows:
        where = f"{path} row {number}"
        question = from_search_r1(row, number, where) if "reward_model" in row else _from_own(row, where)
        if question.id in row_of_id:
            raise DataError(f"{where}: field id must be unique, got {question.id!r}, which is row {row_of_id[question.id]} too")
        row_of_id[question.id] = number
        questions.append(question)
    if not questions:
        raise DataError(f"{path} must hold at least one question, got none")
    return questions


def write_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Write JSON lines that :func:`read_questions` reads back equal; the file appears complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    encoder = msgspec.json.Encoder()
    with unfinished.open("wb") as out:
        for question in questions:
            out.write(encoder.encode(question) + b"\n")
    os.replace(unfinished, path)


def from_search_r1(row: dict[str, Any], number: int, where: str) -> Question:
    """A question from one row in the layout of Search-R1 and verl.

    Read are `data_source` (verl's prefix `searchR1_` is dropped), `prompt` (a list of {role, content}),
    `reward_model.ground_truth` (a string, a list, or either under `target`) and `extra_info.{split, index}`; the plain
    question is the column `question`, else `extra_info.question`, else the last user message. As `extra_info.index`
    restarts in every data set, the id is source, split and index together (the row's ``number`` where there is no index).

    Raises:
        DataError: starting with ``where``, naming the field.
    """
    source = _field(row, "data_source", str, where).removeprefix("searchR1_")
    prompt = _field(row, "prompt", list, where)
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}: field prompt must be a list of {{role, content}}, got an item {message!r}")
    info = row.get("extra_info") or {}
    if not isinstance(info, dict):
        raise DataError(f"{where}: field extra_info must be a dict, got {type(info).__name__}")
    truth = _field(row, "reward_model", dict, where).get("ground_truth")
    target = truth.get("target") if isinstance(truth, dict) else truth
    users = [message["content"] for message in prompt if message["role"] == "user"]
    text = row.get("question") or info.get("question") or (users[-1] if users else "")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: field prompt must have a user message or the row a question, got neither")
    index = info.get("index")
    return Question(
        id=f"{source}/{info.get('split') or 'train'}/{number if index is None else index}",
        question=text.strip(),
        answers=_answers(target, where, "reward_model.ground_truth.target"),
        data_source=source,
        prompt=tuple(Message(message["role"], message["content"]) for message in prompt),
    )


def _from_own(row: dict[str, Any], where: str) -> Question:
    try:
        question = msgspec.convert(row, Question)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: {error}") from error
    for name in ("id", "question"):
        if not getattr(question, name).strip():
            raise DataError(f"{where}: field {name} must not be empty, got {getattr(question, name)!r}")
    _answers(list(question.answers), where, "answers")
    hops = question.extra.get("hops", 0)
    if type(hops) is not int or hops < 0:
        raise DataError(f"{where}: field extra.hops must be an integer >= 0, got {hops!r}")
    return question


def _answers(value: Any, where: str, field: str) -> tuple[str, ...]:
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise DataError(f"{where}: field {field} must be a non-empty list of non-empty strings, got {value!r}")
    return tuple(answers)


def _field(row: dict[str, Any], name: str, kind: type, where: str) -> Any:
    value = row.get(name)
    if not isinstance(value, kind):
        raise DataError(f"{where}: field {name} must be a {kind.__name__}, got {value!r}")
    return value


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, msgspec.json.decode(line, type=dict[str, Any])
    except OSError as error:
        raise DataError(f"cannot read the questions {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} row {number}: must be a JSON object, got {line[:80]!r} ({error})") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"pyarrow must be installed to read {path}: pip install pyarrow") from error
    if not path.is_file():
        raise DataError(f"cannot read the questions {path}: no such file")
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not valid Parquet (after row {number}): {error}") from error
