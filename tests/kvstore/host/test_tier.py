"""The host tier against a dict: any verbs in any order, deaths among them, and bytes that change underneath."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.errors import LeakFound, RecordCorrupt, RecordMissing
from holdfast.kvstore.host import tier as host
from holdfast.kvstore.host.slots import SlotMemory, SlotState, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.tier import Record
from holdfast.tests.kvstore.host.records import audit, find, get, put

SIZE = 64
SLOTS = 5
KEYS = st.integers(0, 8).map(lambda number: bytes([number + 1]) * 16)


def memory_of(slots: int = SLOTS) -> SlotMemory:
    fd = make_memory(2 * 4096 + slots * (64 + SIZE))
    try:
        return SlotMemory(fd, bytes(16), SIZE)
    finally:
        os.close(fd)


def content(key: bytes, version: int) -> bytes:
    return bytes((key[0] * 31 + version * 7 + at) % 256 for at in range(SIZE))


class HostMachine(RuleBasedStateMachine):
    """``held``: what is READY, by key; it may lose entries to eviction, never get a wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = memory_of()
        self.tier = HostTier(self.memory)
        self.held: dict[bytes, bytes] = {}
        self.filling: dict[int, tuple[bytes, bytes]] = {}
        self.unwanted: set[int] = set()  # filling, and dropped meanwhile
        self.reading: list[tuple[int, bytes]] = []
        self.damaged: set[bytes] = set()
        self.version = 0

    @rule(key=KEYS)
    def reserve(self, key) -> None:
        known = self.tier.has_slot(key)
        slot = self.tier.reserve(key, 4)
        busy = len(self.filling) + len({slot for slot, _ in self.reading})
        if known or busy == SLOTS:
            assert slot is None
            return
        assert slot is not None and slot not in self.filling
        assert slot not in {other for other, _ in self.reading}
        self.version += 1
        payload = content(key, self.version)
        self.filling[slot] = key, payload
        self.memory.payload(slot)[: SIZE // 2] = payload[: SIZE // 2]
        self._forget_evicted()

    @precondition(lambda self: self.filling)
    @rule(number=st.integers(0, 99), done=st.booleans())
    def fill(self, number, done) -> None:
        slot = sorted(self.filling)[number % len(self.filling)]
        key, payload = self.filling.pop(slot)
        wanted = slot not in self.unwanted
        self.unwanted.discard(slot)
        if not done:
            self.tier.abandon(slot)
            return
        self.memory.payload(slot)[:] = payload
        self.tier.filled(slot)
        if wanted:
            self.held[key] = payload
            self.damaged.discard(key)

    @rule(key=KEYS, used=st.booleans())
    def read(self, key, used) -> None:
        slot = find(self.tier, key)
        if key in self.damaged:
            assert slot is None
            self._lose(key)
        elif key in self.held:
            assert slot is not None and bytes(self.memory.payload(slot)) == self.held[key]
            self.tier.hold(slot, used=used)
            self.reading.append((slot, self.held[key]))
        else:
            assert slot is None

    @precondition(lambda self: self.reading)
    @rule(number=st.integers(0, 99))
    def done_reading(self, number) -> None:
        slot, payload = self.reading.pop(number % len(self.reading))
        assert bytes(self.memory.payload(slot)) == payload, "a slot changed while it was read"
        self.tier.release(slot)

    @rule(key=KEYS)
    def put(self, key) -> None:
        self.version += 1
        payload = content(key, self.version)
        known = self.tier.has_slot(key)
        if put(self.tier, key, 4, memoryview(payload)) and not known:
            self.held[key] = payload
            self.damaged.discard(key)
            self._forget_evicted()

    @rule(key=KEYS)
    def drop(self, key) -> None:
        self.tier.drop(key)
        assert key not in self.tier
        self.unwanted |= {slot for slot, (filled, _) in self.filling.items() if filled == key}
        self._lose(key)

    @rule(keys=st.lists(KEYS, unique=True))
    def touch(self, keys) -> None:
        self.tier.touch(keys)

    @rule()
    def prepare(self) -> None:
        self.tier.prepare()

    @rule(number=st.integers(0, 999))
    def flip(self, number) -> None:
        slot = number % SLOTS
        record = self.memory.record(slot)
        if self.memory.state(slot) is SlotState.READY and record.key not in self.damaged:
            self.memory.payload(slot)[number % SIZE] ^= 1 << number % 8
            self.damaged.add(record.key)

    @rule()
    def die(self) -> None:
        """Another process adopts what this one left: records that were READY or READING, no others."""
        self.tier = HostTier(self.memory)
        self.filling.clear()
        self.unwanted.clear()
        self.reading.clear()
        assert self.held.keys() <= self.tier.here.keys()
        for key in list(self.tier.here):
            if key not in self.held:  # dropped while it was read: its death forgot the drop
                self.tier.drop(key)

    def _lose(self, key: bytes) -> None:
        self.held.pop(key, None)
        self.damaged.discard(key)

    def _forget_evicted(self) -> None:
        for key in list(self.held):
            if not self.tier.has_slot(key):
                self._lose(key)

    def teardown(self) -> None:
        audit(self.tier)


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=50)


