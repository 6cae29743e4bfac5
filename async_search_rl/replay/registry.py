"""Which actors are alive: what each said in its last lease request. Time is given by the caller."""

from __future__ import annotations

from dataclasses import dataclass

from async_search_rl.replay.schema import ActorStatus, LeaseRequest


@dataclass
class _Seen:
    request: LeaseRequest
    at: float


class Registry:
    """Actors seen within ``silence_s`` seconds."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._seen: dict[str, _Seen] = {}

    def saw(self, request: LeaseRequest, now: float) -> None:
        """An actor asked."""
        self._seen[request.actor] = _Seen(request, now)

    def forget_silent(self, now: float) -> None:
        """Drop actors that did not ask for too long."""
        for actor in [a for a, seen in self._seen.items() if now - seen.at > self._silence_s]:
            del self._seen[actor]

    def version_of(self, actor: str) -> int | None:
        """The packed version the actor's engine last reported."""
        seen = self._seen.get(actor)
        return None if seen is None else seen.request.version

    def versions(self) -> list[int | None]:
        """The packed version of every live actor."""
        return [seen.request.version for seen in self._seen.values()]

    def report(self, now: float) -> list[ActorStatus]:
        """The live actors, by name."""
        return [
            ActorStatus(
                actor=actor,
                version=seen.request.version,
                running=len(seen.request.running),
                seen_s_ago=now - seen.at,
                gauges=seen.request.gauges,
            )
            for actor, seen in sorted(self._seen.items())
        ]
