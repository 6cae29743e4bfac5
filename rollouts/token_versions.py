"""Which weights sampled which token: the book that the engine wrapper keeps while requests run across updates.

In: how many tokens each request produced, in the order in which the engine produced them, and when the weights changed. Out: one
packed version for each token of a finished request. Exact as long as :meth:`TokenVersions.advance` is called after every token of
the old weights was counted and before any of the new ones is. No I/O and no clock.
"""

from __future__ import annotations


class TokenVersions:
    """Counts tokens by request and version."""

    def __init__(self, version: int | None = None) -> None:
        self.version = version
        """Version that tokens counted from now on are sampled from; ``None`` before the first weights are known."""
        self.requests_across_updates = 0
        """Finished requests that got tokens of newer weights than they began under, once for each such version."""
        self.tokens = 0
        """Tokens counted so far."""
        self._spans: dict[str, list[tuple[int, int]]] = {}
        self._began: dict[str, int] = {}

    @property
    def running(self) -> int:
        """Requests opened and not closed."""
        return len(self._spans)

    def open(self, request: str) -> None:
        """A request begins."""
        self._spans[request] = []
        self._began[request] = self._label

    def count(self, request: str, tokens: int) -> None:
        """``request`` produced ``tokens`` more; requests that are not open (aborted ones) are passed over."""
        spans = self._spans.get(request)
        if spans is None or tokens == 0:
            return
        self.tokens += tokens
        if spans and spans[-1][0] == self._label:
            spans[-1] = (self._label, spans[-1][1] + tokens)
        else:
            spans.append((self._label, tokens))

    def advance(self, version: int) -> None:
        """From now on tokens are sampled from the weights ``version``."""
        self.version = version

    def close(self, request: str, tokens: int = 0) -> list[int]:
        """A request ends: the versions of its first ``tokens`` tokens.

        Raises:
            ValueError: fewer tokens were counted than the request has.
        """
        spans = self._spans.pop(request)
        versions = [version for version, count in spans for _ in range(count)]
        if len(versions) < tokens:
            raise ValueError(f"request {request} must have at least {tokens} counted tokens, got {len(versions)}")
        versions = versions[:tokens]
        self.requests_across_updates += len(set(versions) - {self._began.pop(request)})
        return versions

    @property
    def _label(self) -> int:
        return -1 if self.version is None else self.version
