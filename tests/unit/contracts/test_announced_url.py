"""A service's address goes through a file in the run's folder."""

from async_search_rl.http import announce, announced_url


def test_an_announced_address_is_found_and_nothing_before(tmp_path):
    path = tmp_path / "run" / "replay.url"
    assert announced_url(path) is None
    announce(path, "http://127.0.0.1:1")
    assert announced_url(path) == "http://127.0.0.1:1"
    path.write_text("\n")
    assert announced_url(path) is None
