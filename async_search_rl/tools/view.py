"""`bin/view`: a finished run's figures and episodes in the terminal, and its page on disk or on a loopback port.

In: the run's folder. Out: the page, written anew; rich renderables; a server of that one page until Ctrl-C.
"""

from __future__ import annotations

import http.server
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from async_search_rl.errors import ConfigError
from async_search_rl.launch.page import RunFiles
from async_search_rl.launch.transcript import segments, versions_text
from async_search_rl.trajectory import Trajectory

_STYLES = {
    "prompt": "bright_black",
    "think": "italic",
    "search": "blue",
    "information": "green",
    "answer": "bold yellow",
    "plain": "",
}


def overview(run: RunFiles) -> Table:
    """The summary's headline figures."""
    summary = run.summary
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="dim")
    grid.add_column()
    for key in (
        "run",
        "outcome",
        "steps",
        "wall_s",
        "max_lag",
        "weight_updates",
        "in_flight_updates",
        "groups_trained",
        "groups_dropped",
    ):
        grid.add_row(key.replace("_", " "), str(summary[key]))
    for name, start, end in (("exact match", "em_start", "em_end"), ("searches", "searches_start", "searches_end")):
        if summary[start] is not None and summary[end] is not None:
            grid.add_row(name, f"{summary[start]:.3f} → {summary[end]:.3f}   on {summary['n_eval']} held-out questions")
    return grid


def episodes(run: RunFiles, most: int) -> Iterator[RenderableType]:
    """At most ``most`` questions with their kept episodes, before and after."""
    for when, groups in (("before", run.before), ("after", run.after)):
        for group in list(groups)[:most]:
            question = run.questions.get(group.question_id)
            title = question.question if question else group.question_id
            body = [episode(run, group.trajectories[0])]
            if question:
                body.insert(0, Text(f"accepted: {' · '.join(question.answers)}", style="dim"))
            yield Panel(Lines(*body), title=Text(f"{when}: {title}"), title_align="left", border_style="cyan")


def episode(run: RunFiles, trajectory: Trajectory) -> Text:
    """One episode, coloured by tag; sampled text is underlined."""
    text = Text()
    if run.decode is None:
        return text.append(" ".join(map(str, trajectory.token_ids.tolist())), "dim")
    previous = ""
    for part in segments(trajectory, run.decode):
        if previous and part.kind != previous:
            text.append("\n")
        text.append(part.text.strip("\n"), f"{_STYLES[part.kind]}{' underline' if part.sampled else ''}".strip())
        previous = part.kind
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    return text.append(f"\nreward {reward} · {trajectory.outcome} · {versions_text(trajectory)}", "dim")


class PageServer(http.server.ThreadingHTTPServer):
    """Serves one page, and nothing else of its folder, on 127.0.0.1."""

    daemon_threads = True

    def __init__(self, page: Path, port: int) -> None:
        body = page.read_bytes()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path in ("/", "/index.html")
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8" if found else "text/plain")
                self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
                self.send_header("Content-Length", str(len(body) if found else 0))
                self.end_headers()
                if found:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Stay silent."""

        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError(f"--serve must name a free port, got {port}: {error.strerror}") from error

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"
