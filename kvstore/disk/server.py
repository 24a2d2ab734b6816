"""The disk process's loop: takes requests of the engine, moves records between slots and disk, and answers.

Waiting requests are taken together: stores of up to ``BATCH_BYTES`` share a transaction, and a fetch waits
behind one such transaction at most. If the medium refuses, that request fails and no other. Between requests
it looks at the free space of its disk, and gives space back before others are short of it.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from pathlib import Path

import msgspec

from ..errors import RecordCorrupt, RecordUnavailable
from ..host.slots import SlotMemory
from ..slices import sliced
from . import messages
from .admin import clear_others, spaces, write_about
from .index import StoreFailed
from .messages import KEYS_PER_PACKET, RECORDS_PER_PACKET, RecordAt
from .store import RecordStore

BATCH_BYTES = 8 << 20
SYNC_SECONDS = 1.0
SCRUB_SECONDS = 300.0  # after which the bytes of removed records leave the file
FILL_RATE = 1 << 30  # bytes a second at which others may fill the disk
LOOK_SECONDS = 0.05, 1.0  # between two looks at the disk, at least and at most
ROOM_SHARE = 32  # a change of room by one part in so many is reported

log = logging.getLogger(__name__)


class DiskServer:
    """Serves the engine at the other end of ``sock``: moves records between the slots of ``memory`` and
    ``store``."""

    def __init__(self, sock: socket.socket, memory: SlotMemory, store: RecordStore) -> None:
        self._sock = sock
        self._memory = memory
        self._store = store
        self._dirty = False
        self._refusing = False
        self._giving = False
        self._told = store.budget  # the room that the engine knows of
        self._look_at = self._sync_at = 0.0
        self._stained_at: float | None = None  # since when the file has bytes of removed records
        self._hindered = False  # the last scrub could not be done

    def run(self) -> None:
        """Send all keys to the engine, then serve its requests until it closes its end."""
        self._look()
        self._introduce()
        while True:
            now = time.monotonic()
            if now >= self._look_at:
                self._look()
            until = min(self._look_at, self._sync_at) if self._dirty else self._look_at
            if not select.select([self._sock], [], [], max(0.0, until - time.monotonic()))[0]:
                if time.monotonic() >= self._sync_at:
                    self._sync()
                continue
            self._sync_at = now + SYNC_SECONDS
            requests = self._waiting()
            if not requests:
                self._sync()
                return
            self._serve(requests)

    def _introduce(self) -> None:
        for part in sliced(self._store.entries.items(), RECORDS_PER_PACKET):
            told = {key: RecordAt(one.slot, one.digest, one.tokens) for key, one in part}
            self._send(messages.Known(told, last=False))
        self._send(messages.Known({}, last=True))

    def _look(self) -> None:
        """Look at the disk's free space: if it is short, give some back, first of other models' records. Tell
        the engine if the room for records has changed much. Set the time of the next look."""
        least, most = LOOK_SECONDS
        delay = most
        try:
            headroom = self._store.headroom
            if headroom < 0:
                clear_others(self._store.folder, -headroom)  # first what the engine does not ask for
                self._store.relieve()
                self._tell_given_up()
                headroom = self._store.headroom
            elif self._giving and headroom > (self._store.floor or 0) // ROOM_SHARE:
                self._giving = False
                log.warning("KV on disk may grow again: %s has room", self._store.folder)
            if len(self._store):
                delay = min(most, max(least, headroom / FILL_RATE))
            room = self._store.room
            if abs(room - self._told) * ROOM_SHARE > max(room, self._told):
                self._told = room
                self._send(messages.Room(room))
        except StoreFailed as error:
            self._refused(error)
        self._look_at = time.monotonic() + delay
        self._scrub()

    def _scrub(self) -> None:
        """`SCRUB_SECONDS` after a record was removed, remove its bytes from the file, too."""
        now = time.monotonic()
        if not self._store.stained:
            self._stained_at = None
        elif self._stained_at is None:
            self._stained_at = now
        elif now - self._stained_at >= SCRUB_SECONDS:
            self._stained_at = now  # if it cannot be done now, it is tried again as much later
            try:
                self._store.scrub()
                self._hindered = False
            except StoreFailed as error:
                if not self._hindered:
                    log.warning("deleted KV stays in %s for now: %s", self._store.folder, error)
                self._hindered = True

    def _tell_given_up(self) -> None:
        keys, self._store.given_up = self._store.given_up, []
        if keys and not self._giving:
            self._giving = True
            log.warning("the disk of %s is nearly full: KV gives way", self._store.folder)
        for part in sliced(keys, KEYS_PER_PACKET):
            self._send(messages.Gone(part))

    def _waiting(self) -> list[messages.Down]:
        """Read the requests that wait in the socket, as many as fit a batch; does not wait for any. There are
        none at the socket's end."""
        most = max(1, BATCH_BYTES // self._memory.block_bytes)
        found: list[messages.Down] = []
        with contextlib.suppress(BlockingIOError):
            while len(found) < most and (
                packet := self._sock.recv(messages.PACKET_BYTES, socket.MSG_DONTWAIT)
            ):
                found.append(messages.down_decoder.decode(packet))
        return found

    def _serve(self, requests: list[messages.Down]) -> None:
        """Do the requests: first the fetches, because turns wait for them, then all stores in one transaction,
        and what is dropped. A record that is dropped and stored again stays."""
        dropped, stores = dict[bytes, None](), list[messages.Store]()
        for request in requests:
            match request:
                case messages.Fetch():
                    self._fetch(request)
                case messages.Drop():
                    dropped.update(dict.fromkeys(request.keys))
                case messages.Store():
                    if request.record.key in dropped:
                        del dropped[request.record.key]
                        self._store.drop((request.record.key,))
                    stores.append(request)
        if stores:
            self._keep(stores)
        if dropped:
            self._store.drop(dropped)
            self._dirty = True

    def _fetch(self, request: messages.Fetch) -> None:
        """Bring the records of one request into their slots, or into the page cache, and send one answer for
        all."""
        failed: list[int] = []
        gone: list[int] = []
        for at, key in enumerate(request.keys):
            try:
                self._store.get(key, self._memory.payload(request.slots[at]) if request.slots else None)
                continue
            except RecordUnavailable as error:
                if isinstance(error, RecordCorrupt):
                    log.warning("%s", error)
                gone.append(at)
            except StoreFailed as error:
                self._refused(error)
            failed.append(at)
        self._send(messages.Fetched(request.ticket, failed, gone))

    def _keep(self, stores: list[messages.Store]) -> None:
        records = [(store.record, self._memory.payload(store.slot)) for store in stores]
        gone = list[bytes]()
        for store in stores:
            self._store.order.lease(store.released, on=False)
            self._store.order.lease(store.leased, on=True)
        try:
            touched = [key for store in stores for key in store.touched]
            self._store.evict_first(key for store in stores for key in store.yielding)
            gone = self._store.put(records, touched)
            if any(store.record.key in self._store.entries for store in stores):
                self._dirty = True
                if self._refusing:
                    log.warning("the disk takes records again")
                self._refusing = False
        except StoreFailed as error:
            self._refused(error)
        for store in stores:
            entry = self._store.entries.get(store.record.key)
            self._send(messages.Done(store.ticket, None if entry is None else entry.slot))
        if gone:  # perhaps some of ``stores``, where there is no room or a tenant's cap is smaller
            self._send(messages.Gone(gone))
        self._tell_given_up()

    def _sync(self) -> None:
        if self._dirty:
            self._dirty = False
            try:
                self._store.sync()
            except StoreFailed as error:
                self._refused(error)

    def _refused(self, error: StoreFailed) -> None:
        """Log that the medium refused, unless that is logged already since the last success."""
        if not self._refusing:
            self._refusing = True
            log.error("the disk refuses: %s", error)

    def _send(self, message: messages.Up) -> None:
        self._sock.send(messages.encode(message))


def serve(sock: socket.socket, memory_fd: int, *, anew: bool = False) -> None:
    """Read the ``Begin`` packet from ``sock``, open the store that it names, and serve until the engine
    closes the socket. ``memory_fd``: the host tier's memory. ``anew``: throw away the records that are there.

    Raises `FolderHeld`: another process holds the store; `StoreFailed`: it cannot be opened; `StoreTorn`:
    its file was damaged and is removed.
    """
    packet = sock.recv(messages.PACKET_BYTES)
    if not packet:
        return
    begin = msgspec.msgpack.decode(packet, type=messages.Begin)
    memory = SlotMemory(memory_fd, begin.space, begin.block_bytes, made=True)
    store, folder = RecordStore(begin, anew=anew), Path(begin.folder)
    clear_others(folder)
    if beside := len({*spaces(folder.parent)} - {folder}):
        log.warning("%s holds KV of %d other models or settings: ignored", folder.parent, beside)
    with contextlib.suppress(OSError):  # a full disk: only the operator's commands miss it
        write_about(folder, begin.block_bytes)
    with contextlib.closing(store), contextlib.suppress(BrokenPipeError, ConnectionResetError):
        DiskServer(sock, memory, store).run()
