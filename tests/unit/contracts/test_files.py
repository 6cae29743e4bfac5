"""A small file is replaced in one step, and nothing is left beside it."""

from pathlib import Path

import pytest

from async_search_rl.files import write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, b"old")
    with pytest.raises(TypeError):
        write_whole(path, None)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
