"""Long work in slices of bounded size, so that nothing waits for all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

SLICE = 64
"""The most items of a slice: some 0.02 ms of work."""


def sliced(items: Iterable[T], size: int = SLICE) -> Iterator[list[T]]:
    """Yield the items in lists of ``size``; the last one may be shorter."""
    left = iter(items)
    while part := list(islice(left, size)):
        yield part
