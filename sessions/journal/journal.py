"""The journal of one server: sessions hand it changes, and one thread commits them in groups.

A group is everything that is queued when the thread begins a commit: at the end of the pass of the event loop
in which something first waits for it (`Journal.sync`), or `GATHER_SECONDS` after the first change if nothing
waits. What may wait, such as the token ids of replies, waits in the sessions' logs for at most
``cursor_seconds``; then it is queued for all sessions together. A failed commit is tried again until it
succeeds, and nothing that waits for it is acknowledged meanwhile. Knows nothing of what
a change means.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import RecordDamaged, ShareFull, StorageFull, StorageUnavailable, StoreLost
from ..settings import JournalSettings
from . import records
from .clock import ServedClock
from .lock import StoreLock
from .model_store import open_for
from .replay import condensed
from .segment import HIGH, Fresh
from .store import Condense, JournalStore

if TYPE_CHECKING:
    from .session_log import SessionLog

log = logging.getLogger(__name__)

T = TypeVar("T")
FREE_SECONDS = 0.2  # the disk's free space is read again after this time
WATCH_SECONDS = 1.0  # between two looks whether the store is still this server's
SHORTEN_SECONDS = 0.01  # between two sessions that are shortened, while nothing else is to be done
GATHER_SECONDS = 0.002
"""Changes for which nothing waits are committed this long after the first of them, so that those of several
sessions share one sync."""


class Journal:
    """The journal of one server: queues changes to records, and commits them on a thread of its own. Make it
    with `Journal.open`, and use it from one event loop."""

    def __init__(
        self,
        store: JournalStore,
        lock: StoreLock,
        settings: JournalSettings,
        reclaimable: Callable[[], int] = lambda: 0,
    ) -> None:
        self.settings = settings
        self.live: dict[int, int] = {}
        """The sessions that retention skips, by number: those in memory, and those that something which is
        queued needs; and how many hold each (`hold`). Retention's thread looks into it."""
        self.doomed: set[int] = set()
        """Numbers of those that are forgotten when they leave, because a client has deleted them."""
        self.condense: Condense = partial(condensed, max_events=settings.max_events)
        """Makes one snapshot of as many first operations of a long session as possible."""
        self.watchers: set[Callable[[StorageUnavailable], None]] = set()
        """Called on the event loop with the error when a commit fails, not again while it is tried again."""
        self._store = store
        self._lock = lock
        self._reclaimable = reclaimable
        self._loop = asyncio.get_running_loop()
        self.numbers = itertools.count(store.logs.next_session, 1 << HIGH)
        """Numbers for new sessions."""
        self._changed = threading.Condition()
        self._queue: list[Fresh] = []
        self._jobs: deque[tuple[Callable[[JournalStore], Any], asyncio.Future[Any]]] = deque()
        self._queued = 0
        self._taken = 0  # so many of the queued changes are with the thread, or written
        self._urgent = False
        self._later: dict[SessionLog, None] = {}  # logs with operations that may wait
        self._batch: asyncio.TimerHandle | None = None
        self._due: asyncio.Handle | None = None  # the next call of `_wake`
        self._awaited = False  # it comes at the end of this pass, because something waits for the commit
        self._closing = self._closed = False
        self._durable = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._fault: StorageUnavailable | None = None
        self._full: frozenset[bytes] = frozenset()  # tenants with open sessions that fill their shares
        self._looked = 0.0
        self._free: int | None = 0
        self._lack: StorageUnavailable | None = None
        self._commits = self._failures = 0
        self._watched = time.monotonic()
        self._puzzled = False  # a failed upkeep was logged
        self._thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)

    @classmethod
    async def open(
        cls,
        folder: Path,
        model: bytes,
        settings: JournalSettings,
        lock: StoreLock | None = None,
        *,
        reclaimable: Callable[[], int] = lambda: 0,
        seconds: Callable[[], float] = time.monotonic,
    ) -> Journal:
        """Open the journal of ``model`` (the model's digest) in ``folder``, and start its thread. Raises
        ``StoreUnusable``.

        ``lock``: the folder's lock, if the caller holds it; None: it is taken here. `aclose` frees it.
        ``reclaimable`` returns the bytes that a cache on the same disk gives back when the journal needs them.
        ``seconds``: a clock that only goes forward, by which retention counts how long servers ran.
        """
        held = lock
        if held is None:
            held = await asyncio.to_thread(StoreLock(folder).acquire, settings.lock_seconds)
        try:
            clock = ServedClock(seconds)
            store = await asyncio.to_thread(_opened, folder, model, settings, held.lost, clock)
            journal = cls(store, held, settings, reclaimable)
        except BaseException:
            held.release()
            raise
        journal._thread.start()
        return journal

    async def aclose(self) -> None:
        """Commit what is queued, if possible, close the store and free its lock. What still waits for the
        journal then raises ``StorageUnavailable``."""
        if self._batch is not None:
            self._batch.cancel()
            self._flush_all()
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        self._closed = True
        self._store.close()
        self._lock.release()
        self._answer_closed(self._jobs)
        while self._waiting:
            _fail(self._waiting.popleft()[1], self._closed_fault())

    def put(self, changes: Iterable[Fresh]) -> None:
        """Queue changes (records to write); they are committed together, in order, within `GATHER_SECONDS` or
        for the next `sync`, which waits for them."""
        with self._changed:
            before = len(self._queue)
            self._queue += changes
            self._queued += len(self._queue) - before
        if self._due is None:
            self._due = self._loop.call_later(GATHER_SECONDS, self._wake)

    def _wake(self) -> None:
        """Let the thread commit what is queued."""
        self._due, self._awaited = None, False
        with self._changed:
            self._urgent = True
            self._changed.notify()

    def flush_later(self, log: SessionLog) -> None:
        """Queue what this session's log holds within ``cursor_seconds``, in one group with the other logs that
        wait."""
        self._later[log] = None
        if self._batch is None:
            self._batch = self._loop.call_later(self.settings.cursor_seconds, self._flush_all)

    def _flush_all(self) -> None:
        later, self._later, self._batch = self._later, {}, None
        if changes := [change for log in later for change in log.taken()]:
            self.put(changes)

    def sync(self) -> asyncio.Future[None]:
        """A future that is done when everything put so far is durable. What is queued is committed at the end
        of this pass of the event loop, in one group with what else is put until then. If the journal is closed
        before that, the future raises ``StorageUnavailable``."""
        number = self._queued
        if self._waiting and self._waiting[-1][0] == number:
            return self._waiting[-1][1]
        done: asyncio.Future[None] = self._loop.create_future()
        if number <= self._durable:
            done.set_result(None)
            return done
        if self._closed:
            _fail(done, self._closed_fault())
            return done
        self._waiting.append((number, done))
        if not self._awaited:
            self._awaited = True
            if self._due is not None:
                self._due.cancel()
            self._due = self._loop.call_soon(self._wake)
        return done

    async def read(self, job: Callable[[JournalStore], T]) -> T:
        """Run ``job`` with the store on the journal's thread, after everything put so far is committed. Returns
        its result or raises its error. Raises ``StorageUnavailable`` while the journal cannot write, and when
        it is closed."""
        if self._closed:
            raise self._closed_fault()
        answer: asyncio.Future[T] = self._loop.create_future()
        with self._changed:
            self._jobs.append((job, answer))
            self._changed.notify()
        return await answer

    def found(self, digest: bytes) -> int | None:
        """The number of the session that was the last to be known by a digest (`sessions.continuation`); None
        for none. It only looks into a dictionary, and may miss what was put just now."""
        return self._store.sessions.handles.get(digest)

    def keeps(self, number: int) -> bool:
        """Whether this session was written and is not forgotten. It does not wait for the thread, so it may
        miss what was put just now. One that the caller holds stays kept if it is."""
        return number not in self._store.going and self._store.sessions.states.keeps(number)

    @property
    def mismatches(self) -> Sequence[str]:
        """How the journal differs from that of the last start, one sentence each."""
        return self._store.mismatches

    @property
    def fault(self) -> StorageUnavailable | None:
        """Why no new turn may begin: the last commit failed, or the disk is short of space. None if one may."""
        if self._fault is not None:
            return self._fault
        now = time.monotonic()
        if now - self._looked > FREE_SECONDS or self._store.short:
            self._looked, self._free = now, self._store.free_bytes()
        self._judge(self._free)
        return self._lack

    def fault_of(self, salt: bytes) -> StorageUnavailable | None:
        """Why no new turn of the tenant with this ``salt`` may begin: the journal cannot be written, or the
        tenant's open sessions fill its share. None if a turn may begin."""
        if self.fault is None and salt in self._full:
            most = self.settings.tenants[salt].bytes
            return ShareFull(f"This tenant's open sessions fill its share of the journal, {most} bytes")
        return self.fault

    def hold(self, number: int) -> None:
        """Let retention skip session ``number`` until a `leave` for each `hold`."""
        self.live[number] = self.live.get(number, 0) + 1

    def leave(self, number: int, salt: bytes = b"") -> None:
        """End one `hold` of session ``number``. After the last, retention may forget it; if its tenant
        (``salt``) has a share of the journal, that is checked again soon."""
        if (holders := self.live.get(number, 1) - 1) > 0:
            self.live[number] = holders
            return
        self.live.pop(number, None)
        if number in self.doomed:
            self.doomed.discard(number)
            self.put([records.drop(number, deleted=True)])
        if salt in self.settings.tenants:
            with self._changed:
                self._jobs.append(
                    (lambda store: store.retention.look_again(salt), self._loop.create_future())
                )
                self._changed.notify()

    def delete(self, number: int) -> None:
        """Forget session ``number`` for a client: as soon as it is not in memory."""
        self.doomed.add(number)
        if number not in self.live:
            self.leave(number)

    def _judge(self, free: int | None) -> None:
        """Compare the bytes that the journal can still have, ``free``, with its reserve, and set `_lack`, the
        reason why new turns are refused, or None. A change is logged. ``free``: None if it is not known."""
        reserve = self.settings.reserve_bytes
        if free is not None and free < reserve:
            free += self._reclaimable()
        lack = None
        if free is not None and free < reserve:
            lack = StorageFull(
                f"the journal's disk has {free} bytes left, less than the {reserve} it keeps in reserve"
            )
        if lack is not None and self._lack is None:
            log.error("%s; new turns are refused", lack.message)
        elif lack is None and self._lack is not None:
            log.warning("the journal has room again")
        self._lack = lack

    async def statistics(self) -> dict[str, float]:
        """Counts for metrics: changes that wait, commits, failed commits, whether new turns are refused; also
        those of `JournalStore.statistics` (sessions, bytes, logs, damage), except while the journal cannot
        write."""
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

    def _run(self) -> None:
        swept = time.monotonic()
        while True:
            group, jobs = self._next()
            if group and not self._commit(group):
                self._answer_closed(jobs)
                return
            if group:
                self._relieve()  # before the futures resolve: a prune lets the next turn begin
                self._tell(self._committed, self._taken)
            self._watch()
            if self._fault is None:
                for job, answer in jobs:
                    self._answer(job, answer)
                self._upkeep(self._keep_shares)
                self._shorten()
                self._merge()
                if time.monotonic() - swept > self.settings.sweep_seconds:
                    swept = time.monotonic()
                    self._upkeep(lambda: self._store.sweep(self.live))
                    self._upkeep(self._store.note)
            else:
                self._answer_closed(jobs)
            with self._changed:
                if self._closing and not self._queue and not self._jobs:
                    return

    def _next(self) -> tuple[list[Fresh], list[Any]]:
        """In the journal's thread: wait for work. Returns the queued group and the jobs. Both may be empty: the
        journal closes, there is time to merge or to shorten a session, or `WATCH_SECONDS` are over."""
        merging = self._store.wants_merge
        shortening = self._fault is None and self._store.overlong is not None
        seconds = SHORTEN_SECONDS if shortening else WATCH_SECONDS
        with self._changed:
            while not (self._urgent or self._jobs or self._closing):
                if merging or not self._changed.wait(seconds):
                    return [], []
            jobs = list(self._jobs)
            self._jobs.clear()
            return self._take(), jobs

    def _take(self) -> list[Fresh]:
        """In the journal's thread, with the lock: the queued changes, which are queued no more."""
        group, self._queue = self._queue, []
        self._taken, self._urgent = self._queued, False
        return group

    def _watch(self) -> None:
        """Look, once a second, whether the store is still this server's: if not, new turns are refused until it
        is. The look also counts the second for retention."""
        now = time.monotonic()
        if now - self._watched < WATCH_SECONDS and self._fault is None:
            return
        self._watched = now
        try:
            self._store.watch()
        except StoreLost as fault:
            self._fail(fault)
        else:
            self._healed()

    def _fail(self, fault: StorageUnavailable) -> None:
        """Refuse new turns because of ``fault`` until `_healed`. The first fault is logged, and the server
        told."""
        if self._fault is None:
            log.error("%s; new turns are refused", fault.message)
            self._fault = fault
            self._tell(self._alarm, fault)

    def _healed(self) -> None:
        if self._fault is not None:
            log.warning("the journal can be written again")
            self._fault = None

    def _keep_shares(self) -> None:
        self._full = self._store.keep_shares(self.live)

    def _relieve(self) -> None:
        """Remove from `_full` the tenants that no longer have more bytes in the journal than their share, so
        that their turns may begin. No tenant is added here: `_keep_shares` does that, after it has erased what
        it can of the tenant's closed sessions."""
        self._full &= self._store.retention.full()

    def _upkeep(self, work: Callable[[], object]) -> None:
        """Run ``work``, for which no caller waits. An error is logged once at most and not raised: it is
        tried again later, and the thread goes on."""
        try:
            work()
        except (StorageUnavailable, RecordDamaged):
            return
        except Exception:
            if not self._puzzled:
                log.exception("the journal's upkeep failed")
            self._puzzled = True

    def _shorten(self) -> None:
        """Replace the first operations of one long session by a snapshot, if nothing else is to be done or if
        removed text has to go."""
        number = self._store.overlong
        if number is None or ((self._urgent or self._jobs) and not self._store.overdue):
            return
        try:
            self._store.condense(number, self.condense)
            self._relieve()
        except (StorageUnavailable, RecordDamaged) as fault:
            log.warning("session %d was not condensed: %s", number, fault.message)
        except Exception:  # its operations are unchanged
            log.exception("session %d cannot be condensed", number)

    def _merge(self) -> None:
        """Do a slice of a merge, if nothing else is to be done or if it is overdue."""
        if (not (self._urgent or self._jobs) or self._store.overdue) and self._store.wants_merge:
            self._upkeep(self._store.merge)

    def _commit(self, group: list[Fresh]) -> bool:
        """Try to write ``group`` until it succeeds, with what is queued meanwhile: a deletion among that may
        use what is left of the disk. At the first failure set `_fault`, so that new turns are refused, and tell
        the server. Returns False if the journal closes before it succeeds."""
        while True:
            try:
                self._store.write(group)
            except Exception as error:  # the thread must not end
                fault = error if isinstance(error, StorageUnavailable) else None
                if fault is None:
                    if self._fault is None:
                        log.exception("the journal cannot write what it was given")
                    fault = StorageUnavailable(f"the journal cannot be written: {type(error).__name__}")
                self._failures += 1
                self._fail(fault)
                if not self._relieved() and not self._paused():
                    return False
                with self._changed:
                    group += self._take()
                continue
            self._commits += 1
            self._healed()
            return True

    def _relieved(self) -> bool:
        """If the journal is full, forget closed sessions to make room in it. Returns whether room was made."""
        try:
            return self._store.full and self._store.make_room(self.live)
        except Exception:  # the thread must not end
            return False

    def _paused(self) -> bool:
        """Wait before a failed commit is tried again, and fail the queued jobs. Returns False if the journal
        closes."""
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
            self._tell(_finish, answer, None, fault)
        else:
            self._tell(_finish, answer, found)

    def _answer_closed(self, jobs: Iterable[tuple[Any, asyncio.Future[Any]]]) -> None:
        """Fail these jobs: they would read past changes that are not committed."""
        for _, answer in jobs:
            self._tell(_finish, answer, None, self._closed_fault())

    def _closed_fault(self) -> StorageUnavailable:
        """Why nothing is read or written any more: the last commit failed, or the journal is closed."""
        return StorageUnavailable("the journal is closed" if self._fault is None else self._fault.message)

    def _tell(self, heard: Callable[..., None], *words: Any) -> None:
        with suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(heard, *words)

    def _committed(self, upto: int) -> None:
        self._durable = upto
        while self._waiting and self._waiting[0][0] <= upto:
            _finish(self._waiting.popleft()[1])

    def _alarm(self, fault: StorageUnavailable) -> None:
        for watcher in list(self.watchers):
            watcher(fault)


def _opened(
    folder: Path, model: bytes, settings: JournalSettings, lost: Callable[[], str], clock: ServedClock
) -> JournalStore:
    store = open_for(folder, model, settings, lost, clock)
    # No client can resume yet: sessions are not forgotten for their age now.
    with store.closed_on_failure():
        store.end_deletions()
        store.sweep(frozenset(), aged=False)
        store.keep_shares(frozenset())
    return store


def _finish(future: asyncio.Future[Any], found: Any = None, fault: Exception | None = None) -> None:
    if future.done():
        return
    if fault is None:
        future.set_result(found)
    else:
        future.set_exception(fault)


def _fail(ticket: asyncio.Future[None], fault: StorageUnavailable) -> None:
    """Set ``fault`` as the error of the future ``ticket``. If nothing awaits the future, asyncio does not log
    it."""
    _finish(ticket, None, fault)
    if not ticket.cancelled():
        ticket.exception()
