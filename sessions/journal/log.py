"""One session's place in the journal: its operations go in here, in order, and nobody waits.

What is appended in one stretch of the event loop is committed together, so that an event and its effects are
both there after a crash, or neither. Knows nothing of what the operations mean.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from ..errors import StorageUnavailable
from .changes import Append, Change, Put, Table, key_of
from .journal import Journal
from .records import (
    AnyOperation,
    Emitted,
    EventReceived,
    HandleRecord,
    Keyring,
    Origin,
    SessionRecord,
    Typed,
    merged,
)

LAZY = Emitted | EventReceived | Typed
"""Operations that nobody is told of: they may wait for company."""


class SessionLog(Protocol):
    """Where a session's operations go. ``durable``: they outlive the process."""

    durable: bool

    def append(self, operation: AnyOperation) -> None:
        """Remember this next."""

    def keep_handles(self, keyring: Keyring, owner: bytes, dropped: Iterable[bytes] = ()) -> None:
        """These handles are valid from now on, the last of the fresh ones is new, ``dropped`` are no more."""

    def rewrite(self, record: SessionRecord) -> None:
        """The session's record is this one from now on."""

    def sync(self) -> asyncio.Future[None] | None:
        """Done when all so far is durable; None where it never waits."""

    @property
    def fault(self) -> StorageUnavailable | None:
        """Why nothing new may be begun."""

    def position(self) -> Origin | None:
        """Here, for a session that is forked off; None where nothing is kept."""

    def close(self) -> None:
        """Take nothing more in; what was appended is still written."""


class EphemeralLog:
    """Remembers nothing, and nobody waits for it."""

    durable = False
    fault: StorageUnavailable | None = None

    def append(self, operation: AnyOperation) -> None:
        """Nothing."""

    def keep_handles(self, keyring: Keyring, owner: bytes, dropped: Iterable[bytes] = ()) -> None:
        """Nothing."""

    def rewrite(self, record: SessionRecord) -> None:
        """Nothing."""

    def sync(self) -> asyncio.Future[None] | None:
        """Nothing waits."""
        return None

    def position(self) -> Origin | None:
        """Nowhere."""
        return None

    def close(self) -> None:
        """Nothing."""


class JournaledLog:
    """A session's operations in the journal; ``index`` is the next one's, ``salt`` its tenant's."""

    durable = True

    def __init__(self, journal: Journal, number: int, index: int = 0, salt: bytes = b"") -> None:
        self.number = number
        self._salt = salt
        self._journal = journal
        self._index = index
        self._operations: list[AnyOperation] = []
        self._others: list[Change] = []
        self._flushing: asyncio.Handle | None = None
        self._hurried = False
        self._closed = False
        journal.live.add(number)

    @classmethod
    def begin(cls, journal: Journal, record: SessionRecord) -> JournaledLog:
        """A new session's."""
        log = cls(journal, journal.new_number(), salt=record.salt)
        log._queue(Put(Table.SESSIONS, key_of(log.number), record))
        return log

    @property
    def fault(self) -> StorageUnavailable | None:
        """Why nothing new may be begun."""
        return self._journal.fault_of(self._salt)

    def append(self, operation: AnyOperation) -> None:
        """Queue it for the journal, together with all of this stretch of the loop.

        Raises what encoding it raises: in the journal's thread that would hold up all sessions, for ever.
        """
        if not self._closed:
            if not isinstance(operation, LAZY):
                msgspec.msgpack.encode(operation)
            self._operations.append(operation)
            self._schedule(urgent=not isinstance(operation, LAZY))

    def keep_handles(self, keyring: Keyring, owner: bytes, dropped: Iterable[bytes] = ()) -> None:
        """Write the keyring and the newest handle's record."""
        for digest in dropped:
            self._queue(Put(Table.HANDLES, digest, None))
        newest = HandleRecord(session=self.number, owner=owner)
        self._queue(Put(Table.HANDLES, keyring.fresh[-1], newest))
        self._queue(Put(Table.KEYRINGS, key_of(self.number), keyring))

    def rewrite(self, record: SessionRecord) -> None:
        """Write it in the place of the one before."""
        self._queue(Put(Table.SESSIONS, key_of(self.number), record))

    def sync(self) -> asyncio.Future[None]:
        """Done when all so far is durable."""
        self._flush()
        return self._journal.sync()

    def position(self) -> Origin:
        """Behind all that was appended."""
        self._flush()
        return Origin(session=self.number, operations=self._index)

    def close(self) -> None:
        """Take nothing more in, and let retention have the session."""
        self._flush()
        self._closed = True
        self._journal.leave(self.number, self._salt)

    def _queue(self, change: Change) -> None:
        if not self._closed:
            self._others.append(change)
            self._schedule(urgent=True)

    def _schedule(self, *, urgent: bool) -> None:
        """Flush at the end of this stretch of the loop; ids that were said gather for a while first."""
        loop = asyncio.get_running_loop()
        if urgent and not self._hurried:
            if self._flushing is not None:
                self._flushing.cancel()
            self._hurried, self._flushing = True, loop.call_soon(self._flush)
        elif self._flushing is None:
            self._flushing = loop.call_later(self._journal.settings.cursor_seconds / 2, self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._operations or self._others:
            self._journal.put([*self._others, *self._appends()], urgent=self._hurried)
            self._hurried = False
            self._operations, self._others = [], []

    def _appends(self) -> Iterator[Append]:
        operations = merged(self._operations)
        for index, operation in zip(itertools.count(self._index), operations, strict=False):
            yield Append(self.number, index, operation)
        self._index += len(operations)
