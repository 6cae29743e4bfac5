"""Where the live table goes: redrawn in place on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live

from async_search_rl.launch.table import View, plain_line, render

_PLAIN_EVERY_S = 5.0


class Screen:
    """Shows views; use as a context manager, so that the terminal is given back."""

    def __init__(self, console: Console, every_s: float) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._every_s = every_s if self._live else max(every_s, _PLAIN_EVERY_S)
        self._drawn_at = float("-inf")
        self._line = ""

    def show(self, view: View, *, now: bool = False) -> None:
        """Draw ``view`` if it is time to, or ``now``."""
        if not now and time.monotonic() - self._drawn_at < self._every_s:
            return
        self._drawn_at = time.monotonic()
        if self._live:
            self._live.update(render(view, self._console.width), refresh=True)
        elif (line := plain_line(view)) != self._line:
            self._line = line
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def note(self, text: str) -> None:
        """Print one line above the table."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
