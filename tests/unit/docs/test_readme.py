"""The README's layout is true, and every document it names exists."""

import re
from pathlib import Path

from async_search_rl.tools.layout import layout, with_layout

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_layout_lists_every_file_as_it_describes_itself() -> None:
    assert with_layout(README, ROOT) == README, "run `make layout`"


def test_every_source_file_says_what_it_is_for() -> None:
    assert [line for line in layout(ROOT).splitlines() if line.rstrip().endswith("`:")] == []


def test_links_to_files_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
    broken = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert broken == []
