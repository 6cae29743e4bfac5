"""The manifest beside every index: of which corpus, with which parameters, by which versions. A mismatch is refused.

In: what an index is about to be opened with. Out: nothing, or a DataError that names what differs. The manifest is written
last, so a folder without one holds an unfinished build.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

import msgspec

from async_search_rl.errors import DataError
from async_search_rl.files import write_whole
from search.corpus import CorpusStamp

FORMAT = 1
_NAME = "manifest.json"
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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it whole or not at all."""
    write_whole(folder / _NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished index; None where there is none.

    Raises:
        DataError: it is damaged or of another format.
    """
    try:
        manifest = msgspec.json.decode((folder / _NAME).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise DataError(f"{folder / _NAME} must be an index manifest: {error}") from error
    if manifest.format != FORMAT:
        raise DataError(f"{folder / _NAME} must have format {FORMAT}, got {manifest.format}; build the index again")
    return manifest


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
