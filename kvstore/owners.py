"""Owner tags: who holds which block, kept in debug and in tests only.

The pool counts references; this remembers whose they are, so that a block released by mistake, or leaked, is
reported with a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from .errors import BlockMisused

Owner: TypeAlias = int | str | None
"""A sequence's number, or any other name; None for callers that give none."""


class OwnerTags:
    """A multiset of owners per held block."""

    def __init__(self) -> None:
        self._owners: dict[int, Counter[Owner]] = {}

    def take(self, blocks: Iterable[int], owner: Owner) -> None:
        """``owner`` holds each of these once more."""
        for block in blocks:
            self._owners.setdefault(block, Counter())[owner] += 1

    def check(self, blocks: Iterable[int], owner: Owner) -> None:
        """Raises `BlockMisused` if ``owner`` does not hold one of these."""
        for block in blocks:
            if not self._owners.get(block, Counter())[owner]:
                raise BlockMisused(block, f"held by {self.of(block)}", f"released by {owner!r}")

    def give(self, blocks: Iterable[int], owner: Owner) -> None:
        """``owner`` holds each of these once less."""
        for block in blocks:
            owners = self._owners[block]
            owners[owner] -= 1
            if not owners[owner]:
                del owners[owner]
            if not owners:
                del self._owners[block]

    def of(self, block: int) -> list[Owner]:
        """All who hold the block, one entry per reference."""
        return list(self._owners.get(block, Counter()).elements())
