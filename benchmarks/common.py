"""What every benchmark says beside its figures: the machine, the versions, the time; and how repetitions are ordered and summed up.

In: nothing, or figures. Out: maps for the benchmarks' JSON files. Nothing heavy is imported.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_search_rl.launch.summary import versions
from async_search_rl.tools.doctor import gpu_memory

ROOT = Path(__file__).resolve().parent.parent


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs and package versions; and how busy the machine was (load average of the last minute)."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": name.group(1) if name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [name for name, _ in gpu_memory()],
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions(),
    }


def alternating(modes: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(repetition, mode) in an order that goes forth and back, so that a drift of the machine hits all modes alike."""
    for repetition in range(repeats):
        for mode in modes if repetition % 2 == 0 else reversed(modes):
            yield repetition, mode


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each number over ``rows``, maps inside included; other values are left out."""
    if not rows:
        return {}
    found: dict[str, Any] = {}
    for key in rows[0]:
        values = [row[key] for row in rows if key in row and row[key] is not None]
        if values and all(isinstance(value, Mapping) for value in values):
            found[key] = medians(values)
        elif values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            found[key] = statistics.median(values)
    return found


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    aside.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)
