"""What a run's folder keeps of its evaluations: one line a round, and the episodes of the first and of the last round.

``evaluations.jsonl`` has one :class:`~async_search_rl.replay.schema.EvaluationResult` a line. ``trajectories_before.msgpack`` and
``trajectories_after.msgpack`` each hold a list of encoded groups (:func:`async_search_rl.codec.encode`), of the same questions as
far as both rounds answered them. A round that a crash interrupted may have two lines; the later one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from async_search_rl.codec import encode
from async_search_rl.files import write_whole
from async_search_rl.json_lines import JsonLines
from async_search_rl.replay.evaluation import Round
from async_search_rl.replay.records import Location
from async_search_rl.replay.schema import EvaluationResult


class Outcomes:
    """Files in ``folder``; ``keep`` groups of a round are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def write(self, result: EvaluationResult, finished: Round, read_group: Callable[[Location], bytes]) -> None:
        """Keep a finished round; ``read_group`` gives the bytes of an answer."""
        with JsonLines(self._folder / "evaluations.jsonl") as lines:
            lines.write(msgspec.to_builtins(result))
        answers = sorted(finished.answers, key=lambda answer: answer.question)[: self._keep]
        if not answers:
            return
        groups = encode([read_group(answer.location) for answer in answers])
        before = self._folder / "trajectories_before.msgpack"
        if not before.exists():
            write_whole(before, groups)
        write_whole(self._folder / "trajectories_after.msgpack", groups)
