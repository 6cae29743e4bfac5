import json

import pytest

from async_search_rl.errors import DataError
from async_search_rl.tools.output import MANIFEST, build_once


def counting(calls, text="content"):
    def fill(folder):
        calls.append(folder)
        (folder / "sub").mkdir()
        (folder / "sub" / "file.txt").write_text(text)

    return fill


def test_the_same_recipe_is_built_once(tmp_path):
    calls = []
    assert build_once(tmp_path / "out", {"version": 1}, counting(calls))
    assert not build_once(tmp_path / "out", {"version": 1}, counting(calls))
    assert len(calls) == 1
    assert list(json.loads((tmp_path / "out" / MANIFEST).read_text())["sha256"]) == ["sub/file.txt"]


def test_another_recipe_or_a_damaged_file_is_built_again(tmp_path):
    calls = []
    build_once(tmp_path / "out", {"version": 1}, counting(calls))
    assert build_once(tmp_path / "out", {"version": 2}, counting(calls, "other"))
    assert (tmp_path / "out" / "sub" / "file.txt").read_text() == "other"
    (tmp_path / "out" / "sub" / "file.txt").write_text("damaged")
    assert build_once(tmp_path / "out", {"version": 2}, counting(calls, "other"))
    (tmp_path / "out" / MANIFEST).write_text("{")
    assert build_once(tmp_path / "out", {"version": 2}, counting(calls, "other"))
    assert len(calls) == 4


def test_files_that_others_add_do_not_count(tmp_path):
    build_once(tmp_path / "out", {}, counting([]))
    (tmp_path / "out" / "index").write_text("made from it later")
    assert not build_once(tmp_path / "out", {}, counting([]))


def test_an_interrupted_build_leaves_what_was_there(tmp_path):
    build_once(tmp_path / "out", {"version": 1}, counting([]))

    def interrupted(folder):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "out", {"version": 2}, interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not build_once(tmp_path / "out", {"version": 1}, counting([]))


def test_a_folder_of_somebody_else_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_text("precious")
    with pytest.raises(DataError, match="must be absent, empty or made by this tool"):
        build_once(tmp_path / "out", {}, counting([]))
    assert (tmp_path / "out" / "theirs").read_text() == "precious"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="must be a place that can be written"):
        build_once(tmp_path / "file" / "deeper" / "out", {}, counting([]))
