"""Small files that appear whole or not at all, and what makes a file or folder durable.

In: a path and its new bytes. Out: nothing; a reader, and whoever looks after a kill, sees the old file or the new one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from async_search_rl.errors import ConfigError


def write_whole(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step. Its folder must exist; several processes may do so at once."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(data)
    aside.replace(path)


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[Path]:
    """A folder of a run, made if need be; for the first writes there, which are the block.

    Raises:
        ConfigError: it cannot be made or written to; the message names the keys that choose it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise ConfigError(f"run.dir and run.name must be a folder that can be written, got {folder}: {error.strerror}") from error


def sync(path: Path) -> None:
    """Wait until the file, or the names in the folder, ``path`` are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
