"""Hand-written fakes of the agent's surroundings: a vocabulary, an engine that plays a script, a retrieval service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from async_search_rl.errors import DataError, EngineError
from async_search_rl.questions import Message
from rollouts.engine import Sample
from search.schema import Passage

PIECES = (
    *("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>", "<eos>"),
    *("</", "<", "search", "answer", "sea", "rch", "</se", "arch>", "swer>", ">", "> x", "r>y", "/", " query", " Paris", "é", "\n"),
    *("Doc", " title", " text", ":", "who"),
)


class PieceTokenizer:
    """A vocabulary of pieces (ids from 256) and single bytes (ids below 256); encodes by the longest piece first."""

    special_tokens: tuple[str, ...] = ("<eos>",)
    eos_id: int | None = 256 + PIECES.index("<eos>")

    def __init__(self, pieces: Sequence[str] = PIECES) -> None:
        self.pieces = [piece.encode() for piece in pieces]
        self.size = 256 + len(self.pieces)
        self._longest_first = sorted(enumerate(self.pieces), key=lambda pair: -len(pair[1]))

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            match = next((i for i, piece in self._longest_first if data.startswith(piece)), None)
            ids.append(data[0] if match is None else 256 + match)
            data = data[1 if match is None else len(self.pieces[match]) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(bytes([i]) if i < 256 else self.pieces[i - 256] for i in ids).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        piece = text.encode()
        return 256 + self.pieces.index(piece) if piece in self.pieces else None

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise DataError("messages must not be empty")
        return self.encode("".join(f"[{m.role}]{m.content}" for m in messages) + "[assistant]")


class ScriptedEngine:
    """Answers turn after turn with the scripted ids, cut at ``max_tokens``; an exception in the script is raised."""

    def __init__(self, turns: Sequence[Sequence[int] | Exception], version: int | None = 7) -> None:
        self.turns = list(turns)
        self.version = version
        self.calls: list[tuple[list[int], int, float]] = []

    async def generate(self, prompt_ids: Sequence[int], max_tokens: int, temperature: float) -> Sample:
        self.calls.append((list(prompt_ids), max_tokens, temperature))
        await asyncio.sleep(0)
        if not self.turns:
            raise EngineError("the script is over")
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        ids = list(turn)[:max_tokens]
        return Sample(ids, [-0.5 - i / 64 for i in range(len(ids))], [self.version or 0] * len(ids))


def passage(number: int, text: str = " text", title: str = " title") -> Passage:
    return Passage(id=f"d{number}", title=title, text=text, score=1.0 / number)


@pytest.fixture
def tokenizer() -> PieceTokenizer:
    return PieceTokenizer()


@pytest.fixture
def scripted() -> Callable[..., ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def make_passage() -> Callable[..., Passage]:
    return passage
