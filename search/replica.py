"""What a client knows of one replica: requests outstanding, recent latencies, and a circuit breaker. Pure: time is passed in.

The breaker opens after some failures in a row and lets nothing through for a cool-down, which doubles at each further failure;
then one request is let through as a probe, and its success closes it.
"""

from __future__ import annotations

from collections import deque

_MAX_COOLDOWN_S = 30.0
_LATENCIES = 256
_MIN_LATENCIES = 20


class Replica:
    """State of one replica at ``url``."""

    def __init__(self, url: str, breaker_failures: int, breaker_cooldown_s: float) -> None:
        self.url = url.rstrip("/")
        self.outstanding = 0
        self._limit = breaker_failures
        self._base_cooldown_s = breaker_cooldown_s
        self._failures = 0
        self._cooldown_s = breaker_cooldown_s
        self._open_until_s: float | None = None
        self._probing = False
        self._latencies_s: deque[float] = deque(maxlen=_LATENCIES)

    def available_in(self, now_s: float) -> float:
        """Seconds until a request may be sent: 0 now, infinity while a probe is on its way."""
        if self._open_until_s is None:
            return 0.0
        if self._probing:
            return float("inf")
        return max(0.0, self._open_until_s - now_s)

    def begin(self) -> None:
        """A request is sent."""
        self.outstanding += 1
        if self._open_until_s is not None:
            self._probing = True

    def succeed(self, latency_s: float) -> None:
        """It was answered in ``latency_s``."""
        self.outstanding -= 1
        self._failures = 0
        self._cooldown_s = self._base_cooldown_s
        self._open_until_s = None
        self._probing = False
        self._latencies_s.append(latency_s)

    def fail(self, now_s: float) -> None:
        """It failed: no connection, no answer, or an error of the server."""
        self.outstanding -= 1
        self._failures += 1
        if self._open_until_s is not None or self._failures >= self._limit:
            self._open_until_s = now_s + self._cooldown_s
            self._cooldown_s = min(2 * self._cooldown_s, _MAX_COOLDOWN_S)
        self._probing = False

    def abandon(self) -> None:
        """It was given up by the caller (cancelled, or another replica was faster); this says nothing about the replica."""
        self.outstanding -= 1
        self._probing = False

    def p95_s(self) -> float | None:
        """95th percentile of the recent latencies; None until there are enough."""
        if len(self._latencies_s) < _MIN_LATENCIES:
            return None
        ordered = sorted(self._latencies_s)
        return ordered[int(0.95 * len(ordered))]
