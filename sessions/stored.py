"""Stored objects: what the gateway keeps in the journal beside sessions, such as the responses and
conversations of the Responses API. An object is found by its tenant and its name, also by the next server.

Its content is a list of notes: bytes that only the gateway can read, appended one by one. An object is an entry
of the journal like a session, so retention, the tenants' shares, backup, verification and erasure hold for it.
An object may begin with the notes of another one, as a fork begins with the operations of its parent: these
stay readable when the other object is dropped.

A cache in memory, bounded in bytes, answers for objects that were used lately. Without a journal it is all
there is: the tenant that holds the most loses what it used longest ago.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from .journal.journal import Journal
from .journal.records import Keyring, Noted, Origin, SessionRecord, drop
from .journal.segment import Fresh
from .journal.session_log import SessionLog
from .journal.store import JournalStore

CACHE_BYTES = 64 << 20
PERSON = b"holdfast-stored"
"""Personalization of BLAKE2b: keeps the digests of stored objects apart from those of handles and
conversations."""
AROUND_NOTE = 64
"""Roughly how many bytes of memory a note (a byte string) takes beyond its own length."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One version of an object, immutable. ``notes``: its content, the oldest first: the notes of the object
    that it began with, if any, then ``own`` notes of its own. ``salt``: its tenant's. ``number``: the number of
    its entry in the journal."""

    name: str
    salt: bytes
    number: int
    notes: tuple[bytes, ...]
    own: int

    @property
    def last(self) -> bytes:
        """The latest note."""
        return self.notes[-1]

    @property
    def size(self) -> int:
        """The bytes of all notes."""
        return sum(map(len, self.notes))


class StoredObjects:
    """All stored objects of one server: in the journal, and those that were used lately in a cache.
    ``journal``: None keeps them in the cache alone. ``most``: the most bytes of the cache."""

    def __init__(self, journal: Journal | None, most: int = CACHE_BYTES) -> None:
        self._journal = journal
        self._numbers = itertools.count(1)
        self._most = most
        self._bytes = 0
        self._cached: dict[bytes, OrderedDict[str, StoredObject]] = {}  # by tenant, the longest unused first
        self._sizes: dict[bytes, int] = {}  # bytes in the cache, by tenant
        self._holders: dict[int, int] = {}  # how many objects in the cache have a note, by its identity
        self._changes = 0
        self._unwritten: set[int] = set()  # numbers of objects that the journal's thread has not written yet
        self._dropping: set[int] = set()  # and of those that it has not forgotten yet

    def check(self, salt: bytes) -> None:
        """Raises ``StorageUnavailable`` if nothing can be stored for this tenant now."""
        if self._journal is not None and (fault := self._journal.fault_of(salt)) is not None:
            raise fault

    def add(
        self, name: str, salt: bytes, note: bytes, *, owner: bytes = b"", parent: StoredObject | None = None
    ) -> StoredObject:
        """Store a new object and return its first version; `durable` waits until it is on disk.

        ``salt``: its tenant's. ``note``: its first note of its own. ``owner``: the digest of the API key that
        makes it. ``parent``: an object of the same tenant; it begins with the notes of that one; None: it
        begins empty.
        """
        notes = (note,) if parent is None else (*parent.notes, note)
        made = StoredObject(name, salt, next(self._numbers), notes, 1)
        if self._journal is not None:
            made = self._write(self._journal, made, owner, parent)
        self._keep(made)
        return made

    def _write(
        self,
        journal: Journal,
        made: StoredObject,
        owner: bytes,
        parent: StoredObject | None = None,
        gone: Sequence[Fresh] = (),
    ) -> StoredObject:
        """Write the new object ``made`` to the journal, and ``gone`` in the same group. If its parent was
        forgotten meanwhile, all notes become its own. Returns it with its number in the journal."""
        origin = None
        if parent is not None:
            journal.hold(parent.number)  # before the look, see `Journal.keeps`
            if self._lives(journal, parent.number):
                origin = Origin.of(parent.number, parent.own)
        clock = datetime.now().astimezone().isoformat()
        record = SessionRecord(id=made.name, owner=owner, salt=made.salt, clock=clock, origin=origin)
        log = SessionLog.begin(journal, record)
        digest = digest_of(made.salt, made.name)
        # Twice, since retention takes a fork with one digest for a session that was never opened.
        log.keep(Keyring(fresh=(), conversations=(digest, digest)))
        own = made.notes if origin is None else made.notes[-1:]
        for note in own:
            log.append(Noted(note=note))
        journal.put([*log.taken(), *gone])
        self._unwritten.add(log.number)
        journal.sync().add_done_callback(lambda _: self._written(log))
        if parent is not None:
            journal.leave(parent.number)
        return replace(made, number=log.number, own=len(own))

    def _written(self, log: SessionLog) -> None:
        self._unwritten.discard(log.number)
        log.close()

    def _lives(self, journal: Journal, number: int) -> bool:
        """Whether the journal has the object with this number, or is about to write it, and was not told to
        forget it."""
        if number in self._dropping:
            return False
        return number in self._unwritten or journal.keeps(number)

    def append(self, stored: StoredObject, note: bytes) -> StoredObject:
        """Add a note to the latest version of an object. Returns the next version: with all notes its own, if
        retention has forgotten the object meanwhile."""
        grown = replace(stored, notes=(*stored.notes, note), own=stored.own + 1)
        if self._journal is not None:
            log = SessionLog(self._journal, stored.number, stored.own, stored.salt)
            if self._lives(self._journal, stored.number):
                log.append(Noted(note=note))
            else:
                grown = self._write(self._journal, grown, b"")
            self._journal.put(log.taken())  # until it is on disk, the log keeps retention from forgetting it
            self._journal.sync().add_done_callback(lambda _: log.close())
        self._keep(grown)
        return grown

    def rewrite(self, stored: StoredObject, notes: Sequence[bytes], *, owner: bytes = b"") -> StoredObject:
        """Replace all notes of an object, which are forgotten as in `drop`, by ``notes``. Returns the
        object's next version. ``stored``: its latest one. ``owner``: as in `add`."""
        made = StoredObject(stored.name, stored.salt, next(self._numbers), tuple(notes), len(notes))
        if self._journal is not None:
            gone = [drop(stored.number, deleted=True)]
            made = self._write(self._journal, made, owner, gone=gone)
            self._dropped(self._journal, stored.number)
        self._keep(made)
        return made

    async def find(self, salt: bytes, name: str) -> StoredObject | None:
        """The latest version of an object; None if the tenant has none of this name, or retention has forgotten
        it. Raises ``RecordDamaged``, ``StorageUnavailable``."""
        while True:
            journal = self._journal
            known = kept.get(name) if (kept := self._cached.get(salt)) else None
            if known is not None and (journal is None or self._lives(journal, known.number)):
                self._keep(known)
                return known
            if journal is None:
                return None
            changes = self._changes
            found = await journal.read(lambda store: _read(store, salt, name))
            if changes == self._changes:  # otherwise it may be an older version, or dropped since
                if found is not None:
                    self._keep(found)
                return found

    def drop(self, stored: StoredObject) -> None:
        """Forget an object. Others that begin with its notes keep them."""
        self._changes += 1
        self._forget(stored.salt, stored.name)
        if self._journal is not None:
            self._journal.put([drop(stored.number, deleted=True)])
            self._dropped(self._journal, stored.number)

    def _dropped(self, journal: Journal, number: int) -> None:
        self._dropping.add(number)
        journal.sync().add_done_callback(lambda _: self._dropping.discard(number))

    async def durable(self) -> None:
        """Wait until everything stored so far is on disk. Without a journal it does not wait."""
        if self._journal is not None:
            await asyncio.shield(self._journal.sync())

    def __len__(self) -> int:
        """The number of objects in the cache."""
        return sum(map(len, self._cached.values()))

    def _keep(self, stored: StoredObject) -> None:
        self._changes += 1
        self._forget(stored.salt, stored.name)
        self._cached.setdefault(stored.salt, OrderedDict())[stored.name] = stored
        self._count(stored, 1)
        while self._bytes > self._most:
            salt = max(self._sizes, key=lambda one: self._sizes[one])
            self._forget(salt, next(iter(self._cached[salt])))

    def _forget(self, salt: bytes, name: str) -> None:
        kept = self._cached.get(salt)
        gone = None if kept is None else kept.pop(name, None)
        if kept is not None and gone is not None:
            self._count(gone, -1)
            if not kept:
                del self._cached[salt], self._sizes[salt]

    def _count(self, stored: StoredObject, change: int) -> None:
        """Count the bytes of an object that entered the cache (``change`` 1) or left it (-1). A note that
        several objects of the cache share counts once."""
        size = change * (AROUND_NOTE + 8 * len(stored.notes))
        for note in stored.notes:
            holders = self._holders.get(id(note), 0) + change
            if holders == (1 if change > 0 else 0):
                size += change * (len(note) + AROUND_NOTE)
            if holders:
                self._holders[id(note)] = holders
            else:
                del self._holders[id(note)]
        self._bytes += size
        self._sizes[stored.salt] = self._sizes.get(stored.salt, 0) + size


def digest_of(salt: bytes, name: str) -> bytes:
    """The digest by which the journal finds a tenant's object: 32 bytes."""
    named = len(salt).to_bytes(2) + salt + name.encode(errors="replace")
    return hashlib.blake2b(named, digest_size=32, person=PERSON).digest()


def _read(store: JournalStore, salt: bytes, name: str) -> StoredObject | None:
    known = store.handle(digest_of(salt, name))
    if known is None:
        return None
    stored = store.session(known[0])
    if stored.record.salt != salt or stored.record.id != name:
        return None
    notes = tuple(one.note for one in stored.operations if isinstance(one, Noted))
    return StoredObject(name, salt, stored.number, notes, stored.written) if notes else None
