"""Output folders that are complete or absent, and are built once.

In: a folder, the recipe (everything its content follows from) and a function that fills an empty folder. Out: the folder with
a `manifest.json` of the recipe and each file's digest. A second call with the same recipe finds the manifest and does nothing; an
interrupted one leaves nothing behind under the final name. Files that others add to the folder later (an index) do not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_search_rl.errors import DataError

MANIFEST = "manifest.json"


def build_once(folder: Path, recipe: dict[str, Any], fill: Callable[[Path], None]) -> bool:
    """Make ``folder`` by ``fill`` unless it already holds the intact result of the same recipe; True if it was made now.

    A folder that an earlier call made (it has a manifest) is replaced; any other non-empty folder is left alone.

    Raises:
        DataError: when ``folder`` exists, is not empty and has no manifest, or when it cannot be made.
    """
    if _is_intact(folder, recipe):
        return False
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).is_file())):
        raise DataError(f"{folder} must be absent, empty or made by this tool, got one without {MANIFEST}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise DataError(f"{folder} must be a place that can be written: {error.strerror}") from error
    try:
        fill(unfinished)
        manifest = {"recipe": recipe, "sha256": _digests(unfinished)}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def _is_intact(folder: Path, recipe: dict[str, Any]) -> bool:
    if not (folder / MANIFEST).is_file():
        return False
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except ValueError:
        return False
    if manifest.get("recipe") != json.loads(json.dumps(recipe)):
        return False
    files = {folder / name: digest for name, digest in manifest.get("sha256", {}).items()}
    return all(path.is_file() and _digest(path) == digest for path, digest in files.items())


def _digests(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
