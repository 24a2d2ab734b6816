"""The journal of one server: sessions hand it changes, one thread commits them in groups.

A group is all that was queued while the last commit ran; ids that were said may wait a little for company.
A commit that fails is tried again until it holds: what waits for it is not acknowledged meanwhile. Knows
nothing of what a change means.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import RecordDamaged, ShareFull, StorageUnavailable
from ..settings import JournalSettings
from .folder import StoreLock
from .opening import open_for
from .records import (
    AnyOperation,
    Append,
    Change,
    Emitted,
    EventReceived,
    HandleRecord,
    Keyring,
    Origin,
    Put,
    SessionRecord,
    Table,
    Typed,
    key_of,
    merged,
)
from .store import Condense, JournalStore

log = logging.getLogger(__name__)

T = TypeVar("T")
FREE_SECONDS = 0.2  # how long a look at the disk's free space is believed


class Journal:
    """Open it with ``Journal.open``; for one event loop."""

    def __init__(self, store: JournalStore, lock: StoreLock, settings: JournalSettings, first: int) -> None:
        self.settings = settings
        self.live: set[int] = set()
        """Numbers of the sessions in memory: retention leaves them alone."""
        self.condense: Condense | None = None
        """Makes a long session's operations fewer; without it they stay."""
        self.reclaimable: Callable[[], int] = lambda: 0
        """Bytes of the journal's disk that a cache has taken and gives back when they are needed."""
        self.watchers: set[Callable[[StorageUnavailable], None]] = set()
        """Told on the loop when a commit has failed for the first time."""
        self._store = store
        self._lock = lock
        self._loop = asyncio.get_running_loop()
        self._next_number = first
        self._changed = threading.Condition()
        self._queue: list[Change] = []
        self._jobs: deque[tuple[Callable[[JournalStore], Any], asyncio.Future[Any]]] = deque()
        self._queued = 0
        self._urgent = False
        self._oldest: float | None = None  # when the first of the queue came
        self._closing = False
        self._durable = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._fault: StorageUnavailable | None = None
        self._full: frozenset[bytes] = frozenset()  # tenants whose open sessions fill their shares
        self._looked = 0.0
        self._free: int | None = 0
        self._lack: StorageUnavailable | None = None
        self._commits = self._failures = 0
        self._puzzled = False  # the log has what upkeep failed of
        self._thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)

    @classmethod
    async def open(
        cls, folder: Path, model: bytes, settings: JournalSettings, lock: StoreLock | None = None
    ) -> Journal:
        """The model's journal in ``folder``, whose lock may be held already. Raises ``StoreUnusable``."""
        held = lock
        if held is None:
            held = await asyncio.to_thread(StoreLock(folder).acquire, settings.lock_seconds)
        try:
            store = await asyncio.to_thread(open_for, folder, model, settings)
            # Nobody has come back yet, and the clock of a machine that has just started may be wrong by months.
            await asyncio.to_thread(store.sweep, frozenset(), aged=False)
            await asyncio.to_thread(store.keep_shares, frozenset())
            journal = cls(store, held, settings, await asyncio.to_thread(store.next_number))
        except BaseException:
            held.release()
            raise
        journal._thread.start()
        return journal

    async def aclose(self) -> None:
        """Commit what is queued, if it can be, and let the store go."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        self._store.close()
        self._lock.release()

    # --- for sessions ---------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """A number for a new session."""
        self._next_number += 1
        return self._next_number - 1

    def put(self, changes: Iterable[Change], *, urgent: bool = True) -> None:
        """Queue changes that belong together: they are committed together, in order."""
        with self._changed:
            before = len(self._queue)
            self._queue += changes
            self._queued += len(self._queue) - before
            if self._oldest is None:
                self._oldest = time.monotonic()
                self._changed.notify()
            if urgent and not self._urgent:
                self._urgent = True
                self._changed.notify()

    def sync(self) -> asyncio.Future[None]:
        """Done when all that was put so far is durable."""
        number = self._queued
        if self._waiting and self._waiting[-1][0] == number:
            return self._waiting[-1][1]
        done: asyncio.Future[None] = self._loop.create_future()
        if number <= self._durable:
            done.set_result(None)
            return done
        self._waiting.append((number, done))
        with self._changed:
            self._urgent = True
            self._changed.notify()
        return done

    async def read(self, job: Callable[[JournalStore], T]) -> T:
        """What ``job`` finds in the store, after all that was put before. Raises what it raises."""
        answer: asyncio.Future[T] = self._loop.create_future()
        with self._changed:
            self._jobs.append((job, answer))
            self._changed.notify()
        return await answer

    @property
    def mismatches(self) -> Sequence[str]:
        """How the journal differs from that of the last start, in sentences."""
        return self._store.mismatches

    @property
    def fault(self) -> StorageUnavailable | None:
        """Why nothing new may be begun now: the last commit failed, or the disk's reserve is touched."""
        if self._fault is not None:
            return self._fault
        now = time.monotonic()
        if now - self._looked > FREE_SECONDS:
            self._looked, self._free = now, self._store.free_bytes()
        self._judge(self._free)
        return self._lack

    def fault_of(self, salt: bytes) -> StorageUnavailable | None:
        """Why this tenant may begin nothing new now."""
        if self.fault is None and salt in self._full:
            most = self.settings.tenants[salt].bytes
            return ShareFull(f"This tenant's open sessions fill its share of the journal, {most} bytes")
        return self.fault

    def leave(self, number: int, salt: bytes = b"") -> None:
        """A session is not in memory any more: retention may have it."""
        self.live.discard(number)
        if salt in self.settings.tenants:
            with self._changed:
                self._jobs.append((lambda store: store.shares.look_again(salt), self._loop.create_future()))
                self._changed.notify()

    def _judge(self, free: int | None) -> None:
        """Whether new changes have a place to go to; a change of that is a line in the log."""
        reserve = self.settings.reserve_bytes
        if free is not None and free < reserve:
            free += self.reclaimable()
        lack = None
        if free is None:
            lack = StorageUnavailable(f"the journal's folder is gone: {self._store.folder}")
        elif free < reserve:
            lack = StorageUnavailable(
                f"the journal's disk has {free} bytes left, less than the {reserve} it keeps in reserve"
            )
        if lack is not None and self._lack is None:
            log.error("%s; new turns are refused", lack.message)
        elif lack is None and self._lack is not None:
            log.warning("the journal has room again")
        self._lack = lack

    async def statistics_of(self, salt: bytes) -> dict[str, float]:
        """What a tenant that has a share of the journal has of it. Raises ``StorageUnavailable``."""
        return await self.read(lambda store: store.shares.statistics(salt))

    async def statistics(self) -> dict[str, float]:
        """Queue and store."""
        stored: dict[str, float] = {}
        if self._fault is None:
            with suppress(StorageUnavailable, RecordDamaged):
                stored = await self.read(lambda store: store.statistics())
        return {
            **stored,
            "journal_queued": float(self._queued - self._durable),
            "journal_commits": float(self._commits),
            "journal_failures": float(self._failures),
            "journal_unavailable": float(self.fault is not None),
        }

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        swept = time.monotonic()
        while True:
            group, upto, jobs = self._next()
            if group and not self._commit(group):
                self._answer_closed(jobs)
                return
            if group:
                self._relieve()  # before who waits is told: a prune lets the next turn in
                self._tell(self._committed, upto)
            for job, answer in jobs:
                self._answer(job, answer)
            self._upkeep(self._keep_shares)
            self._shorten()
            self._compact()
            if time.monotonic() - swept > self.settings.sweep_seconds:
                swept = time.monotonic()
                self._upkeep(lambda: self._store.sweep(frozenset(self.live)))
                self._upkeep(self._store.note)
            with self._changed:
                if self._closing and not self._queue and not self._jobs:
                    return

    def _next(self) -> tuple[list[Change], int, list[Any]]:
        """Wait for a group; all that is queued when it begins belongs to it. None, where there is other
        work."""
        compacting = self._store.wants_compaction
        with self._changed:
            while not (self._urgent or self._jobs or self._closing):
                left = None
                if self._oldest is not None:
                    left = self._oldest + self.settings.cursor_seconds / 2 - time.monotonic()
                    if left <= 0:
                        break
                if compacting:
                    return [], 0, []
                self._changed.wait(left)
            return self._taken()

    def _taken(self) -> tuple[list[Change], int, list[Any]]:
        group, self._queue = self._queue, []
        jobs = list(self._jobs)
        self._jobs.clear()
        self._urgent, self._oldest = False, None
        return group, self._queued, jobs

    def _keep_shares(self) -> None:
        self._full = self._store.keep_shares(self.live)

    def _relieve(self) -> None:
        """Who fills its share no more is let in. Who fills it now may yet have closed sessions to lose."""
        self._full &= self._store.shares.full()

    def _upkeep(self, work: Callable[[], object]) -> None:
        """What nobody waits for, and is tried again another time; whatever it raises, the thread goes on."""
        try:
            work()
        except (StorageUnavailable, RecordDamaged):
            return
        except Exception:
            if not self._puzzled:
                log.exception("the journal's upkeep failed")
            self._puzzled = True

    def _shorten(self) -> None:
        """One long session, when nothing is waited for; it is still long if that fails."""
        if not self._store.long or self.condense is None or self._urgent or self._jobs:
            return
        number = min(self._store.long)
        try:
            self._store.condense(number, self.condense)
            self._relieve()
        except (StorageUnavailable, RecordDamaged) as fault:
            log.warning("session %d was not made shorter: %s", number, fault.message)
        except Exception:  # whatever it is: its operations are there as they were
            log.exception("session %d cannot be made shorter", number)

    def _compact(self) -> None:
        """A slice of it, when nothing is waited for."""
        if not (self._urgent or self._jobs) and self._store.wants_compaction:
            self._upkeep(self._store.compact)

    def _commit(self, group: list[Change]) -> bool:
        """Until it holds; False where the journal closes before."""
        while True:
            try:
                self._write(group)
            except StorageUnavailable as fault:
                self._failures += 1
                if self._fault is None:
                    log.error("%s; new turns are refused", fault.message)
                    self._fault = fault
                    self._tell(self._alarm, fault)
                if self._relieved() or self._paused():
                    continue
                return False
            self._commits += 1
            if self._fault is not None:
                log.warning("the journal can be written again")
                self._fault = None
            return True

    def _write(self, group: list[Change]) -> None:
        """Raises ``StorageUnavailable``; for a mistake of ours too: without the thread all wait for ever."""
        try:
            self._store.write(group)
        except StorageUnavailable:
            raise
        except Exception as error:
            if self._fault is None:
                log.exception("the journal cannot write what it was given")
            raise StorageUnavailable(f"the journal cannot be written: {type(error).__name__}") from error

    def _relieved(self) -> bool:
        """Whether room was made in a journal that may grow no further."""
        try:
            return self._store.full and self._store.make_room(frozenset(self.live))
        except (StorageUnavailable, RecordDamaged):
            return False

    def _paused(self) -> bool:
        """Wait before the next try, and answer who wants to read; False when there will be none."""
        with self._changed:
            if not self._closing:
                self._changed.wait(self.settings.retry_seconds)
            jobs = list(self._jobs)
            self._jobs.clear()
            closing = self._closing
        self._answer_closed(jobs)
        return not closing

    def _answer(self, job: Callable[[JournalStore], Any], answer: asyncio.Future[Any]) -> None:
        try:
            found = job(self._store)
        except Exception as fault:
            self._tell(_fail, answer, fault)
        else:
            self._tell(_resolve, answer, found)

    def _answer_closed(self, jobs: Iterable[tuple[Any, asyncio.Future[Any]]]) -> None:
        """What is not committed must not be read past."""
        for _, answer in jobs:
            fault = self._fault or StorageUnavailable("the journal is closed")
            self._tell(_fail, answer, StorageUnavailable(fault.message))

    def _tell(self, heard: Callable[..., None], *words: Any) -> None:
        with suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(heard, *words)

    # --- on the loop ----------------------------------------------------------------------------------------

    def _committed(self, upto: int) -> None:
        self._durable = upto
        while self._waiting and self._waiting[0][0] <= upto:
            _resolve(self._waiting.popleft()[1], None)

    def _alarm(self, fault: StorageUnavailable) -> None:
        for watcher in list(self.watchers):
            watcher(fault)


def _resolve(future: asyncio.Future[Any], found: Any) -> None:
    if not future.done():
        future.set_result(found)


def _fail(future: asyncio.Future[Any], fault: Exception) -> None:
    if not future.done():
        future.set_exception(fault)


LAZY = Emitted | EventReceived | Typed
"""Operations that nobody is told of: they may wait for company."""


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
