"""What is left of a run when it has ended: `status.json`, `summary.json` and the page `index.html`, in its folder.

In: what the launcher saw, and the files that the run's pieces wrote. Out: the three files. The page can be made again at any time
from the folder alone (`bin/view`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from async_search_rl.config import Config
from async_search_rl.files import write_whole
from async_search_rl.json_lines import read_json_lines, surviving_steps
from async_search_rl.launch.page import write_page
from async_search_rl.launch.summary import summarise, write_summary
from async_search_rl.replay.schema import Status


@dataclass(frozen=True, slots=True)
class RunReport:
    """The summary as a map, and where the page is."""

    summary: dict[str, Any]
    page: Path


def write_report(config: Config, status: Status, *, outcome: str, wall_s: float, restarts: Mapping[str, int]) -> RunReport:
    """Write all three files into the run's folder. ``outcome`` and ``restarts`` as in :func:`summarise`."""
    folder = config.run.folder
    write_whole(folder / "status.json", msgspec.json.encode(status))
    timeline = list(read_json_lines(folder / "metrics" / "timeline.jsonl"))
    learner = surviving_steps(read_json_lines(folder / "metrics" / "learner.jsonl"))
    summary = summarise(config, status, timeline, learner, outcome=outcome, wall_s=wall_s, restarts=restarts)
    write_summary(folder, summary)
    return RunReport(summary, write_page(folder))
