"""The LRU cache against a plain model of it."""

from hypothesis import given
from hypothesis import strategies as st

from search.cache import LruCache

OPERATIONS = st.lists(st.tuples(st.sampled_from(["get", "put", "clear"]), st.integers(0, 6), st.integers(0, 40)), max_size=60)


@given(OPERATIONS, st.integers(0, 5), st.integers(0, 100))
def test_behaves_like_an_ordered_list(operations: list[tuple[str, int, int]], entries: int, size: int) -> None:
    cache: LruCache[int] = LruCache(entries, size, lambda value: value)
    model: list[tuple[int, int]] = []  # least recently used first
    for name, key, value in operations:
        known = dict(model)
        if name == "get":
            assert cache.get(key) == known.get(key)
            if key in known:
                model = [item for item in model if item[0] != key] + [(key, known[key])]
        elif name == "put":
            cache.put(key, value)
            model = [item for item in model if item[0] != key]
            if entries and value <= size:
                model.append((key, value))
                while len(model) > entries or sum(v for _, v in model) > size:
                    model.pop(0)
        else:
            cache.clear()
            model = []
        assert len(cache) == len(model) <= entries
        assert cache.bytes == sum(v for _, v in model) <= size


def test_counts_hits_and_misses() -> None:
    cache: LruCache[str] = LruCache(2, 100, len)
    cache.put("a", "answer")
    assert (cache.get("a"), cache.get("b")) == ("answer", None)
    assert (cache.hits, cache.misses) == (1, 1)


def test_no_entries_means_off() -> None:
    cache: LruCache[str] = LruCache(0, 100, len)
    cache.put("a", "answer")
    assert cache.get("a") is None
