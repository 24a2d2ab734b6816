"""The engine's end of the disk tier: records go between host slots and a disk process that may be slow or dead.

Never waits: requests go into a socket that may be full, and `poll` takes the answers. Past a request's
deadline, or when the socket ends, the disk process counts as lost, and another is asked for. The slots that the
lost one had are taken back when the new one is there, which means that the first is dead. The time is the
caller's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from ..host.tier import HostTier
from ..system_limits import explained
from . import messages
from .direct_read import DirectRead, Parts
from .messages import KEYS_PER_PACKET, Fetch, RecordAt, Store
from .payload_file import stride_of

DEADLINE = 5.0  # seconds a request may take
STORES_IN_FLIGHT = 64  # stores at once: their slots cannot be evicted meanwhile
STORING_SHARE = 8  # and at most one slot in so many
MOST_SUPERSEDED = 1024
MOST_ERASED = 1 << 16  # keys that are remembered as erased, the last ones
PIECES_AT_ONCE = 4  # pieces that one `poll` takes, so that they go on to the device while others come,
PIECES_A_SECOND = 10_000  # and as many more as may have come during a long step
OPENING = 60.0  # seconds between two messages of a new process, until it has sent all its keys
AWAY = 1.0  # after so many seconds without a look, as many are allowed before the next
PIECE_BYTES = 1 << 20  # of records that are asked for at once
MOST_IN_PIECE = 64

log = logging.getLogger(__name__)


class AnswerDeadline:
    """Decides when a disk process that says nothing counts as lost, by the caller's clock.

    An answer has a deadline, and a new process has one for its first word. Both count the time that the
    engine has waited, not the time it has slept: an engine that was stopped, or computed for seconds, finds
    answers that came long ago, or a process that was stopped with it; so it looks once more.
    """

    def __init__(self) -> None:
        self._looked = -math.inf
        self._again: float | None = None  # when to look once more
        self._heard = -math.inf

    def heard(self, now: float) -> None:
        """Note that the disk process was started, or has sent a message: its time begins again."""
        self._heard, self._again = now, None

    def over(self, now: float, deadline: float, *, opening: bool) -> bool:
        """Whether the disk process counts as lost; ask once all that it has sent is read. ``deadline``: the
        first of the requests that it has not answered; infinite if there is none. ``opening``: it is new, and
        has not sent all its keys yet."""
        away, self._looked = now > self._looked + AWAY, now
        late = now > (self._heard + OPENING if opening else deadline)
        if late and away and self._again is None:
            self._again = now + AWAY
        return late and (self._again is None or now > self._again)


class PendingReads:
    """Records on their way up from disk. They are asked for in pieces of about a MiB.

    A record goes into a slot of ``host``, or *directly*: into the page cache alone, where the engine reads
    it.
    """

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._slots: dict[bytes, int] = {}
        self._direct: set[bytes] = set()
        self._unasked: tuple[list[bytes], list[bytes]] = [], []  # into slots, and direct
        self._most = max(1, min(MOST_IN_PIECE, PIECE_BYTES // host.memory.block_bytes))

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots or key in self._direct

    def has(self, key: bytes, *, direct: bool) -> bool:
        """Whether the record is on its way up: with ``direct`` into the page cache, else into a slot."""
        return key in self._direct if direct else key in self._slots

    @property
    def waiting(self) -> bool:
        """Whether some records are not asked for yet."""
        return any(self._unasked)

    def add(self, key: bytes, tenant: int, *, direct: bool) -> bool:
        """Add a record to the next piece. ``direct``: it goes into the page cache; else a slot of the host
        tier is reserved for it. Returns False, and adds nothing, if no slot can be had."""
        if direct:
            self._direct.add(key)
        else:
            slot = self._host.reserve(key, 0, tenant)
            if slot is None:
                return False
            self._slots[key] = slot
        self._unasked[direct].append(key)
        return True

    def pieces(self, *, full: bool) -> Iterator[tuple[list[int], list[bytes]]]:
        """Yield the pieces to ask for now, each as (slots, keys); slots is empty for a piece that goes into
        the page cache. Each piece is yielded once. With ``full``, only full pieces; the others wait for more
        records."""
        for unasked in self._unasked:
            if len(unasked) >= self._most or (unasked and not full):
                keys = list(unasked)
                unasked.clear()
                yield ([] if unasked is self._unasked[True] else [self._slots[key] for key in keys]), keys

    def came(self, key: bytes, slot: int | None) -> None:
        """Note that the disk process has answered for the record, whether it came or not: it is no longer on
        its way. ``slot``: its slot; None if it went into the page cache."""
        if slot is None:
            self._direct.discard(key)
        else:
            del self._slots[key]

    def give_up(self, request: Fetch) -> None:
        """Note that ``request`` will not be answered: its records are no longer on their way, and their slots
        are freed."""
        for key in request.keys if not request.slots else ():
            self._direct.discard(key)
        for key, slot in zip(request.keys, request.slots, strict=False):
            del self._slots[key]
            self._host.abandon(slot)

    def give_up_unasked(self) -> None:
        """Forget the records that were not asked for yet, and free their slots."""
        for slots, keys in self.pieces(full=False):
            self.give_up(Fetch(0, slots, keys))


def ask(control: socket.socket) -> None:
    """Ask the `process.DiskProcess` at the other end of ``control`` for a disk process."""
    with contextlib.suppress(OSError):  # no process starts another: go on without a disk
        control.send(b"?")


class DiskTier:
    """The engine's side of the disk tier below ``host``: sends requests to a disk process and takes its
    answers. ``control``: the engine's end of a `process.DiskProcess`'s socket, over which a disk process is
    asked for. ``begin``: the first message to each disk process. ``asked``: `ask` was called on the socket, so
    that the first process starts meanwhile.

    ``blocks``: gives the bytes of a device block, if this process can write them: records in the page cache
    are then `read` into blocks directly. None: it cannot. ``reading_seconds``: what `read` has taken so far.
    """

    def __init__(
        self,
        host: HostTier,
        control: socket.socket,
        begin: messages.Begin,
        blocks: Callable[[int], Parts] | None = None,
        *,
        asked: bool = False,
    ) -> None:
        self._host = host
        self._control = control
        self._begin = begin
        self._budget = begin.budget
        self._blocks = blocks
        self._reader = DirectRead(Path(begin.folder), begin.block_bytes)
        self._sock: socket.socket | None = None
        self._ready = False
        self._deadline = AnswerDeadline()
        self._records: dict[bytes, RecordAt] = {}
        self._doubted: set[bytes] = set()  # could not be read directly: the disk process finds out why
        self._tickets = itertools.count(1)
        self._requests: dict[int, tuple[Store | Fetch, float]] = {}  # with their deadlines
        self._outbox: deque[bytes] = deque()
        self._looked = 0.0  # time when answers were taken last
        self._storing: set[bytes] = set()
        self._most_storing = max(1, min(STORES_IN_FLIGHT, host.memory.slots // STORING_SHARE))
        self._reads = PendingReads(host)
        self._superseded: dict[bytes, None] = {}  # in order
        self._dropped: list[bytes] = []
        self._erased: dict[bytes, None] = {}  # the oldest first: no answer of a disk process brings them back
        self._touched: dict[bytes, bool] = {}  # key: counts as used now, else is evicted first
        self._told: set[bytes] = set()  # leased keys that the disk process knows of
        self._refused: list[bytes] = []
        self._stored = self._fetched = self._failed = self._lost = self._pieces = self._read = 0
        self.reading_seconds = 0.0  # that `read` took so far
        control.setblocking(False)
        host.follow_leases()
        if not asked:
            ask(control)

    def __len__(self) -> int:
        """How many records are on disk and can be fetched: 0 before the disk process has sent all its keys."""
        return len(self._records) if self._ready else 0

    def __contains__(self, key: bytes) -> bool:
        """Whether the record is on disk, so that a fetch is likely to succeed."""
        return self._ready and key in self._records

    @property
    def ready(self) -> bool:
        """Whether a disk process is there and has sent all its keys."""
        return self._ready

    @property
    def waiting(self) -> bool:
        """Whether the disk process owes an answer, or records that `fetch` collected are not asked for yet."""
        return bool(self._requests) or self._reads.waiting

    @property
    def room(self) -> int:
        """How many more stores the disk process can be asked for now; 0 without a disk process."""
        return self._most_storing - len(self._storing) if self._ready else 0

    def fetching(self, key: bytes) -> bool:
        """Whether the record is on its way up from disk; False while the disk process is lost."""
        return self._ready and key in self._reads

    def stored(self, key: bytes) -> bool:
        """Whether the record is on disk or on its way there, as far as is known."""
        return key in self._records or key in self._storing

    def store(self, key: bytes, now: float) -> bool:
        """Begin to write the host tier's record to disk: ask the disk process to copy it from its slot, which
        is held until the answer. Returns False, and begins nothing, if the record is not in the host tier, is
        on disk or on its way already, or too many are on their way. ``now``: seconds; the answer is due
        `DEADLINE` later."""
        slot = self._host.slot_of(key)
        if slot is None or self.room <= 0 or self.stored(key):
            return False
        self._host.hold(slot, used=False)
        superseded, self._superseded = list(self._superseded), {}
        moved, self._touched = self._touched, {}
        touched = [one for one, used in moved.items() if used]
        yielding = [one for one, used in moved.items() if not used]
        tokens, digest = self._host.tokens_of(slot), self._host.memory.entry(slot).digest
        self._storing.add(key)
        self._erased.pop(key, None)
        ticket = next(self._tickets)
        tenant = self._host.tenant_of(slot)
        leases = self._changed_leases()
        self._send(
            Store(ticket, slot, key, tokens, digest, tenant, superseded, touched, yielding, *leases), now
        )
        self._forget(superseded)
        return True

    def fetch(self, key: bytes, now: float, tenant: int = 0, *, direct: bool = False) -> bool:
        """Begin to bring a record from disk into a host slot, which counts as ``tenant``'s. Returns whether
        it is on its way; False if it is not on disk, or no slot can be had.

        ``direct``: only into the page cache, where `read` finds it. The record is asked for together with
        those that follow it, at the next `poll` at the latest.
        """
        if self._reads.has(key, direct=direct):
            return True
        if key not in self or not self._reads.add(key, tenant, direct=direct):
            return False
        self._ask_for_pieces(now, full=True)
        return True

    @property
    def reads_directly(self) -> bool:
        """Whether this process can write device blocks, so that `read` may be called."""
        return self._blocks is not None

    def readable(self, key: bytes) -> bool:
        """Whether `read` of this record may succeed: it is on disk, and has not failed since it was fetched."""
        return key in self and key not in self._doubted

    def in_page_cache(self, key: bytes) -> bool:
        """Whether `read` of this record is likely to succeed: it is readable, and in the page cache."""
        return self.readable(key) and self._reader.has(self._records[key])

    def read(self, keys: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """Fill device blocks with records of the host tier or the page cache, in order, and check them.
        ``blocks[i]`` gets the record ``keys[i]``.

        Returns the number of tokens of each record that came: the longest beginning that is there and sound.
        The next one is not there, or is damaged; `fetch` finds out. No step may be in flight, and no move
        that waits may read or write ``blocks``.
        """
        reach = self._blocks
        assert reach is not None, "no blocks within reach"
        began = time.perf_counter()
        found: list[int] = []
        here, keys = self._host.here, keys[: len(blocks)]
        while len(found) < len(keys):
            at = len(found)
            above = self._host.find(takewhile(here.__contains__, keys[at:]))
            found += self._copy(above, [reach(blocks[at + each]) for each in range(len(above))])
            at = len(found)
            below = list(takewhile(lambda key: key not in here and self.readable(key), keys[at:]))
            records = [self._records[key] for key in below]
            came = self._reader.read(records, [reach(block) for block in blocks[at : at + len(below)]])
            found += [record.tokens for record in records[:came]]
            self._read += came
            self.evict_first(below[:came])
            if came < len(below):
                self._doubted.add(below[came])
            if came < len(below) or not (above or below):
                break
        self.reading_seconds += time.perf_counter() - began
        return found

    def take_refused(self) -> list[bytes]:
        """The keys of the records that `store` began to write and that were not written, since the last
        call."""
        refused, self._refused = self._refused, []
        return refused

    def supersede(self, key: bytes) -> None:
        """Forget a record that is on disk or on its way there: here now; the disk process is told to remove
        it with the next `store`. Does nothing if too many such messages wait for that."""
        if self.stored(key) and len(self._superseded) < MOST_SUPERSEDED:
            self._superseded[key] = None
            self._forget([key])

    def drop(self, key: bytes) -> None:
        """Forget a record, also on its way to or from the disk, and have the disk process remove it at the next
        `poll`, so that its bytes leave the disk soon. If that process dies before it does, or has not sent its
        keys yet, the record is removed when its key is sent: the last `MOST_ERASED` keys are remembered."""
        self._erased[key] = None
        if len(self._erased) > MOST_ERASED:
            del self._erased[next(iter(self._erased))]
        if self.stored(key) or key in self._superseded:
            self._dropped.append(key)
            self._forget([key])

    def touch(self, key: bytes) -> None:
        """Note that the host tier evicts a record: with the next `store`, the disk process is told to count
        it as used now. Does nothing if the record is neither on disk nor on its way there, or if too many
        such messages wait for that."""
        if self.stored(key) and len(self._touched) < MOST_SUPERSEDED:
            self._touched[key] = True

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """Note that a tier above has these records: with the next `store`, the disk process is told to evict
        those that are on disk before others, in this order. Does nothing for those for which too many such
        messages wait."""
        here, coming, moved = self._records, self._storing, self._touched
        for key in keys:
            if len(moved) >= MOST_SUPERSEDED:
                break
            if key in here or key in coming:
                moved[key] = False

    @property
    def full(self) -> bool:
        """Whether the disk cannot take more records without evicting others; an estimate by the number of
        records."""
        size = stride_of(self._begin.block_bytes)
        return (len(self._records) + STORES_IN_FLIGHT) * size >= self._budget

    def wait_ready(self, seconds: float) -> None:
        """Wait until the disk process has sent all its keys, or for so many seconds."""
        deadline = time.monotonic() + seconds
        while not self._ready and (now := time.monotonic()) < deadline:
            self.poll(now)
            select.select([self._sock or self._control], [], [], 0.01)

    def poll(self, now: float) -> None:
        """Take the answers of the disk process, ask it for the records that `fetch` has collected, and send
        requests that did not fit into the socket before. If it is late, ask for another process. Never waits.
        """
        if self._sock is None:
            self._accept_process(now)
        if self._sock is not None:
            self._ask_for_pieces(now)
            while self._dropped:
                packet, self._dropped = self._dropped[:KEYS_PER_PACKET], self._dropped[KEYS_PER_PACKET:]
                self._post(messages.Drop(b"".join(packet)))
            self._flush()
            if self._receive(now) and self._sock is not None:
                oldest = next(iter(self._requests.values()), (None, math.inf))  # they are due in order
                if self._deadline.over(now, oldest[1], opening=not self._ready):
                    self._lose("does not answer")

    def statistics(self) -> dict[str, int]:
        """``records`` on disk, ``waiting`` requests and ``budget`` now; the others count since the start.

        ``stored``, ``fetched``, ``failed``: requests by outcome. ``lost``: disk processes that were lost.
        ``read``: records read directly from the page cache. ``budget``: bytes that records may take; less
        than was asked for where the disk is short of space.
        """
        return {
            "records": len(self),
            "waiting": len(self._requests),
            "stored": self._stored,
            "fetched": self._fetched,
            "failed": self._failed,
            "lost": self._lost,
            "read": self._read,
            "budget": self._budget,
        }

    def close(self) -> None:
        """Close the sockets. The disk process then writes what it was given, and ends."""
        self._reader.close()
        for sock in (self._sock, self._control):
            if sock is not None:
                sock.close()

    def _changed_leases(self) -> tuple[list[bytes], list[bytes]]:
        """The keys that leases began to cover, and those that they cover no longer, since the disk process
        was told last; at most `MOST_SUPERSEDED`, the others later. They are noted as told. On disk, leased
        records are evicted after all others."""
        changed, leased = self._host.take_lease_news(MOST_SUPERSEDED), self._host.leased
        fresh = [key for key in changed if key in leased and key not in self._told]
        over = [key for key in changed if key not in leased and key in self._told]
        self._told.update(fresh)
        self._told.difference_update(over)
        return fresh, over

    def _ask_for_pieces(self, now: float, *, full: bool = False) -> None:
        if self._ready:
            for slots, keys in self._reads.pieces(full=full):
                self._send(Fetch(next(self._tickets), slots, keys), now)

    def _send(self, message: Store | Fetch, now: float) -> None:
        self._requests[message.ticket] = message, now + DEADLINE
        self._post(message)

    def _post(self, message: messages.Down) -> None:
        self._outbox.append(messages.encode(message))
        self._flush()

    def _flush(self) -> None:
        while self._outbox and self._sock is not None:
            try:
                self._sock.send(self._outbox[0])
            except BlockingIOError:
                return
            except OSError:
                self._lose("is gone")
                return
            self._outbox.popleft()

    def _receive(self, now: float) -> bool:
        """Take answers from the socket, a limited number at a time. Returns whether all that had come is
        read."""
        enough = self._pieces + PIECES_AT_ONCE + int((now - self._looked) * PIECES_A_SECOND)
        self._looked = now
        while self._sock is not None and self._pieces < enough:
            try:
                packet = self._sock.recv(messages.PACKET_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                packet = b""
            if not packet:
                self._lose("is gone")
                return True
            self._answer(messages.up_decoder.decode(packet))
            self._deadline.heard(now)
        return False

    def _answer(self, answer: messages.Up) -> None:
        match answer:
            case messages.Known():
                known = messages.records_in(answer.records)
                erased = known.keys() & self._erased.keys()
                self._dropped += erased
                self._records.update(one for one in known.items() if one[0] not in erased)
                self._ready = self._ready or answer.last
                if answer.ignored:
                    log.warning("%d records on disk are of another model or layout: ignored", answer.ignored)
            case messages.Gone():
                self._forget(messages.keys_in(answer.keys))
            case messages.Room():
                self._budget = answer.bytes
            case messages.Done() | messages.Failed():
                message, _ = self._requests.pop(answer.ticket)
                assert isinstance(message, Store)
                self._end_store(message, answer.at if isinstance(answer, messages.Done) else None)
            case messages.Fetched():
                piece, _ = self._requests.pop(answer.ticket)
                assert isinstance(piece, Fetch)
                self._take_up(piece, answer)

    def _end_store(self, message: Store, at: int | None) -> None:
        self._storing.discard(message.key)
        self._host.release(message.slot)
        if at is not None:
            self._stored += 1
            if message.key not in self._erased:
                self._records[message.key] = RecordAt(at, message.digest, message.tokens)
        else:
            self._failed += 1
            self._refused.append(message.key)

    def _take_up(self, piece: Fetch, answer: messages.Fetched) -> None:
        self._pieces += 1
        failed = set(answer.failed)
        for at, key in enumerate(piece.keys):
            record = None if at in failed else self._records.get(key)  # None also: it was erased meanwhile
            if record is not None:
                self._doubted.discard(key)
            slot = piece.slots[at] if piece.slots else None
            self._reads.came(key, slot)
            if slot is not None:
                self._end_fetch(slot, record)
        self._forget(piece.keys[at] for at in answer.gone)

    def _end_fetch(self, slot: int, record: RecordAt | None) -> None:
        if record is not None:
            self._fetched += 1
            self._host.filled(slot, tokens=record.tokens, digest=record.digest)
        else:
            self._failed += 1
            self._host.abandon(slot)

    def _copy(self, slots: Sequence[int], blocks: Sequence[Parts]) -> list[int]:
        """Copy the records in the host slots ``slots`` to device blocks (``blocks``: their bytes, in the same
        order). Returns the number of tokens of each record."""
        self._host.hold(*slots)
        for slot, parts in zip(slots, blocks, strict=True):
            at, payload = 0, self._host.memory.payload(slot)
            for part in parts:
                part[:] = payload[at : at + len(part)]
                at += len(part)
        self._host.release(*slots, above=True)
        return [self._host.tokens_of(slot) for slot in slots]

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._records.pop(key, None)
            self._doubted.discard(key)

    def _give_up(self, message: Store | Fetch) -> None:
        """Free the slots of a request that will not be answered, as the disk process that had it is dead."""
        if isinstance(message, Store):
            self._storing.discard(message.key)
            self._refused.append(message.key)
            self._host.release(message.slot)
        else:
            self._reads.give_up(message)

    def _lose(self, how: str) -> None:
        """Close the link to this disk process and ask for another. Until that one is there, slots that this
        one may still be writing to are left alone. ``how``: what was wrong with it, for the log."""
        log.warning("the disk process %s: another one is started", how)
        self._lost += 1
        if self._sock is not None:
            self._sock.close()
        self._sock, self._ready = None, False
        self._outbox.clear()
        self._records.clear()  # the next one sends its own
        self._doubted.clear()
        self._reader.leave()
        self._told.clear()
        self._host.follow_leases()
        ask(self._control)

    def _accept_process(self, now: float) -> None:
        try:
            told, fds, _, _ = socket.recv_fds(self._control, 16, 1)
        except OSError:
            return
        if not fds:
            if told:  # the kernel drops a descriptor that this process has no number for
                log.warning("%s", explained(OSError(errno.EMFILE, ""), "the socket to the disk process"))
                ask(self._control)
            return
        for message, _ in self._requests.values():
            self._give_up(message)
        self._requests.clear()
        self._reads.give_up_unasked()
        os.set_inheritable(fds[0], False)
        self._sock = socket.socket(fileno=fds[0])
        self._sock.setblocking(False)
        self._deadline.heard(now)
        self._budget = self._begin.budget
        self._post(self._begin)
