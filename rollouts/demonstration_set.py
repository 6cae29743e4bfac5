"""Many demonstrations, tokenised, drawn by several processes.

In: a :class:`DemonstrationSource`, which names the files of a prepared folder and a model's tokenizer. Out: a
:class:`~async_search_rl.supervised.SupervisedSet`. The result follows from the source and the count alone, whatever the number
of processes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from async_search_rl.config import Config
from async_search_rl.questions import read_questions
from async_search_rl.supervised import SupervisedSet
from async_search_rl.tools.demo import read_entities
from async_search_rl.tools.lexical import PassageSearch
from async_search_rl.tools.passages import Passage, read_corpus
from rollouts.demonstrations import Demonstration, SloppyDemonstrator

CHUNK = 2000
"""Demonstrations of one random stream."""
TIMEOUT_S = 3600.0
"""Longest that one chunk may take."""


@dataclass(frozen=True)
class DemonstrationSource:
    """Where demonstrations come from; crosses to the worker processes."""

    folder: Path
    """Prepared folder with `train.jsonl`, `entities.jsonl` and `corpus.jsonl`."""
    tokenizer: Path
    """Folder of the tokenizer."""
    config: Config
    """Sections `data`, `rollout` and `warmstart` are read."""


def draw_set(source: DemonstrationSource) -> SupervisedSet:
    """`warmstart.demonstrations` demonstrations of ``source``."""
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
        from transformers import AutoTokenizer

        config = source.config
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer)
        self.encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._prompt = _prompt_renderer(tokenizer, config)
        self._eos = tokenizer.eos_token
        self._two_hop_share = config.warmstart.two_hop_share
        self.demonstrator = SloppyDemonstrator(
            read_questions(source.folder / "train.jsonl"),
            read_entities(source.folder / "entities.jsonl"),
            PassageSearch(list(read_corpus(source.folder / "corpus.jsonl"))),
            [tokenizer.decode([token]) for token in range(len(tokenizer))],
            lambda passages: observation(passages, self.encode, config.rollout.max_observation_tokens),
            config.rollout.topk,
            config.warmstart.renamed_share,
        )

    def draw(self, size: int, seed: str) -> SupervisedSet:
        """``size`` demonstrations that follow from ``seed``."""
        rng = random.Random(seed)
        return SupervisedSet.from_sequences(self.tokens(self.demonstrator.draw(rng, self._two_hop_share)) for _ in range(size))

    def tokens(self, demonstration: Demonstration) -> tuple[list[int], list[bool]]:
        """Token ids and trained mask: each part is encoded by itself, as an episode appends it; EOS ends the last."""
        ids = self.encode(self._prompt(demonstration.question))
        mask = [False] * len(ids)
        for number, part in enumerate(demonstration.parts, start=1):
            piece = self.encode(part.text + (self._eos if number == len(demonstration.parts) else ""))
            ids += piece
            mask += [part.trained] * len(piece)
        return ids, mask


def observation(passages: Sequence[Passage], encode: Callable[[str], list[int]], max_tokens: int) -> str:
    """The passages between information tags, the last ones left out whole until at most ``max_tokens`` tokens remain."""
    for count in range(len(passages), -1, -1):
        text = "<information>" + "".join(f" {p.title}: {p.text}" for p in passages[:count]) + "</information>"
        if len(encode(text)) <= max_tokens:
            return text
    raise ValueError(f"max_observation_tokens must be at least the two tags, got {max_tokens}")


def _prompt_renderer(tokenizer: Any, config: Config) -> Callable[[str], str]:
    template = config.data.template
    if config.data.prompt == "raw":
        return lambda question: template.format(question=question)
    return lambda question: str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": template.format(question=question)}], tokenize=False, add_generation_prompt=True
        )
    )


_worker: Worker | None = None


def _start(source: DemonstrationSource) -> None:
    global _worker
    _worker = Worker(source)


def _draw(size: int, seed: str) -> SupervisedSet:
    if _worker is None:
        raise RuntimeError("a worker process must have been initialised")
    return _worker.draw(size, seed)
