"""A polite request to stop, as a flag that loops look at between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_POLITE = (signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """Set by the first SIGTERM or Ctrl-C within its block; a second one acts as it would have without it."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked.is_set()

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in _POLITE}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
