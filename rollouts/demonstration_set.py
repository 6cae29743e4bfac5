"""Many demonstrations, tokenised, drawn by several processes.

In: a :class:`DemonstrationSource`, which names the files of a prepared folder and a model's tokenizer. Out: a
:class:`~async_search_rl.supervised.SupervisedSet`. The result follows from the source and the count alone, whatever the number
of processes.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from async_search_rl.config import Config
from async_search_rl.errors import DataError
from async_search_rl.questions import Question, read_questions
from async_search_rl.supervised import SupervisedSet
from async_search_rl.tools.demo import read_entities
from async_search_rl.tools.lexical import PassageSearch
from async_search_rl.tools.passages import read_corpus
from rollouts.demonstrations import Demonstration, SloppyDemonstrator
from rollouts.observation import Observations
from rollouts.prompts import Prompts
from rollouts.tokenizer import load_tokenizer
from search.schema import Passage

FILES = ("train.jsonl", "entities.jsonl", "corpus.jsonl")
"""Files of the prepared folder that are read."""
CHUNK = 2000
"""Demonstrations of one random stream."""
TIMEOUT_S = 3600.0
"""Longest that one chunk may take."""
NO_LIMIT = 1 << 30
"""Room for an observation: only `rollout.max_observation_tokens` bounds it."""


@dataclass(frozen=True)
class DemonstrationSource:
    """Where demonstrations come from; crosses to the worker processes."""

    folder: Path
    """Prepared folder with :data:`FILES`."""
    tokenizer: Path
    """Folder of the tokenizer."""
    config: Config
    """Sections `data`, `rollout` and `warmstart` are read."""


def draw_set(source: DemonstrationSource) -> SupervisedSet:
    """`warmstart.demonstrations` demonstrations of ``source``.

    Raises:
        DataError: when the prepared folder or the tokenizer is missing.
    """
    needed = [source.folder / name for name in FILES] + [source.tokenizer / "tokenizer.json"]
    missing = [str(path) for path in needed if not path.is_file()]
    if missing:
        raise DataError(f"{', '.join(missing)} must exist; run bin/prepare demo --out {source.folder}")
    settings = source.config.warmstart
    count = settings.demonstrations
    processes = settings.processes or os.cpu_count() or 1
    sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
    seeds = [f"{source.config.run.seed}/{chunk}" for chunk in range(len(sizes))]
    if processes == 1:
        worker = Worker(source)
        return SupervisedSet.concatenate([worker.draw(size, seed) for size, seed in zip(sizes, seeds, strict=True)])
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(source,)) as pool:
        return SupervisedSet.concatenate(list(pool.map(_draw, sizes, seeds, timeout=TIMEOUT_S)))


class Worker:
    """Draws and tokenises demonstrations of one source."""

    def __init__(self, source: DemonstrationSource) -> None:
        rollout = source.config.rollout
        self._tokenizer = load_tokenizer(source.tokenizer)
        self._prompts = Prompts(self._tokenizer, source.config.data, rollout.max_prompt_tokens)
        self._observations = Observations(self._tokenizer, rollout.max_observation_tokens, rollout.space_after_tag)
        self._two_hop_share = source.config.warmstart.two_hop_share
        self.demonstrator = SloppyDemonstrator(
            read_questions(source.folder / "train.jsonl"),
            read_entities(source.folder / "entities.jsonl"),
            PassageSearch(list(read_corpus(source.folder / "corpus.jsonl"))),
            _pieces(source.tokenizer),
            rollout.topk,
            source.config.warmstart.renamed_share,
        )

    def draw(self, size: int, seed: str) -> SupervisedSet:
        """``size`` demonstrations that follow from ``seed``."""
        rng = random.Random(seed)
        return SupervisedSet.from_sequences(self.tokens(self.demonstrator.draw(rng, self._two_hop_share)) for _ in range(size))

    def tokens(self, demonstration: Demonstration) -> tuple[list[int], list[bool]]:
        """Token ids and trained mask, in the pieces and with the observations of an episode; EOS ends the answer."""
        ids = self._prompts.ids(Question(id="demonstration", question=demonstration.question, answers=(demonstration.answer,)))
        mask = [False] * len(ids)
        for query, passages in demonstration.turns:
            action = self._tokenizer.encode(f"<search> {query}</search>")
            found = [Passage(id="", title=p.title, text=p.text, score=0.0) for p in passages]
            observation = self._observations.passages(found, NO_LIMIT)
            inserted = observation.token_ids if observation else []
            ids += action + inserted
            mask += [True] * len(action) + [False] * len(inserted)
        last = self._tokenizer.encode(f"<answer> {demonstration.answer}</answer>")
        last += [] if self._tokenizer.eos_id is None else [self._tokenizer.eos_id]
        return ids + last, mask + [True] * len(last)


def _pieces(folder: Path) -> list[str]:
    """Every entry of the vocabulary as text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]


_worker: Worker | None = None


def _start(source: DemonstrationSource) -> None:
    global _worker
    _worker = Worker(source)


def _draw(size: int, seed: str) -> SupervisedSet:
    if _worker is None:
        raise RuntimeError("a worker process must have been initialised")
    return _worker.draw(size, seed)
