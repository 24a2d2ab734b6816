"""The engine's end of the disk tier: records go between host slots and a disk process that may be slow or dead.

Never waits: requests go into a socket that may be full, and `poll` takes the answers. Past a request's
deadline, or when the socket ends, the disk process counts as lost, and another is asked for. What the lost one
had been asked for ends when the new one is there, which means that the first is dead. The time is the
caller's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from ..system_limits import explained
from ..tier import MoveEnd, Presence, Record, Tier
from . import messages
from .direct_read import DirectRead
from .messages import KEYS_PER_PACKET, Fetch, RecordAt, Store
from .payload_file import stride_of

DEADLINE = 5.0  # seconds a request may take
STORES_IN_FLIGHT = 64
MOST_HINTS = 1024  # keys of one kind that a store carries
MOST_ERASED = 1 << 16  # keys that are remembered as erased, the last ones
PIECES_AT_ONCE = 4  # pieces that one `poll` takes, so that they go on to the device while others come,
PIECES_A_SECOND = 10_000  # and as many more as may have come during a long step
OPENING = 60.0  # seconds between two messages of a new process, until it has sent all its keys
AWAY = 1.0  # after so many seconds without a look, as many are allowed before the next
PIECE_BYTES = 1 << 20  # of records that are asked for at once
MOST_IN_PIECE = 64

_Wish: TypeAlias = tuple[int, bytes, int | None]
"""The ticket of a fetch, its key, and the slot that it goes into; None: into the page cache."""

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


def ask(control: socket.socket) -> None:
    """Ask the `process.DiskProcess` at the other end of ``control`` for a disk process."""
    with contextlib.suppress(OSError):  # no process starts another: go on without a disk
        control.send(b"?")


class DiskTier(Tier):
    """The engine's side of the disk tier: sends requests to a disk process and takes its answers. ``control``:
    the engine's end of a `process.DiskProcess`'s socket, over which a disk process is asked for. ``begin``: the
    first message to each disk process. `ask` was called on the socket before.
    """

    name = "disk"
    checks = True
    reads = True

    def __init__(self, control: socket.socket, begin: messages.Begin) -> None:
        self._control = control
        self._begin = begin
        self._budget = begin.budget
        self._reader = DirectRead(Path(begin.folder), begin.block_bytes)
        self._sock: socket.socket | None = None
        self._ready = False
        self._deadline = AnswerDeadline()
        self._records: dict[bytes, RecordAt] = {}
        self._doubted: set[bytes] = set()  # could not be read directly: the disk process finds out why
        # By ticket, a piece by that of its first record; with their deadlines, and their records' tickets.
        self._requests: dict[int, tuple[Store | Fetch, float, list[int]]] = {}
        self._unasked: tuple[list[_Wish], list[_Wish]] = [], []  # to fetch: into slots, and direct
        self._most_in_piece = max(1, min(MOST_IN_PIECE, PIECE_BYTES // begin.block_bytes))
        self._outbox: deque[bytes] = deque()
        self._looked = 0.0  # time when answers were taken last
        self._storing: set[bytes] = set()
        self._ended: list[MoveEnd] = []
        self._dropped: list[bytes] = []
        self._erased: dict[bytes, None] = {}  # the oldest first: no answer of a disk process brings them back
        # Since the disk process was told. By key: it counts as used now, else is evicted first; it is leased.
        self._touched: OrderedDict[bytes, bool] = OrderedDict()
        self._lease_news: OrderedDict[bytes, bool] = OrderedDict()
        self._leased: set[bytes] = set()
        self._pieces = 0  # that have come
        self._counts = dict.fromkeys(("stored", "fetched", "failed", "lost", "read"), 0)
        control.setblocking(False)

    def __len__(self) -> int:
        return len(self._records) if self._ready else 0

    def lookup(self, keys: Collection[bytes]) -> list[Presence]:
        """Whether each record is on disk; PENDING while it is written. All are absent before the disk process
        has sent all its keys."""
        if not self._ready:
            return [Presence.ABSENT] * len(keys)
        records, storing = self._records, self._storing
        return [
            Presence.FOUND if key in records else Presence.PENDING if key in storing else Presence.ABSENT
            for key in keys
        ]

    @property
    def ready(self) -> bool:
        """Whether a disk process is there and has sent all its keys."""
        return self._ready

    @property
    def waiting(self) -> bool:
        """Whether the disk process owes an answer, or records that `fetch` collected are not asked for yet."""
        return bool(self._requests) or any(self._unasked)

    @property
    def room(self) -> int:
        return STORES_IN_FLIGHT - len(self._storing) if self._ready else 0

    def store(self, record: Record, slot: int, ticket: int, now: float) -> bool:
        """Ask the disk process to write the record from its slot. The answer is due `DEADLINE` later."""
        key = record.key
        if self.room <= 0 or key in self._records or key in self._storing:
            return False
        self._storing.add(key)
        self._erased.pop(key, None)
        self._post_drops()  # the record may be one of them
        hints = *_hints(self._touched), *_hints(self._lease_news)
        self._send(Store(ticket, slot, record, *hints), [ticket], now)
        return True

    def fetch(self, key: bytes, slot: int | None, ticket: int, now: float) -> bool:
        """Have a record brought into ``slot``, or into the page cache. It is asked for together with those that
        follow it, at the next `poll` at the latest."""
        if not self._ready or key not in self._records:
            return False
        self._unasked[slot is None].append((ticket, key, slot))
        self._ask_for_pieces(now, full=True)
        return True

    def readable(self, key: bytes) -> bool:
        """Whether `read` of this record may succeed: it is on disk, and has not failed since it was fetched."""
        return self._ready and key in self._records and key not in self._doubted

    def near(self, key: bytes) -> bool:
        """Whether `read` of this record is likely to succeed: it is readable, and in the page cache."""
        return self.readable(key) and self._reader.has(self._records[key])

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[int]:
        """Copy records from the page cache. The first that does not come is not there, or is damaged; `fetch`
        finds out."""
        records = [self._records[key] for key in keys]
        came = self._reader.read(records, blocks[: len(keys)])
        self._counts["read"] += came
        self.evict_first(keys[:came])
        if came < len(keys):
            self._doubted.add(keys[came])
        return [record.tokens for record in records[:came]]

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        """Forget a record, also on its way to or from the disk. The disk process is told at the next `poll`.

        With ``erase`` its bytes leave the disk soon even if that process dies before it removes it, or has not
        sent its keys yet: then the record is removed when its key is sent. The last `MOST_ERASED` keys are
        remembered."""
        stored = key in self._records or key in self._storing
        if erase or key in self._storing:
            self._erased[key] = None
            if len(self._erased) > MOST_ERASED:
                del self._erased[next(iter(self._erased))]
        if stored:
            self._dropped.append(key)
            self._forget([key])

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count these records as used now, those that are on disk or on their way there: the disk process is
        told with the next `store`. Not those for which too many such messages wait."""
        self._move(keys, used=True)

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """Have these records evicted first, as `touch` has them counted as used."""
        self._move(reversed(list(keys)), used=False)

    def lease(self, keys: Iterable[bytes], *, on: bool) -> None:
        """The disk process is told with the next `store`."""
        changed = list(keys)
        (self._leased.update if on else self._leased.difference_update)(changed)
        self._lease_news.update(dict.fromkeys(changed, on))

    @property
    def full(self) -> bool:
        """Whether the disk cannot take more records without evicting others; an estimate by the number of
        records."""
        size = stride_of(self._begin.block_bytes)
        return (len(self._records) + STORES_IN_FLIGHT) * size >= self._budget

    def poll(self, now: float) -> list[MoveEnd]:
        """Take the answers of the disk process, ask it for the records that `fetch` has collected, and send
        requests that did not fit into the socket before. If it is late, ask for another process."""
        if self._sock is None:
            self._accept_process(now)
        if self._sock is not None:
            self._ask_for_pieces(now)
            self._post_drops()
            self._flush()
            if self._receive(now) and self._sock is not None:
                due = next((due for _, due, _ in self._requests.values()), math.inf)  # they are due in order
                if self._deadline.over(now, due, opening=not self._ready):
                    self._lose("does not answer")
        ended, self._ended = self._ended, []
        return ended

    def statistics(self) -> dict[str, int]:
        """``records`` on disk, ``waiting`` requests and ``budget`` now; the others count since the start.

        ``stored``, ``fetched``, ``failed``: requests by outcome. ``lost``: disk processes that were lost.
        ``read``: records read directly from the page cache. ``budget``: bytes that records may take; less
        than was asked for where the disk is short of space.
        """
        now = {"records": len(self), "waiting": len(self._requests), "budget": self._budget}
        return {**now, **self._counts}

    def close(self) -> None:
        """Close the sockets. The disk process then writes what it was given, and ends."""
        self._reader.close()
        for sock in (self._sock, self._control):
            if sock is not None:
                sock.close()

    def _post_drops(self) -> None:
        while self._dropped:
            packet, self._dropped = self._dropped[:KEYS_PER_PACKET], self._dropped[KEYS_PER_PACKET:]
            self._post(messages.Drop(packet))

    def _move(self, keys: Iterable[bytes], *, used: bool) -> None:
        for key in keys:
            if len(self._touched) >= MOST_HINTS:
                return
            if key in self._records or key in self._storing:
                self._touched[key] = used

    def _ask_for_pieces(self, now: float, *, full: bool = False) -> None:
        """Ask for the records that `fetch` has collected, in pieces of about a MiB. With ``full`` for a full
        piece alone."""
        for unasked in self._unasked if self._ready else ():
            if len(unasked) >= self._most_in_piece or (unasked and not full):
                tickets = [ticket for ticket, _, _ in unasked]
                slots = [slot for _, _, slot in unasked if slot is not None]
                self._send(Fetch(tickets[0], slots, [key for _, key, _ in unasked]), tickets, now)
                unasked.clear()

    def _send(self, message: Store | Fetch, tickets: list[int], now: float) -> None:
        self._requests[message.ticket] = message, now + DEADLINE, tickets
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
                erased = answer.records.keys() & self._erased.keys()
                self._dropped += erased
                self._records.update(one for one in answer.records.items() if one[0] not in erased)
                self._ready = self._ready or answer.last
            case messages.Gone():
                self._forget(answer.keys)
            case messages.Room():
                self._budget = answer.bytes
            case messages.Done(ticket, at):
                message, _, _ = self._requests.pop(ticket)
                assert isinstance(message, Store)
                record = message.record
                self._storing.discard(record.key)
                self._counts["failed" if at is None else "stored"] += 1
                if at is not None and record.key not in self._erased:
                    self._records[record.key] = RecordAt(at, record.digest, record.tokens)
                self._ended.append(MoveEnd(ticket, at is not None))
            case messages.Fetched():
                piece, _, tickets = self._requests.pop(answer.ticket)
                assert isinstance(piece, Fetch)
                self._take_up(piece, tickets, answer)

    def _take_up(self, piece: Fetch, tickets: list[int], answer: messages.Fetched) -> None:
        self._pieces += 1
        failed = set(answer.failed)
        for at, (key, ticket) in enumerate(zip(piece.keys, tickets, strict=True)):
            found = None if at in failed else self._records.get(key)  # None also: it was erased meanwhile
            if found is not None:
                self._doubted.discard(key)
            if piece.slots:
                self._counts["failed" if found is None else "fetched"] += 1
            record = None if found is None else Record(key, found.tokens, found.digest)
            self._ended.append(MoveEnd(ticket, found is not None, record))
        self._forget(piece.keys[at] for at in answer.gone)

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._records.pop(key, None)
            self._doubted.discard(key)

    def _lose(self, how: str) -> None:
        """Close the link to this disk process and ask for another. Until that one is there, slots that this
        one may still be writing to are left alone. ``how``: what was wrong with it, for the log."""
        log.warning("the disk process %s: another one is started", how)
        self._counts["lost"] += 1
        if self._sock is not None:
            self._sock.close()
        self._sock, self._ready = None, False
        self._outbox.clear()
        self._records.clear()  # the next one sends its own
        self._doubted.clear()
        self._reader.leave()
        self._lease_news = OrderedDict.fromkeys(self._leased, True)
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
        unasked = [ticket for wishes in self._unasked for ticket, _, _ in wishes]
        given_up = chain(unasked, *(tickets for _, _, tickets in self._requests.values()))
        self._ended += (MoveEnd(ticket, done=False) for ticket in given_up)
        for waiting in (self._requests, self._storing, *self._unasked):
            waiting.clear()
        os.set_inheritable(fds[0], False)
        self._sock = socket.socket(fileno=fds[0])
        self._sock.setblocking(False)
        self._deadline.heard(now)
        self._budget = self._begin.budget
        self._post(self._begin)


def _hints(news: OrderedDict[bytes, bool]) -> tuple[list[bytes], list[bytes]]:
    """Take the first of ``news``, `MOST_HINTS` at most: the keys with true, and those with false."""
    some = [news.popitem(last=False) for _ in range(min(MOST_HINTS, len(news)))]
    return [key for key, on in some if on], [key for key, on in some if not on]
