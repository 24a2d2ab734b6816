"""Fork trees: the sessions that were forked from one first session, directly or through other forks.

A session's parent is the one it was forked from; a session may have a name. Does no I/O: the registry says
which sessions are open, the journal which ones it keeps. `forks.py` makes the forks.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections.abc import Container, Iterable
from dataclasses import dataclass
from unicodedata import normalize

from .errors import MemberUnknown, NameInvalid, PruneInvalid
from .journal.records import SessionRecord

MAX_NAME = 128

FRESH_SECONDS = 60.0
"""A tree is read from the journal again after this time: retention may have forgotten some of its sessions."""

PAST = 1024
"""So many removed sessions are remembered, so that a page can begin behind one of them."""


@dataclass(frozen=True, slots=True)
class Member:
    """One session of a tree. ``parent``: the id it was forked from, None for the first; it may be gone by
    now. ``open``: it is in memory. ``items`` and ``tokens`` are known only then."""

    id: str
    parent: str | None
    name: str
    open: bool = False
    items: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Some sessions of a tree, in order. ``after``: where the next page begins; None on the last page."""

    members: list[Member]
    after: str | None = None


def root_of(record: SessionRecord) -> str:
    """The id of the first session of the fork tree that the record's session is in."""
    return record.root or record.id


class ForkTree:
    """One tree: its open sessions, and after `load` those that only the journal has.

    Sessions are ordered by their numbers in the journal, so a parent stands before its children.
    """

    def __init__(self) -> None:
        self.open: set[str] = set()
        """Ids of the sessions in memory."""
        self.unopened: set[str] = set()
        """Ids of the forks in memory that no client has opened yet. A tree may have only so many."""
        self.loading = asyncio.Lock()
        """Held while the journal is read for `load`: it is asked once."""
        self.changed: set[str] | None = None
        """Ids of the sessions that changed since the journal began to be read for `load`; None: it is not."""
        self._numbers: list[int] = []
        self._members: dict[int, Member] = {}
        self._number_of: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._past: dict[str, int] = {}  # numbers of removed sessions
        self._loaded: float | None = None

    def add(self, number: int, record: SessionRecord) -> None:
        """Add a session with its number in the journal, or replace its record."""
        self._note(record.id)
        self._put(number, record)

    def drop(self, session_id: str) -> None:
        """Remove a session from the tree, if it is there. Its number is remembered, so that a page can begin
        behind it."""
        number = self._number_of.pop(session_id, None)
        if number is None:
            return
        self._note(session_id)
        member = self._members.pop(number)
        del self._numbers[bisect_right(self._numbers, number) - 1]
        if self._names.get(member.name) == session_id:
            del self._names[member.name]
        self._past[session_id] = number
        if len(self._past) > PAST:
            del self._past[next(iter(self._past))]

    def stale(self, now: float) -> bool:
        """Whether the tree's sessions in the journal were not read yet, or more than ``FRESH_SECONDS`` ago.
        ``now``: seconds, by the clock of `load`."""
        return self._loaded is None or now - self._loaded > FRESH_SECONDS

    def load(
        self, kept: Iterable[tuple[int, SessionRecord]], now: float, pruned: Container[str] = ()
    ) -> None:
        """Take in the journal's sessions, (number, record) each, but none that is open or in ``pruned``.
        Sessions of the tree that are neither in ``kept`` nor open are removed. A session that `changed`
        meanwhile stays as it is. ``now``: the time in seconds, for `stale`."""
        changed, there = self.changed or set(), set()
        for number, record in kept:
            there.add(record.id)
            if record.id not in changed and record.id not in self.open and record.id not in pruned:
                self._put(number, record)
        for session_id in list(self._number_of):
            if session_id not in there and session_id not in changed and session_id not in self.open:
                self.drop(session_id)
        self.changed = None
        self._loaded = now

    def page(self, limit: int | None, after: str | None) -> Page:
        """At most ``limit`` sessions (None: all) behind the session with the id ``after``; `Member.open` is
        false. Raises ``MemberUnknown``."""
        behind = -1
        if after is not None:
            known = self._number_of.get(after, self._past.get(after))
            if known is None:
                raise MemberUnknown(f"This tree has no session {after!r} to go on after", param="after")
            behind = known
        first = bisect_right(self._numbers, behind)
        last = len(self._numbers) if limit is None else first + limit
        found = [self._members[number] for number in self._numbers[first:last]]
        return Page(found, found[-1].id if last < len(self._numbers) else None)

    def checked_name(self, name: str, session_id: str) -> str:
        """Check that the session ``session_id`` may have this name; "" is none. Returns the name in Unicode's
        normal form C. Raises ``NameInvalid`` if it is too long or another session of the tree has it."""
        name = normalize("NFC", name)
        if len(name) > MAX_NAME:
            raise NameInvalid(f"A name has at most {MAX_NAME} characters", param="name")
        if name and self._names.get(name, session_id) != session_id:
            raise NameInvalid(f"Another session of this tree is named {name!r}", param="name")
        return name

    def check_pruned(self, target: str, asking: str) -> int:
        """Check that the session ``asking`` may prune the session ``target``. Returns the number of
        ``target`` in the journal. Raises ``MemberUnknown``, or ``PruneInvalid`` if the two are the same."""
        number = self._number_of.get(target)
        if number is None:
            raise MemberUnknown(f"This tree has no session {target!r}", param="session")
        if target == asking:
            raise PruneInvalid(
                "A session cannot prune itself: leave it, and prune it from another", param="session"
            )
        return number

    def _note(self, session_id: str) -> None:
        if self.changed is not None:
            self.changed.add(session_id)

    def _put(self, number: int, record: SessionRecord) -> None:
        before = self._members.get(number)
        if before is None:
            insort(self._numbers, number)
        elif self._names.get(before.name) == record.id:
            del self._names[before.name]
        self._members[number] = Member(record.id, record.parent or None, record.name)
        self._number_of[record.id] = number
        if record.name:
            self._names[normalize("NFC", record.name)] = record.id


class ForkTrees:
    """The fork trees of the open sessions. A tree is here while one of its sessions is open."""

    def __init__(self) -> None:
        self._trees: dict[str, ForkTree] = {}  # by the id of the first session
        self.pruned: set[str] = set()
        """Ids of the sessions that are being forgotten. No handle opens them."""

    def of(self, record: SessionRecord) -> ForkTree:
        """The tree of an open session, as far as it is known."""
        return self._trees[root_of(record)]

    def enter(self, number: int, record: SessionRecord) -> None:
        """Called when a session is open now: it enters its tree. ``number``: its number in the journal."""
        tree = self._trees.setdefault(root_of(record), ForkTree())
        tree.add(number, record)
        tree.open.add(record.id)

    def leave(self, record: SessionRecord, *, kept: bool) -> None:
        """Called when a session is closed. ``kept``: the journal has it, so it stays in its tree."""
        tree = self.of(record)
        tree.unopened.discard(record.id)
        tree.open.discard(record.id)
        if not kept:
            tree.drop(record.id)
        if not tree.open:
            del self._trees[root_of(record)]

    def begin_pruning(self, record: SessionRecord, target: str) -> None:
        """Take the session ``target`` out of its tree: that of the session with this ``record``."""
        self.pruned.add(target)
        if (tree := self._trees.get(root_of(record))) is not None:
            tree.drop(target)
