"""A sequence's token ids as a growable array. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import LengthInvalid


def checked_tokens(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """``tokens`` as an array, every id in ``[0, vocab_size)``. Raises `LengthInvalid`: one is not."""
    try:
        ids = np.array(tokens, dtype=np.int64).reshape(-1)
    except (OverflowError, ValueError, TypeError) as error:
        raise LengthInvalid(f"token ids: {error}") from None
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise LengthInvalid(f"token id {wrong} is not in [0, {vocab_size})")
    return ids.astype(np.int32)


class _Store:
    """An int32 array that several token lists read, each to its own length. ``filled``: the greatest of these
    lengths."""

    __slots__ = ("filled", "ids")

    def __init__(self, ids: NDArray[np.int32]) -> None:
        self.ids = ids
        self.filled = len(ids)


class TokenList:
    """Token ids, int32; appending is amortised O(1), a slice is a copy of its own size.

    A copy shares the array. A list that ends where the array is filled grows in place, behind what the others
    read. Any other, such as one that was truncated, copies its ids before it grows: another may read there.
    """

    __slots__ = ("_length", "_store")

    def __init__(self, tokens: NDArray[np.int32] | Sequence[int] = ()) -> None:
        self._store = _Store(np.array(tokens, dtype=np.int32))
        self._length = len(self._store.ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: NDArray[np.int32] | Sequence[int]) -> None:
        """Append the ids ``tokens``."""
        end = self._length + len(tokens)
        self._claim(end)[self._length : end] = tokens
        self._length = end

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` ids, and drop the others."""
        assert 0 <= length <= self._length, f"cannot keep {length} of {self._length} tokens"
        self._length = length

    def span(self, first: int, end: int) -> NDArray[np.int64]:
        """A copy of ids ``[first, end)``, int64."""
        assert 0 <= first <= end <= self._length, f"[{first}, {end}) of {self._length} tokens"
        return self._store.ids[first:end].astype(np.int64)

    def view(self, end: int) -> NDArray[np.int32]:
        """Ids ``[0, end)`` in place, int32; valid until the list changes."""
        assert 0 <= end <= self._length, f"{end} of {self._length} tokens"
        return self._store.ids[:end]

    def copy(self, length: int) -> TokenList:
        """Another list with the first ``length`` ids, for a fork. O(1)."""
        twin = TokenList()
        twin._store, twin._length = self._store, min(length, self._length)
        return twin

    def _claim(self, end: int) -> NDArray[np.int32]:
        """An array with room for ``end`` ids and with this list's ids in it, which no other list reads behind
        this list's length: the present one, or a copy."""
        store = self._store
        if self._length < store.filled or end > len(store.ids):
            grown = np.empty(max(end, 2 * self._length, 16), dtype=np.int32)
            grown[: self._length] = store.ids[: self._length]
            self._store = store = _Store(grown)
        store.filled = end
        return store.ids
