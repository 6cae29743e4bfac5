"""A least-recently-used cache of answers, bounded by entries and by bytes. Pure: no clock, no lock; use within one event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Keeps at most ``max_entries`` values of at most ``max_bytes`` together (as ``size_of`` counts them); 0 entries: off."""

    def __init__(self, max_entries: int, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """The value of ``key``, now the most recently used one; None where there is none."""
        entry = self._values.get(key)
        if entry is None:
            self.misses += 1
            return None
        self._values.move_to_end(key)
        self.hits += 1
        return entry[0]

    def put(self, key: Hashable, value: Value) -> None:
        """Keep ``value`` as the most recently used one; the least recently used ones make room. Too large a value is not kept."""
        if self._max_entries == 0:
            return
        old = self._values.pop(key, None)
        if old is not None:
            self.bytes -= old[1]
        size = self._size_of(value)
        if size > self._max_bytes:
            return
        self._values[key] = (value, size)
        self.bytes += size
        while len(self._values) > self._max_entries or self.bytes > self._max_bytes:
            _, (_, freed) = self._values.popitem(last=False)
            self.bytes -= freed

    def clear(self) -> None:
        """Forget everything, as when the index changes."""
        self._values.clear()
        self.bytes = 0
