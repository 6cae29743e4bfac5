"""Wakes everyone who waits for the state to change."""

from __future__ import annotations

import asyncio


class Bell:
    """Waiters look at the state, then wait; a ring after their look is never missed, for there is no await in between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake all who wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next ring, at most so long; whether it rang."""
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
