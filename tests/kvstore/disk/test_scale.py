"""Neither end of the disk tier does more for a record beside many others, on disk, in host slots or leased."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk import messages
from holdfast.kvstore.disk.client import DiskTier, ask
from holdfast.kvstore.disk.messages import PACKET_BYTES, Begin, Done, Known, RecordAt, encode
from holdfast.kvstore.disk.payload_file import stride_of
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.tier import Record
from holdfast.kvstore.tiers import Tiers
from holdfast.tests.operations import operations_of

SIZE = 64
SPACE = bytes(16)
TIMES = 12


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class EngineEnd:
    """A `DiskTier` that holds ``160 * size`` records on disk, as many leases, and a full host tier; its disk
    process is this test: it has all and takes all."""

    def __init__(self, folder: Path, size: int) -> None:
        fd = make_memory(2 * 4096 + 64 * size * (SIZE + 64))
        self.host = HostTier(SlotMemory(fd, SPACE, SIZE))
        os.close(fd)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ask(theirs)
        self.disk = DiskTier(theirs, Begin(str(folder), SPACE, SIZE, 1 << 30))
        self.tiers = Tiers(self.host, (self.disk,))
        mine, self.process = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, mine:
            ours.recv(16)
            socket.send_fds(ours, [b"disk"], [mine.fileno()])
        self.tiers.poll(0.0)
        self.process.recv(PACKET_BYTES)
        there = {key(number): RecordAt(number, 1, 4) for number in range(160 * size)}
        self.process.send(encode(Known(there, last=True)))
        self.tiers.poll(0.0)
        self.numbers = count(1 << 20)
        for number in range(160 * size):
            self.tiers.lease(number, [key(number)], 1e6 + number)
        for _ in range(80 * size):
            self.one()

    def one(self) -> None:
        """A record comes to the host tier and goes to disk; a lease ends and another begins; some are used."""
        number = next(self.numbers)
        slot = self.host.reserve(key(number), 4)
        assert slot is not None
        self.host.filled(slot)
        self.tiers.lease(number % 100, [key(number)], 1e6)
        self.tiers.note_evicted()
        self.disk.evict_first([key(number % 90)])
        self.tiers.send([key(number)])
        self.tiers.send_down({}, lambda key: False, 0.0)
        request = messages.down_decoder.decode(self.process.recv(PACKET_BYTES))
        assert isinstance(request, messages.Store)
        self.process.send(encode(Done(request.ticket, number)))
        self.tiers.poll(0.0)
        assert not self.disk.waiting

    def close(self) -> None:
        self.disk.close()
        self.process.close()


def test_the_engines_end_does_the_same_beside_many(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ends:

        def made(size: int) -> EngineEnd:
            end = EngineEnd(tmp_path, size)
            ends.callback(end.close)
            return end

        few, many = (operations_of(made(size).one) for size in (1, TIMES))
        assert many.within(few), f"{few} became {many}"


def records() -> Iterator[tuple[Record, memoryview]]:
    for number in count(1 << 20):
        data = number.to_bytes(8, "little") * (SIZE // 8)
        yield Record(key(number), 4, xxh3_64_intdigest(data), number % 3), memoryview(data)


def test_the_store_of_records_does_the_same_beside_many(tmp_path: Path) -> None:
    """It is full, and leases cover what was used longest ago."""
    found = []
    for size in (1, TIMES):
        store = RecordStore(Begin(str(tmp_path / str(size)), SPACE, SIZE, 100 * size * stride_of(SIZE)))
        fresh, numbers = records(), count(1 << 20)
        store.put([next(fresh) for _ in range(100 * size)])
        store.order.lease((key(next(numbers)) for _ in range(60 * size)), on=True)

        def one(store: RecordStore = store, fresh: Iterator[tuple[Record, memoryview]] = fresh) -> None:
            assert len(store.put([next(fresh)], touched=[key((1 << 20) + 1)])) == 1
            store.order.lease([key(1 << 20)], on=False)
            store.order.lease([key(1 << 20)], on=True)
            store.evict_first([key((1 << 20) + 2)])
            store.get(key(1 << 20), memoryview(bytearray(SIZE)))

        for _ in range(50):
            one()
        found.append(operations_of(one))
        store.close()
    few, many = found
    assert many.within(few), f"{few} became {many}"
