"""The pool's audit: checks that every block is in one state, and that the references are those expected.

A pure function of a statement of the pool's books.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .errors import LeakFound

SHOWN = 8
"""Blocks named per complaint, at most."""


@dataclass(frozen=True, slots=True)
class Books:
    """The blocks of a pool of ``blocks`` by state. ``sealed``: those its index finds. ``owners``: gives a
    block's owners, for the text of a complaint.
    """

    blocks: int
    free: Sequence[int]
    references: Mapping[int, int]
    fenced: Sequence[int]
    cached: Sequence[int]
    sealed: frozenset[int]
    in_flight: bool
    owners: Callable[[int], list[int | str | None]] | None = None


def balance(books: Books, held: Mapping[int, int] | None = None) -> None:
    """``free + held + cached + fenced == all``, each once; references as in ``held`` (block: count) if given.

    Raises:
        LeakFound: with everything that is wrong.
    """
    complaints = [*_states(books), *_index(books)]
    if held is not None:
        complaints += _leaks(books, {block: count for block, count in held.items() if count})
    if complaints:
        raise LeakFound("; ".join(complaints))


def _states(books: Books) -> Iterable[str]:
    seen = Counter([*books.free, *books.references, *books.fenced, *books.cached])
    if twice := [block for block, count in seen.items() if count > 1]:
        yield f"in two states: {_some(twice)}"
    if lost := set(range(books.blocks)) - seen.keys():
        yield f"in no state: {_some(lost)}"
    if strange := seen.keys() - set(range(books.blocks)):
        yield f"not of this pool: {_some(strange)}"
    if books.fenced and not books.in_flight:
        yield f"fenced with no step in flight: {_some(books.fenced)}"
    if wrong := [block for block, count in books.references.items() if count < 1]:
        yield f"held without a reference: {_some(wrong)}"


def _index(books: Books) -> Iterable[str]:
    if unnamed := set(books.cached) - books.sealed:
        yield f"cached without a key: {_some(unnamed)}"
    if stale := books.sealed.intersection(books.free):
        yield f"free with a key: {_some(stale)}"


def _leaks(books: Books, held: Mapping[int, int]) -> Iterable[str]:
    for block in sorted(books.references.keys() | held.keys())[: books.blocks]:
        ours, theirs = books.references.get(block, 0), held.get(block, 0)
        if ours != theirs:
            tags = f" by {books.owners(block)}" if books.owners is not None else ""
            yield f"block {block} is held {ours} times{tags}, {theirs} accounted for"


def _some(blocks: Iterable[int]) -> str:
    listed = sorted(blocks)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(map(str, listed[:SHOWN])) + more
