"""The README's layout section: one line a file, made from the first line of each module's docstring.

``make layout`` rewrites the section; a test compares it, so that it stays true.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDERS = (
    "async_search_rl",
    "async_search_rl/config",
    "async_search_rl/replay",
    "async_search_rl/weights",
    "async_search_rl/launch",
    "async_search_rl/tools",
    "search",
    "rollouts",
    "learner",
    "bin",
    "benchmarks",
)
_BEGIN, _END = "<!-- layout: begin -->", "<!-- layout: end -->"


def layout(root: Path) -> str:
    """Markdown: a collapsible list for each folder of the source tree under ``root``."""
    sections = []
    for folder in FOLDERS:
        lines = [f"- `{path.name}`: {_first_line(path)}" for path in _sources(root / folder)]
        purpose = _first_line(root / folder / "__init__.py") if (root / folder / "__init__.py").exists() else _PURPOSES[folder]
        sections.append("\n".join([f"<details><summary><code>{folder}/</code> {purpose}</summary>", "", *lines, "", "</details>"]))
    return "\n".join(sections)


def with_layout(readme: str, root: Path) -> str:
    """``readme`` with its layout section made anew."""
    before, rest = readme.split(_BEGIN)
    return f"{before}{_BEGIN}\n{layout(root)}\n{_END}{rest.split(_END)[1]}"


_PURPOSES = {
    "bin": "The entrypoints: parse, import, run.",
    "benchmarks": "Measurements, each with <code>--json</code>.",
}


def _sources(folder: Path) -> list[Path]:
    files = (p for p in folder.iterdir() if p.is_file() and p.suffix in (".py", ".sh", "") and p.name != "__init__.py")
    return sorted(files)


def _first_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".sh":
        return text.splitlines()[1].removeprefix("# ")
    summary = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    return re.sub(r"(:\w+:)?``?", lambda match: "`", " ".join(summary.split()))


if __name__ == "__main__":
    readme = Path("README.md")
    readme.write_text(with_layout(readme.read_text(encoding="utf-8"), Path.cwd()), encoding="utf-8")
