"""Keys with a priority each, of which the smallest is found at once. Knows nothing of what a key or a priority
means."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SPARE = 64
"""Outdated entries that the heap may keep beside as many as there are keys."""


class Priorities(Generic[K]):
    """Keys, each with a priority: a value that can be compared, such as a tuple of numbers. Each method takes
    O(log keys), on average over many calls."""

    def __init__(self) -> None:
        self._priorities: dict[K, Any] = {}
        self._heap: list[tuple[Any, K]] = []  # some entries are outdated: `_priorities` has others

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, key: K) -> bool:
        return key in self._priorities

    def __iter__(self) -> Iterator[K]:
        """All keys, the smallest priority first; the first n take O(n log n). Nothing may change meanwhile."""
        last = None
        waiting = [] if self.first is None else [(self._heap[0], 0)]
        heap = self._heap
        while waiting:
            entry, at = heappop(waiting)
            if entry != last and self._is_current(*entry):
                yield entry[1]
            last = entry  # an outdated entry may have become current again: then it is here twice
            for below in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heappush(waiting, (heap[below], below))

    def __getitem__(self, key: K) -> Any:
        return self._priorities[key]

    def put(self, key: K, priority: Any) -> None:
        """Add a key, or give it another priority."""
        self._priorities[key] = priority
        heappush(self._heap, (priority, key))
        if len(self._heap) > 2 * len(self._priorities) + SPARE:
            self._heap = [(priority, key) for key, priority in self._priorities.items()]
            heapify(self._heap)

    def discard(self, key: K) -> bool:
        """Remove a key. Returns whether it was here."""
        return self._priorities.pop(key, self) is not self

    @property
    def first(self) -> K | None:
        """The key with the smallest priority, of equal ones the smallest key; None if there is none."""
        heap = self._heap
        while heap and not self._is_current(*heap[0]):
            heappop(heap)
        return heap[0][1] if heap else None

    def _is_current(self, priority: Any, key: K) -> bool:
        return key in self._priorities and bool(self._priorities[key] == priority)
