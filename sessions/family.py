"""A session's family: all that were forked from one, and from those, in memory or in the journal.

Each has its place, below the one it was forked from, and may have a name. Pure; the book knows who is open,
the journal who was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from unicodedata import normalize

import msgspec

from .errors import MemberUnknown, NameInvalid, PruneInvalid
from .journal.records import SessionRecord

MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class Member:
    """One session. ``parent``: whom it was forked from, None for the first; that one may be gone by now.

    ``open``: it is in memory, with so many ``items`` and ``tokens``; else these are not known.
    """

    id: str
    parent: str | None
    name: str
    open: bool
    items: int | None = None
    tokens: int | None = None


def child_of(parent: SessionRecord, session_id: str, config: bytes) -> SessionRecord:
    """The record of a session that is forked from ``parent``, its place in the journal aside."""
    return msgspec.structs.replace(
        parent, id=session_id, config=config, origin=None, name="", parent=parent.id, root=root_of(parent)
    )


def root_of(record: SessionRecord) -> str:
    """The id of its family's first."""
    return record.root or record.id


def members(
    of: SessionRecord, known: Iterable[SessionRecord], sizes: Mapping[str, tuple[int, int]]
) -> list[Member]:
    """The family of ``of`` among the sessions that are ``known``, each once, parents before their children.

    ``sizes``: items and tokens of those in memory.
    """
    family = {record.id: record for record in known if root_of(record) == root_of(of)}
    below: dict[str, list[SessionRecord]] = {}
    for record in family.values():
        below.setdefault(record.parent if record.parent in family else "", []).append(record)
    found: list[Member] = []
    waiting = below.get("", [])[::-1]
    while waiting:
        record = waiting.pop()
        size = sizes.get(record.id)
        items, tokens = (None, None) if size is None else size
        found.append(Member(record.id, record.parent or None, record.name, size is not None, items, tokens))
        waiting += below.get(record.id, [])[::-1]
    return found


def checked_name(name: str, session_id: str, family: Iterable[Member]) -> str:
    """The name as it is kept: in Unicode's normal form C, so that the same text is the same name, however it
    was typed. Raises ``NameInvalid``: too long, or another of the family has it. Any number may have none.
    """
    name = normalize("NFC", name)
    if len(name) > MAX_NAME:
        raise NameInvalid(f"A name has at most {MAX_NAME} characters", param="name")
    taken = {normalize("NFC", member.name) for member in family if member.id != session_id}
    if name and name in taken:
        raise NameInvalid(f"Another session of this tree is named {name!r}", param="name")
    return name


def check_pruned(target: str, asking: str, family: Iterable[Member]) -> None:
    """Raises ``MemberUnknown``, or ``PruneInvalid`` where a session would prune itself."""
    if target not in {member.id for member in family}:
        raise MemberUnknown(f"This tree has no session {target!r}", param="session")
    if target == asking:
        raise PruneInvalid(
            "A session cannot prune itself: leave it, and prune it from another", param="session"
        )
