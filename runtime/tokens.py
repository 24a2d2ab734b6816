"""A sequence's token ids as a growable array. Knows nothing of what they mean or whose KV is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import LengthInvalid


def checked_tokens(tokens: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """``tokens`` as an array, every id in ``[0, vocab_size)``.

    Raises:
        LengthInvalid: one is not.
    """
    try:
        ids = np.array(tokens, dtype=np.int64).reshape(-1)
    except (OverflowError, ValueError, TypeError) as error:
        raise LengthInvalid(f"token ids: {error}") from None
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise LengthInvalid(f"token id {wrong} is not in [0, {vocab_size})")
    return ids.astype(np.int32)


class TokenList:
    """Token ids, int32; appending is amortised O(1), a slice is a copy of its own size."""

    __slots__ = ("_ids", "_length")

    def __init__(self, tokens: NDArray[np.int32] | Sequence[int] = ()) -> None:
        self._ids: NDArray[np.int32] = np.array(tokens, dtype=np.int32)
        self._length = len(self._ids)

    def __len__(self) -> int:
        return self._length

    def append(self, token: int) -> None:
        """Put one id behind the last."""
        self._reserve(self._length + 1)
        self._ids[self._length] = token
        self._length += 1

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Put ids behind the last."""
        end = self._length + len(tokens)
        self._reserve(end)
        self._ids[self._length : end] = tokens
        self._length = end

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` ids."""
        assert 0 <= length <= self._length, f"cannot keep {length} of {self._length} tokens"
        self._length = length

    def span(self, first: int, end: int) -> NDArray[np.int64]:
        """A copy of ids ``[first, end)``, int64."""
        assert 0 <= first <= end <= self._length, f"[{first}, {end}) of {self._length} tokens"
        return self._ids[first:end].astype(np.int64)

    def view(self, end: int) -> NDArray[np.int32]:
        """Ids ``[0, end)`` in place, int32: good until the list changes."""
        assert 0 <= end <= self._length, f"{end} of {self._length} tokens"
        return self._ids[:end]

    def copy(self, length: int) -> TokenList:
        """A list of its own with the first ``length`` ids, for a fork."""
        return TokenList(self._ids[: min(length, self._length)])

    def _reserve(self, length: int) -> None:
        if length > len(self._ids):
            grown = np.empty(max(length, 2 * len(self._ids), 16), dtype=np.int32)
            grown[: self._length] = self._ids[: self._length]
            self._ids = grown
