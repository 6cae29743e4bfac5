"""Evaluation rounds: fixed questions, one policy version each, never counted in pacing and never trained on.

Durable state and pure rules. A round is *due* from the publication that calls for it, *open* while its tickets are out, and then a
:class:`~async_search_rl.replay.schema.EvaluationResult`. One round is open at a time; one that falls due meanwhile is opened
afterwards, with the version that is newest then.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from async_search_rl.questions import Question
from async_search_rl.replay.records import GroupFacts, Location
from async_search_rl.replay.schema import EvaluationResult
from async_search_rl.version import PolicyVersion


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one evaluation question, and where its group lies in the log."""

    question: int
    facts: GroupFacts
    location: Location


class Round(msgspec.Struct, kw_only=True):
    """The open round. Its tickets are ``first_ticket + question``; ``issued`` of them were given out at least once."""

    round: int
    version: int
    first_ticket: int
    asked: int
    issued: int = 0
    answers: list[Evaluated] = []
    missing: list[int] = []

    @property
    def complete(self) -> bool:
        """Whether every question was answered or given up."""
        return len(self.answers) + len(self.missing) == self.asked


class Evaluations(msgspec.Struct, kw_only=True):
    """All rounds of the history that survived."""

    next_round: int = 0
    due: bool = False
    last_step: int | None = None
    """Step at which a round last fell due."""
    open: Round | None = None
    results: list[EvaluationResult] = []

    def published(self, step: int, evaluate: bool) -> None:
        """The weights of ``step`` were announced."""
        if evaluate:
            self.due, self.last_step = True, step

    def opened(self, number: int, version: int, first_ticket: int, asked: int) -> None:
        """The due round begins."""
        self.open = Round(round=number, version=version, first_ticket=first_ticket, asked=asked)
        self.next_round, self.due = number + 1, False

    def closed(self, result: EvaluationResult | None) -> None:
        """The open round is over; without a result it is due again."""
        self.open = None
        if result is None:
            self.due = True
        else:
            self.results.append(result)

    def restarted(self, step: int) -> None:
        """A learner starts with the weights of ``step``: what was evaluated later is not part of its history.

        The version of an open round will not come back, so that round is asked again, or falls due again by itself.
        """
        if self.open is not None:
            self.due = PolicyVersion.unpack(self.open.version).step <= step
            self.open = None
        if self.last_step is not None:
            self.last_step = min(self.last_step, step)
        self.results = [r for r in self.results if PolicyVersion.unpack(r.version).step <= step]


def falls_due(step: int, last_step: int | None, first: bool, *, at_start: bool, every: int, max_steps: int) -> bool:
    """Whether the publication of ``step`` calls for a round.

    ``first``: it is the first publication of the run. The last step always does; in between every ``every`` steps (0: never), or at
    the next publication after such a step.
    """
    if first and at_start:
        return True
    if step >= max_steps:
        return last_step is None or last_step < step
    return every > 0 and step // every > (last_step or 0) // every


def summarise(finished: Round, questions: Sequence[Question], seconds: float) -> EvaluationResult:
    """Means over the answers, all together and by data source.

    ``valid`` is the share of the asked questions that came back; every other mean is over those that did.
    """
    sources = [q.data_source for q in questions[: finished.asked]]
    by_source = {}
    for source in sorted(set(sources)):
        mine = [a.facts for a in finished.answers if sources[a.question] == source]
        by_source[source] = {**_means(mine), "questions": float(len(mine)), "valid": len(mine) / sources.count(source)}
    return EvaluationResult(
        round=finished.round,
        version=finished.version,
        asked=finished.asked,
        questions=len(finished.answers),
        means={**_means([a.facts for a in finished.answers]), "valid": len(finished.answers) / finished.asked},
        by_source=by_source,
        seconds=seconds,
    )


def _means(facts: list[GroupFacts]) -> dict[str, float]:
    if not facts:
        return {}
    names = sorted({name for f in facts for name in f.parts})
    rows = [{"reward": f.reward, "searches": f.searches, "length": f.length, **f.parts} for f in facts]
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in ["reward", "searches", "length", *names]}
