"""The page of a run (placeholder until the charts are written)."""

from __future__ import annotations

from pathlib import Path


def write_page(folder: Path) -> Path:
    """Write ``index.html`` into the run's folder."""
    path = folder / "index.html"
    path.write_text("<!doctype html><title>run</title>", encoding="utf-8")
    return path
