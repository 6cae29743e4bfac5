"""What the agent loop needs of an inference engine: prompt ids in, sampled ids with log-probabilities and versions out.

The vLLM wrapper implements :class:`Engine`; tests use scripted ones. Whoever calls
:meth:`Engine.generate` waits for the whole turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn as the engine sampled it; the three lists are equally long.

    Attributes:
        token_ids: sampled ids, a sampled end-of-sequence token and the token that completed a tag included.
        logprobs: natural log-probability of each under the weights and temperature that sampled it.
        versions: packed policy version whose weights computed each token's logits.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]

    def head(self, length: int) -> Sample:
        """The first ``length`` tokens."""
        return Sample(self.token_ids[:length], self.logprobs[:length], self.versions[:length])


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the start, and what runs now."""

    running: int
    tokens: int
    updates: int
    in_flight_updates: int
    """Finished requests that went on across an update, once for each update."""
    stall_s: float
    """Seconds for which generation stood still for updates."""
    last_stall_s: float
    """The same, for the last update."""
    busy_s: float
    """Seconds with at least one request in the engine."""
    idle_s: float
    """Seconds without."""


class Engine(Protocol):
    """An inference engine that stops a turn at the first complete action tag, at end-of-sequence, or at ``max_tokens``."""

    @property
    def version(self) -> int | None:
        """Packed version of the weights that new tokens are sampled from; ``None`` before the first publication."""

    async def generate(self, prompt_ids: Sequence[int], max_tokens: int, temperature: float) -> Sample:
        """Sample at most ``max_tokens`` tokens after ``prompt_ids``; temperature 0 is greedy.

        It may run past the tag that ends the turn; the caller cuts.

        Raises:
            EngineError: the engine died or refused the request.
        """


class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can change while it generates: what the actor loop needs beyond :class:`Engine`."""

    @property
    def dead(self) -> bool:
        """Whether no request can succeed any more."""

    async def begin(self, offer: bytes) -> None:
        """Start to receive a publication in every worker."""

    async def states(self) -> list[str]:
        """What each worker says of the weights it is staging."""

    async def abort(self) -> None:
        """Give up what is being staged."""

    async def commit(self, version: int) -> None:
        """Swap the staged weights in; running requests go on with them."""

    def stats(self) -> EngineStats:
        """Totals and gauges."""