def filled(tier: HostTier, *keys: bytes) -> None:
    for key in keys:
        assert put(tier, key, 4, memoryview(content(key, 0)))


def test_it_keeps_and_finds_a_record() -> None:
    tier = HostTier(memory_of())
    key = b"k" * 16
    with pytest.raises(RecordMissing):
        get(tier, key)
    assert put(tier, key, 3, memoryview(content(key, 0))) and key in tier
    record = get(tier, key)
    assert (record[0], bytes(record[1])) == (3, content(key, 0))
    record[1][9] ^= 1
    with pytest.raises(RecordCorrupt):
        get(tier, key)
    assert key not in tier
    statistics = tier.statistics()
    assert (statistics["hits"], statistics["misses"], statistics["damaged"], statistics["records"]) == (
        1,
        1,
        1,
        0,
    )


def test_what_was_used_last_goes_last_and_a_chain_from_its_end() -> None:
    keys = [bytes([n]) * 16 for n in range(1, 9)]
    tier = HostTier(memory_of())
    filled(tier, *keys[:5])
    tier.touch(keys[:3])
    filled(tier, keys[5], keys[6], keys[7])
    assert [key in tier for key in keys] == [True, True, False, False, False, True, True, True]


def test_what_was_found_again_outlives_what_was_not() -> None:
    keys = [bytes([n]) * 16 for n in range(1, 9)]
    tier = HostTier(memory_of())
    filled(tier, *keys[:5])
    slot = find(tier, keys[0])
    assert slot is not None
    tier.touch([keys[0]])
    filled(tier, *keys[5:])
    assert keys[0] in tier and keys[1] not in tier


def test_the_order_of_use_outlives_a_death() -> None:
    keys = [bytes([n]) * 16 for n in range(1, 8)]
    memory = memory_of()
    filled(HostTier(memory), *keys[:5])
    HostTier(memory).touch([keys[0]])
    tier = HostTier(memory)
    filled(tier, keys[5])
    assert keys[0] in tier and keys[1] not in tier


def test_a_record_is_found_when_it_is_whole_and_not_before() -> None:
    tier = HostTier(memory_of())
    key = b"k" * 16
    slot = tier.reserve(key, 4)
    assert slot is not None and tier.has_slot(key) and key not in tier and find(tier, key) is None
    tier.memory.payload(slot)[:] = content(key, 0)
    assert key not in tier
    tier.filled(slot)
    assert find(tier, key) == slot


