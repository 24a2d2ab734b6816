"""One session's log: collects the session's operations and hands them to the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import StorageUnavailable
from . import records
from .records import AnyOperation, Emitted, EventReceived, Keyring, Origin, SessionRecord, Typed
from .segment import Fresh

if TYPE_CHECKING:
    from .journal import Journal

LAZY = Emitted | EventReceived | Typed
"""Operations that are not acknowledged to a client: they may wait to be committed with others."""


class SessionLog:
    """One session's log. Without a ``journal`` it keeps nothing.

    ``number``: the session's in the journal. ``index``: the index of its next operation. ``salt``: its
    tenant's. Operations appended in one run of the event loop are committed together: after a crash an event
    and its effects are both there, or neither.
    """

    def __init__(
        self, journal: Journal | None = None, number: int = 0, index: int = 0, salt: bytes = b""
    ) -> None:
        self.number = number
        self._salt = salt
        self._journal = journal
        self._index = index
        self._growing: list[Callable[[], AnyOperation]] = []
        self._operations: list[Fresh | Emitted] = []  # ids that may still grow, or what will be written
        self._others: list[Fresh] = []
        self._flushing: asyncio.Handle | None = None
        self._closed = False
        if journal is not None:
            journal.hold(number)

    @classmethod
    def begin(cls, journal: Journal, record: SessionRecord) -> SessionLog:
        """A log for a new session, with the next free number; queues the session's record for the journal.
        The session that a fork begins with is held until the fork is on disk."""
        log = cls(journal, next(journal.numbers), salt=record.salt)
        log.keep(record)
        if record.origin is not None:
            origin = record.origin.number
            journal.hold(origin)
            asyncio.get_running_loop().call_soon(  # after the record was handed to the journal
                lambda: journal.sync().add_done_callback(lambda _: journal.leave(origin))
            )
        return log

    @property
    def durable(self) -> bool:
        """Whether what it takes outlives the process."""
        return self._journal is not None

    @property
    def fault(self) -> StorageUnavailable | None:
        """Why no new turn of this session's tenant may begin, such as a full disk; None if one may."""
        return None if self._journal is None else self._journal.fault_of(self._salt)

    def append(self, operation: AnyOperation) -> None:
        """Add an operation, behind those that `grow` was given. Raises what encoding it raises: in the
        journal's thread that would block all sessions."""
        if self._closed:
            return
        self.gather()
        self._take(operation)
        if not isinstance(operation, LAZY):
            self._flush_soon()
        elif self._journal is not None:
            self._journal.flush_later(self)

    def grow(self, operation: Callable[[], AnyOperation]) -> None:
        """Add an operation later, as it may wait and grows meanwhile, such as the token ids of a reply.
        ``operation`` makes it when it is added: before the next operation is appended, or after
        ``cursor_seconds``."""
        if not self._closed:
            self._growing.append(operation)
            if self._journal is not None:
                self._journal.flush_later(self)

    def gather(self) -> None:
        """Add now the operations that `grow` was given."""
        growing, self._growing = self._growing, []
        for operation in growing:
            self._take(operation())

    def _take(self, operation: AnyOperation) -> None:
        if self._journal is None:
            return
        last = self._operations[-1] if self._operations else None
        if isinstance(last, Emitted) and (joined := last.followed_by(operation)) is not None:
            self._operations[-1] = joined
        elif isinstance(operation, Emitted):
            self._operations.append(operation)
        else:
            index = self._index + len(self._operations)
            self._operations.append(records.append(self.number, index, operation))

    def keep(self, record: SessionRecord | Keyring) -> None:
        """Take the session's new record or keyring, which replaces the one before."""
        if self._journal is not None and not self._closed:
            self._others.append(records.put(self.number, record))
            self._flush_soon()

    def sync(self) -> asyncio.Future[None] | None:
        """A future that is done when everything appended so far is durable; None without a journal. If the
        journal is closed before that, the future raises ``StorageUnavailable``."""
        self._flush()
        return None if self._journal is None else self._journal.sync()

    def position(self) -> Origin | None:
        """Where a session that is forked now begins: this session's number, and how many operations were
        appended to it so far. What waits here is handed to the journal first. None without a journal."""
        self._flush()
        return None if self._journal is None else Origin.of(self.number, self._index)

    def close(self) -> None:
        """Call this when the session leaves memory: hand what was appended to the journal, ignore what comes
        later, and let retention forget the session."""
        self._flush()
        self._closed = True
        if self._journal is not None:
            self._journal.leave(self.number, self._salt)

    def forget(self) -> None:
        """Queue the mark that the session is forgotten; its records leave the logs soon, since no client could
        delete it. Call it last."""
        if self._journal is not None:
            self._journal.put([records.drop(self.number, deleted=True)])

    def _flush_soon(self) -> None:
        """Flush at the end of this run of the event loop."""
        if self._journal is not None and self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if (changes := self.taken()) and self._journal is not None:
            self._journal.put(changes)

    def taken(self) -> list[Fresh]:
        """Remove the changes that wait here and return them, for the journal to queue. Consecutive token ids of
        one reply are joined."""
        self.gather()
        changes = self._others
        for index, one in enumerate(self._operations, self._index):
            changes.append(records.append(self.number, index, one) if isinstance(one, Emitted) else one)
        self._index += len(self._operations)
        self._operations, self._others = [], []
        return changes
