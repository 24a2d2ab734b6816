"""The block keys of one sequence, in the order of its blocks; a fork shares them, and copies none.

A list that several chains read, each to its own length. Whoever ends where the list ends puts keys behind it,
which the others do not see; whoever would write where another may read takes a copy first. Makes no keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import overload


class KeyChain(Sequence[bytes]):
    """Reads as a list; grows and shrinks at its end only."""

    __slots__ = ("_keys", "_length", "_shared")

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._keys = list(keys)
        self._length = len(self._keys)
        self._shared = False

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...

    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return self._keys[slice(*place.indices(self._length))]
        if not -self._length <= place < self._length:
            raise IndexError(f"key {place} of {self._length}")
        return self._keys[place % self._length]

    def extend(self, keys: Iterable[bytes]) -> None:
        """Put keys behind the last."""
        if self._length < len(self._keys):
            self._part()
        self._keys.extend(keys)
        self._length = len(self._keys)

    def truncate(self, length: int) -> None:
        """Keep the first ``length``, where there are more."""
        self._length = min(length, self._length)
        if not self._shared:
            del self._keys[self._length :]

    def copy(self, length: int) -> KeyChain:
        """A chain of its own with the first ``length``, where there are as many. O(1)."""
        twin = KeyChain()
        twin._keys, twin._length = self._keys, min(length, self._length)
        twin._shared = self._shared = True
        return twin

    def _part(self) -> None:
        """Others may read what stands behind: go on in a list of its own."""
        self._keys = list(islice(self._keys, self._length))
        self._shared = False