def test_what_a_dead_process_was_filling_is_free_and_what_it_was_reading_is_there() -> None:
    memory = memory_of()
    dead = HostTier(memory)
    filled(dead, b"k" * 16)
    read = find(dead, b"k" * 16)
    assert read is not None
    dead.hold(read)
    dead.hold(read)
    half = dead.reserve(b"h" * 16, 4)
    assert half is not None
    tier = HostTier(memory)
    assert (len(tier), tier.has_slot(b"h" * 16)) == (1, False)
    assert memory.state(half) is SlotState.FREE and memory.state(read) is SlotState.READY
    audit(tier)
    assert find(tier, b"k" * 16) == read


def test_bytes_that_come_from_elsewhere_are_checked() -> None:
    tier = HostTier(memory_of())
    digest = xxh3_64_intdigest(content(b"k" * 16, 0))
    for version, found in ((1, False), (0, True)):
        slot = tier.reserve(b"k" * 16, 0)
        assert slot is not None
        tier.memory.payload(slot)[:] = content(b"k" * 16, version)
        tier.filled(slot, Record(b"k" * 16, 3, digest))
        assert (b"k" * 16 in tier) is found
    assert get(tier, b"k" * 16)[0] == 3 and tier.statistics()["damaged"] == 1
    assert get(HostTier(tier.memory), b"k" * 16)[0] == 3
    audit(tier)


def test_an_audit_notices_a_directory_that_says_something_else() -> None:
    tier = HostTier(memory_of())
    filled(tier, b"k" * 16)
    audit(tier)
    tier.memory.move(3, SlotState.FILLING)
    with pytest.raises(LeakFound, match="wrong \\[3\\]"):
        audit(tier)


def test_what_a_lease_covers_outlives_a_flood_and_no_longer_than_the_lease() -> None:
    tier = HostTier(memory_of())
    leased, other, *flood = [bytes([number]) * 16 for number in range(1, 16)]
    tier.promise(1, [leased, other], 10.0)  # neither is here yet
    tier.promise(2, [other], 20.0)
    filled(tier, leased, other, *flood[:6])
    assert leased in tier and other in tier and len(tier) == SLOTS
    assert tier.promised(other, besides=1) and not tier.promised(leased, besides=1)
    tier.promise(1, [], 0.0)
    filled(tier, *flood[6:12])
    assert leased not in tier and other in tier, "one lease is over, the other is not"
    tier.drop(other)
    filled(tier, other, *flood)
    assert other in tier, "a record that comes back is covered still"
    audit(tier)


def test_leases_that_cover_every_slot_lock_none() -> None:
    tier = HostTier(memory_of())
    keys = [bytes([number]) * 16 for number in range(1, SLOTS + 1)]
    for number, key in enumerate(keys):
        tier.promise(number, [key], float(number))
    filled(tier, *keys, b"another one here")
    assert keys[-1] not in tier, "the latest return went"
    assert all(key in tier for key in keys[:-1])


def test_what_this_process_hashed_is_trusted_and_what_it_adopted_is_not() -> None:
    memory = memory_of()
    tier = HostTier(memory, recheck=False)
    for key in (KEY_A, KEY_B):
        put(tier, key, 4, memoryview(content(key, 1)))
    slot = tier.here.get(KEY_A)
    assert slot is not None
    memory.payload(slot)[7] ^= 16
    assert find(tier, KEY_A) == slot, "as the device's own memory is"
    after = HostTier(memory, recheck=False)
    assert find(after, KEY_A) is None and after.statistics()["damaged"] == 1
    assert find(after, KEY_B) is not None


def test_adopted_records_are_checked_by_a_thread_and_damaged_ones_dropped() -> None:
    memory = memory_of()
    tier = HostTier(memory)
    assert all(put(tier, key, 4, content(key, 1)) for key in (KEY_A, KEY_B))
    slots = tier.here[KEY_A], tier.here[KEY_B]
    memory.payload(slots[0])[7] ^= 16
    after = HostTier(memory, recheck=False)
    after.check_adopted().join()
    memory.payload(slots[1])[7] ^= 16
    assert find(after, KEY_B) == slots[1], "it was sound, and is not hashed again"
    assert find(after, KEY_A) is None and after.statistics()["damaged"] == 1


