"""The manifest beside every index: of which corpus, with which parameters, by which versions. A mismatch is refused.

In: what an index is about to be opened with. Out: nothing, or a DataError that names what differs. The manifest is written
last; until then the folder has a note of what is being built, so that a build goes on only with parts of its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from async_search_rl.errors import DataError
from async_search_rl.files import write_whole
from search.corpus import CorpusStamp

FORMAT = 1
_NAME, _BUILDING = "manifest.json", "building.json"
_LATE = ("retrieval.faiss",)
"""Parameters that no part of an unfinished build depends on: vectors fit any kind of FAISS index."""
_log = logging.getLogger(__name__)
Parameter = str | int | float


class Manifest(msgspec.Struct, frozen=True):
    """What an index folder holds."""

    backend: str
    """Index kind."""
    rows: int
    """Documents."""
    corpus_sha256: str
    """Digest of the corpus's text."""
    parameters: dict[str, Parameter]
    """What changes the index's content; must be equal when it is opened."""
    versions: dict[str, str]
    """Versions of the libraries that made it; shown, not compared."""
    format: int = FORMAT
    """Version of this structure."""


def new_manifest(backend: str, corpus: CorpusStamp, parameters: dict[str, Parameter], packages: Iterable[str]) -> Manifest:
    """The manifest of an index that is made now with those of ``packages`` (distribution names) that are installed."""
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return Manifest(backend, corpus.rows, corpus.sha256, parameters, versions)


def begin_build(folder: Path, manifest: Manifest) -> None:
    """Make ``folder`` ready to build, or to go on building, what ``manifest`` says.

    The remains of an interrupted build of another corpus or with other parameters are removed.

    Raises:
        DataError: the folder holds files that no build of this package has left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    building = _read(folder / _BUILDING)
    found = [path for path in folder.iterdir() if path.name != _BUILDING]
    if building is None and not all(path.name.startswith(".") for path in found):
        raise DataError(
            f"{folder} must be an index or an unfinished build, got other files; remove it or name another retrieval.index"
        )
    if building is not None and _parts(building) != _parts(manifest):
        _log.warning("%s held an unfinished build of another corpus or with other parameters: it begins anew", folder)
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    _write(folder / _BUILDING, manifest)


def end_build(folder: Path, manifest: Manifest) -> None:
    """Declare the index in ``folder`` finished."""
    _write(folder / _NAME, manifest)
    (folder / _BUILDING).unlink(missing_ok=True)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished index; None where there is none.

    Raises:
        DataError: it is damaged or of another format.
    """
    return _read(folder / _NAME)


def require_match(folder: Path, manifest: Manifest, corpus: CorpusStamp, parameters: dict[str, Parameter]) -> None:
    """Refuse an index of another corpus or with other parameters.

    Raises:
        DataError: naming what differs.
    """
    if (manifest.rows, manifest.corpus_sha256) != (corpus.rows, corpus.sha256):
        raise DataError(
            f"the index in {folder} must be of this corpus ({corpus.rows} documents, sha256 {corpus.sha256[:12]}), "
            f"got one of {manifest.rows} documents, sha256 {manifest.corpus_sha256[:12]}; remove it or name another retrieval.index"
        )
    for name in sorted(manifest.parameters.keys() | parameters.keys()):
        made, wanted = manifest.parameters.get(name), parameters.get(name)
        if made != wanted:
            raise DataError(
                f"{name} of the index in {folder} must be {wanted!r}, as configured, got {made!r}; remove it or change the key"
            )


def _parts(manifest: Manifest) -> tuple[str, int, str, dict[str, Parameter]]:
    """What the parts of an unfinished build depend on."""
    parameters = {name: value for name, value in manifest.parameters.items() if name not in _LATE}
    return manifest.backend, manifest.rows, manifest.corpus_sha256, parameters


def _write(path: Path, manifest: Manifest) -> None:
    write_whole(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def _read(path: Path) -> Manifest | None:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise DataError(f"{path} must be an index manifest: {error}") from error
    if manifest.format != FORMAT:
        raise DataError(f"{path} must have format {FORMAT}, got {manifest.format}; build the index again")
    return manifest
