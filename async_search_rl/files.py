"""Small files that appear whole or not at all, and what makes a file or folder durable.

In: a path and its new bytes. Out: nothing; a reader, and whoever looks after a kill, sees the old file or the new one.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step. Its folder must exist; several processes may do so at once."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(data)
    aside.replace(path)


def sync(path: Path) -> None:
    """Wait until the file, or the names in the folder, ``path`` are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