def test_what_was_checked_in_its_slot_is_hashed_again_only_where_all_is() -> None:
    for recheck in (True, False):
        memory = memory_of()
        tier = HostTier(memory, recheck=recheck)
        slot = tier.reserve(KEY_A, 0)
        assert slot is not None
        tier.filled(slot, Record(KEY_A, 4, 99))
        assert (KEY_A in tier) is not recheck and tier.statistics()["damaged"] == recheck
    after = HostTier(memory, recheck=False)
    assert find(after, KEY_A) is None, "another process's word is not believed"


def test_what_is_above_gives_way_first_and_says_when_it_leaves() -> None:
    tier = HostTier(memory_of(3))
    keys = [bytes([number + 1]) * 16 for number in range(5)]
    for key in keys[:3]:
        put(tier, key, 4, memoryview(content(key, 1)))
    tier.evict_first(keys[1:3])
    tier.touch([keys[1]])
    for key in keys[3:]:
        put(tier, key, 4, memoryview(content(key, 1)))
    assert tier.take_evicted() == [keys[2], keys[0]] and not tier.take_evicted()
    audit(tier)


def test_a_spare_record_takes_a_free_slot_or_that_of_another_spare_one() -> None:
    tier = HostTier(memory_of(2))
    keys = [bytes([number + 1]) * 16 for number in range(4)]
    spare = tier.reserve(keys[0], 4, spare=True)
    assert spare is not None
    tier.filled(spare)
    put(tier, keys[1], 4, memoryview(content(keys[1], 1)))
    assert tier.reserve(keys[2], 4, spare=True) is None and keys[0] in tier
    tier.evict_first([keys[0]])
    assert tier.reserve(keys[2], 4, spare=True) == spare
    assert tier.reserve(keys[3], 4, spare=True) is None and keys[1] in tier
    tier.abandon(spare)
    audit(tier)


KEY_A, KEY_B = b"a" * 16, b"b" * 16


def test_what_is_stored_below_keeps_its_place_and_is_passed_over_meanwhile() -> None:
    tier = HostTier(memory_of())
    for number in range(SLOTS):
        assert put(tier, bytes([number]) * 16, 4, memoryview(content(bytes([number]) * 16, 1)))
    first, second = [*tier.in_order()][:2]
    slot = tier.here.get(first)
    assert slot is not None
    tier.hold(slot, used=False)
    assert tier.reserve(b"n" * 16, 4) is not None
    assert first in tier and second not in tier
    tier.release(slot)
    assert next(tier.in_order()) == first, "reading it for the disk was no use of it"
    audit(tier)


def test_slots_that_are_filled_next_have_their_pages_ahead_of_it(monkeypatch) -> None:
    monkeypatch.setattr(host, "AHEAD_SHARE", 1 / 3)
    fd = make_memory(2 * 4096 + 9 * (4096 + 64))
    tier, begun = HostTier(SlotMemory(fd, bytes(16), 4096)), os.fstat(fd).st_blocks
    taken = lambda: (os.fstat(fd).st_blocks - begun) * 512 // 4096
    while tier.prepare():
        pass
    assert taken() == 3, "as many as were asked for and no more"
    keys = [bytes([number + 1]) * 16 for number in range(8)]
    for key in keys[:3]:
        assert put(tier, key, 4, memoryview(key * 256))
    assert taken() == 3, "these are the ones that were filled"
    assert tier.prepare() and taken() == 4 and tier.prepare() and tier.prepare() and not tier.prepare()
    for key in keys[3:]:
        assert put(tier, key, 4, memoryview(key * 256))
    assert all(bytes(get(tier, key)[1]) == key * 256 for key in keys)
    tier.drop(keys[0])
    assert tier.prepare() and taken() == 9 and not tier.prepare(), "what was filled once is not touched again"
    assert all(bytes(get(tier, key)[1]) == key * 256 for key in keys[1:])
    os.close(fd)
