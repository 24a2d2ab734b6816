"""What each tier below the host's memory does, as its interface (`kvstore.tier`) says: the tier tests.

To test another tier, add to `MAKERS` what makes it, and to `KEEPS` its name if its records outlive it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.benchmarks.harness.replay import InlineDisk
from holdfast.kvstore.disk.client import DiskTier, ask
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.process import DiskProcess
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.tier import MoveEnd, Presence, Record, Tier
from holdfast.kvstore.tiers import Tiers

from .folder_tier import FolderTier

SIZE, SLOTS = 4096, 24
SPACE = bytes(range(16))


@dataclass
class Stand:
    """A tier, and the slots that it copies from and to. ``memory``: of the slots; ``end``: ends what the tier
    needs besides."""

    tier: Tier
    memory: SlotMemory
    end: Callable[[], None] = lambda: None
    tickets: int = 0
    ends: dict[int, MoveEnd] = field(default_factory=dict)

    def put(self, number: int, slot: int) -> Record:
        """Fill a slot with the record of this number."""
        payload = Random(number).randbytes(SIZE)
        self.memory.payload(slot)[:] = payload
        return Record(key(number), number % 16 + 1, xxh3_64_intdigest(payload), number % 3)

    def store(self, number: int, slot: int = 0) -> int | None:
        """Begin to store the record of this number; the ticket, or None if it is refused."""
        self.tickets += 1
        begun = self.tier.store(self.put(number, slot), slot, self.tickets, time.monotonic())
        return self.tickets if begun else None

    def fetch(self, number: int, slot: int | None = 1) -> int | None:
        """Begin to fetch it; the ticket, or None if it is refused."""
        self.tickets += 1
        begun = self.tier.fetch(key(number), slot, self.tickets, time.monotonic())
        return self.tickets if begun else None

    def look(self) -> None:
        for ended in self.tier.poll(time.monotonic()):
            assert ended.ticket not in self.ends, "told twice"
            self.ends[ended.ticket] = ended

    def ended(self, ticket: int | None) -> MoveEnd:
        """Wait for an end."""
        assert ticket is not None, "it was refused"
        until = time.monotonic() + 120
        while ticket not in self.ends:
            assert time.monotonic() < until, "it never ends"
            self.look()
            time.sleep(0.0005)
        return self.ends[ticket]

    def keep(self, *numbers: int) -> None:
        for number in numbers:
            assert self.ended(self.store(number)).done

    def check(self, ended: MoveEnd, number: int, slot: int = 1) -> None:
        """The record of this number has come into the slot as it was."""
        payload = Random(number).randbytes(SIZE)
        assert ended.done and bytes(self.memory.payload(slot)) == payload
        assert ended.record is not None
        assert ended.record[:3] == (key(number), number % 16 + 1, xxh3_64_intdigest(payload))

    def presence(self, *numbers: int) -> list[Presence]:
        return self.tier.lookup([key(number) for number in numbers])


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _memory() -> tuple[int, SlotMemory]:
    fd = make_memory(2 * 4096 + SLOTS * (SIZE + 64) + 4096)
    return fd, SlotMemory(fd, SPACE, SIZE)


def disk(folder: Path) -> Stand:
    fd, memory = _memory()
    process = DiskProcess(fd)
    control = process.theirs.dup()
    process.start()
    ask(control)
    tier = DiskTier(control, Begin(str(folder / SPACE.hex()), SPACE, SIZE, 1 << 22))
    Tiers(HostTier(memory), (tier,)).wait_ready(120)

    def end() -> None:
        process.stop()
        os.close(fd)

    return Stand(tier, memory, end)


def inline(folder: Path) -> Stand:
    fd, memory = _memory()
    os.close(fd)
    store = RecordStore(Begin(str(folder / SPACE.hex()), SPACE, SIZE, 1 << 22))
    return Stand(InlineDisk(memory, store), memory, store.close)


def folder(folder: Path) -> Stand:
    fd, memory = _memory()
    os.close(fd)
    return Stand(FolderTier(folder / "records", memory), memory)


MAKERS: dict[str, Callable[[Path], Stand]] = {"disk": disk, "inline": inline, "folder": folder}
KEEPS = {"disk", "inline", "folder"}


@pytest.fixture(params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def here(name: str, tmp_path: Path) -> Iterator[Stand]:
    stand = MAKERS[name](tmp_path)
    yield stand
    stand.tier.close()
    stand.end()


def test_a_record_comes_up_as_it_went_down(here: Stand) -> None:
    assert here.presence(1) == [Presence.ABSENT] and len(here.tier) == 0
    here.keep(1, 2, 3)
    assert here.presence(1, 4, 3) == [Presence.FOUND, Presence.ABSENT, Presence.FOUND]
    assert len(here.tier) == 3 and here.tier.statistics()["records"] == 3
    for number in (3, 1, 2):
        here.check(here.ended(here.fetch(number)), number)
    assert here.presence(1, 2, 3) == [Presence.FOUND] * 3, "it stays"


def test_many_are_on_their_way_at_once_and_each_ends_once(here: Stand) -> None:
    slots = range(min(SLOTS, here.tier.room))
    stored = [here.store(number, number) for number in slots]
    assert all(here.ended(ticket).done for ticket in stored)
    coming = [here.fetch(number, SLOTS - 1 - number) for number in slots]
    for number, ticket in enumerate(coming):
        here.check(here.ended(ticket), number, SLOTS - 1 - number)
    for _ in range(20):
        here.look()
    assert not here.tier.waiting and len(here.ends) == 2 * len(slots)


def test_what_is_there_is_not_stored_again_and_what_is_not_is_not_fetched(here: Stand) -> None:
    assert here.fetch(1) is None and here.fetch(1, None) is None
    here.keep(1)
    again = here.store(1)
    assert again is None or here.ended(again).done
    assert len(here.tier) == 1
    for _ in range(20):
        here.look()
    assert not here.tier.waiting


def test_what_is_dropped_is_gone_also_on_its_way(here: Stand) -> None:
    here.keep(1, 2)
    here.tier.drop(key(1))
    here.tier.drop(key(2), erase=True)
    assert here.presence(1, 2) == [Presence.ABSENT] * 2 and here.fetch(1) is None
    here.keep(3)
    ticket = here.fetch(3)
    here.tier.drop(key(3), erase=True)
    ended = here.ended(ticket)
    if ended.done:
        here.check(ended, 3)
    assert here.presence(3) == [Presence.ABSENT]
    here.tier.drop(key(99))
    here.keep(1, 3)
    here.check(here.ended(here.fetch(3)), 3)


def test_a_dropped_record_does_not_come_back_with_other_bytes(here: Stand) -> None:
    """Its key may be stored again with what it is now."""
    here.keep(1)
    here.tier.drop(key(1))
    here.memory.payload(0)[:] = bytes(SIZE)
    here.tickets += 1
    record = Record(key(1), 16, xxh3_64_intdigest(bytes(SIZE)))
    assert here.tier.store(record, 0, here.tickets, time.monotonic())
    assert here.ended(here.tickets).done
    ended = here.ended(here.fetch(1))
    assert ended.record is not None and ended.record[:3] == record[:3]
    assert bytes(here.memory.payload(1)) == bytes(SIZE)


def test_a_record_that_is_erased_and_stored_again_at_once_stays(here: Stand) -> None:
    for number in range(40):
        slot = number % SLOTS
        here.keep(number)
        here.tier.drop(key(number), erase=number % 2 == 0)
        here.ended(here.store(number, slot))
    for number in range(40):
        here.check(here.ended(here.fetch(number)), number)


def test_what_is_owed_is_said(here: Stand) -> None:
    assert not here.tier.waiting
    ticket = here.store(1)
    assert here.tier.waiting
    here.ended(ticket)
    ticket = here.fetch(1)
    assert here.tier.waiting
    here.ended(ticket)
    assert not here.tier.waiting


def test_hints_cost_no_record(here: Stand) -> None:
    """They tell what goes first where there is no room."""
    here.keep(*range(6))
    keys = [key(number) for number in (*range(4), 99)]
    here.tier.touch(keys)
    here.tier.evict_first(keys)
    here.tier.lease(keys, on=True)
    here.tier.lease(keys, on=False)
    here.keep(6)
    assert here.presence(*range(7)) == [Presence.FOUND] * 7


def test_records_are_read_where_they_are_to_go(here: Stand) -> None:
    """If the tier can do that: those that are near, up to the first that is not there."""
    here.keep(*range(5))
    blocks = [memoryview(bytearray(SIZE)) for _ in range(4)]
    keys = [key(number) for number in range(4)]
    assert not here.tier.readable(key(9)) and not here.tier.near(key(9))
    if not here.tier.reads:
        assert not any(map(here.tier.near, keys))
        return
    for number in range(4):
        here.ended(here.fetch(number, None))
    assert all(map(here.tier.near, keys))
    assert here.tier.read(keys, blocks) == [1, 2, 3, 4]
    assert [bytes(block) for block in blocks] == [Random(number).randbytes(SIZE) for number in range(4)]
    here.tier.drop(key(2), erase=True)
    assert not here.tier.readable(key(2)) and here.tier.read(keys[:2], blocks) == [1, 2]


def test_what_was_kept_is_there_after_a_close(name: str, tmp_path: Path) -> None:
    """As it was, or not at all if the tier ends with its process."""
    first = MAKERS[name](tmp_path)
    first.keep(*range(8))
    first.tier.drop(key(5), erase=True)
    first.keep(8)
    first.tier.close()
    first.end()
    then = MAKERS[name](tmp_path)
    there = [presence is Presence.FOUND for presence in then.presence(*range(9))]
    assert there == [name in KEEPS and number != 5 for number in range(9)]
    for number in range(9):
        if there[number]:
            then.check(then.ended(then.fetch(number)), number)
    then.tier.close()
    then.end()


def test_damage_costs_the_record_that_has_it(here: Stand, tmp_path: Path) -> None:
    """On a medium that the tier keeps its records on. Other bytes are told from those that were stored."""
    here.keep(1, 2)
    payload = Random(1).randbytes(SIZE)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        if (at := path.read_bytes().find(payload)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 99)
                file.write(bytes([payload[99] ^ 1]))
    ended = here.ended(here.fetch(1))
    if here.tier.checks:
        assert not ended.done
        assert here.presence(1) == [Presence.ABSENT], "it may be stored again"
    elif ended.record is not None:
        assert xxh3_64_intdigest(here.memory.payload(1)) != ended.record.digest
    here.check(here.ended(here.fetch(2, 3)), 2, 3)
    here.tier.drop(key(1))
    here.keep(1)
    here.check(here.ended(here.fetch(1)), 1)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_asked_in_any_order(here: Stand, seed: int) -> None:
    """What comes is what was stored last under its key; each request ends once; what is dropped is gone."""
    random, there = Random(seed), set[int]()
    going: dict[int, tuple[int, int, bool]] = {}  # by ticket: number, slot, whether it goes down
    free = list(range(SLOTS))
    for _ in range(400):
        number, act = random.randrange(12), random.random()
        busy = {one for one, _, _ in going.values()}
        if act < 0.4 and free and number not in there | busy and here.tier.room > 0:
            slot = free.pop()
            ticket = here.store(number, slot)
            assert ticket is not None
            going[ticket] = number, slot, True
        elif act < 0.8 and free and number not in busy:
            slot = free.pop()
            ticket = here.fetch(number, slot)
            assert (ticket is not None) is (number in there)
            if ticket is None:
                free.append(slot)
            else:
                going[ticket] = number, slot, False
        elif act < 0.9 and number not in busy:
            here.tier.drop(key(number), erase=random.random() < 0.5)
            there.discard(number)
            assert here.presence(number) == [Presence.ABSENT]
        here.look()
        for ticket in [one for one in going if one in here.ends]:
            number, slot, down = going.pop(ticket)
            free.append(slot)
            assert here.ends[ticket].done
            if down:
                there.add(number)
            else:
                here.check(here.ends[ticket], number, slot)
    for ticket in list(going):
        assert here.ended(ticket).done
    assert len(here.tier) == len(there | {number for number, _, down in going.values() if down})
