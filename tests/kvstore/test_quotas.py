"""Eviction among tenants: a flood stays within its own share, in memory and on disk."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk.admin import accounts, write_about
from holdfast.kvstore.disk.eviction import RecordEviction
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.payload_file import stride_of
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.quotas import FairOrder, by_largest, tenant_of
from holdfast.kvstore.tier import Record
from holdfast.tests.kvstore.host.records import audit, held

SIZE = 64
ROOM = stride_of(SIZE)
MINE, THEIRS = 7, 9


def key(tenant: int, number: int) -> bytes:
    return tenant.to_bytes(8, "little") + number.to_bytes(8, "little")


def memory_of_exactly(slots: int) -> SlotMemory:
    size = 4096 + -(-slots * 64 // 4096) * 4096
    for extra in range(0, 64 * 4096, 64):
        fd = make_memory(size + extra)
        try:
            memory = SlotMemory(fd, bytes(16), SIZE)
        finally:
            os.close(fd)
        if memory.slots == slots:
            return memory
    raise AssertionError("no such memory")


def fill(tier: HostTier, tenant: int, number: int) -> None:
    slot = tier.reserve(key(tenant, number), 4, tenant)
    assert slot is not None
    tier.filled(slot)


def use(tier: HostTier, tenant: int, number: int) -> bool:
    """One use of a record, which is made anew where it is not there; whether it was."""
    if tier.find([key(tenant, number)]):
        tier.touch([key(tenant, number)])
        return True
    fill(tier, tenant, number)
    return False


def test_the_largest_holder_gives_up_records_and_the_asker_counts() -> None:
    queues = {1: iter("abcdef"), 2: iter("xyz"), 3: iter("p")}
    assert "".join(by_largest({1: 6, 2: 3, 3: 1}, queues)) == "abcdxeyfzp"


def test_one_tenant_alone_has_all_and_shares_it_when_another_comes() -> None:
    tier = HostTier(memory_of_exactly(40))
    for number in range(100):
        fill(tier, MINE, number)
    assert held(tier) == {MINE: 40}
    for number in range(15):
        fill(tier, THEIRS, number)
    assert held(tier) == {MINE: 25, THEIRS: 15}
    for number in range(15, 200):
        fill(tier, THEIRS, number)
    assert held(tier) == {MINE: 20, THEIRS: 20}
    assert all(key(MINE, number) in tier for number in range(80, 100)), "its latest"
    audit(tier)


def hit_rate(slots: int, flood: int, seed: int = 3) -> float:
    """Of a tenant that goes round 12 sessions of one record, while another asks ``flood`` new ones for each."""
    tier, rng = HostTier(memory_of_exactly(slots)), Random(seed)
    hits, number = 0, 0
    for turn in range(600):
        hits += use(tier, MINE, rng.randrange(12)) and turn >= 100
        for _ in range(flood):
            fill(tier, THEIRS, number)
            number += 1
    audit(tier)
    return hits / 500


def test_a_flood_leaves_the_others_hits_alone() -> None:
    alone = hit_rate(30, 0)
    assert alone == 1.0
    assert hit_rate(30, 9) >= 0.9 * alone


def test_what_another_process_left_keeps_its_tenant() -> None:
    memory = memory_of_exactly(20)
    first = HostTier(memory)
    for number in range(6):
        fill(first, MINE, number)
    for number in range(14):
        fill(first, THEIRS, number)
    again = HostTier(memory)
    assert held(again) == {MINE: 6, THEIRS: 14}
    for number in range(50, 90):
        fill(again, THEIRS, number)
    assert all(key(MINE, number) in again for number in range(6))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["fill", "drop", "lease", "hold"])), max_size=120)
)
def test_no_tenant_loses_a_record_while_another_has_more_that_could_go(acts: list[tuple[int, str]]) -> None:
    tier = HostTier(memory_of_exactly(12))
    leased: set[bytes] = set()
    for number, (tenant, act) in enumerate(acts):
        mine = [one for one in tier.in_order() if one[0] == tenant]
        if act == "fill":
            before, could = held(tier), set(tier.in_order()) - leased
            fill(tier, tenant, number)
            before[tenant] += 1
            after = held(tier)
            for loser in [one for one in before if after[one] < before[one]]:
                rivals = {one[0] for one in could if before[one[0]] > before[loser]}
                assert not rivals, "another holds more, and has what no lease covers"
        elif act == "drop" and mine:
            tier.drop(mine[0])
        elif act == "lease" and mine:
            leased.add(mine[-1])
            tier.promise(number, [mine[-1]], 1.0)
        audit(tier)
    assert sum(held(tier).values()) == len(tier)


def test_the_order_of_slots_forgets_tenants_that_are_gone() -> None:
    order = FairOrder(8)
    order.take(1, MINE)
    order.add([1])
    order.free(1)
    assert 1 not in order and list(order.slots()) == []


def given_of(tenant: int, number: int) -> tuple[Record, memoryview]:
    data = number.to_bytes(8, "little") * (SIZE // 8)
    return Record(key(tenant, number), 4, xxh3_64_intdigest(data), tenant), memoryview(data)


def test_on_disk_a_flood_passes_through_its_own_share_and_after_a_restart_too(tmp_path: Path) -> None:
    folder = tmp_path / bytes(16).hex()
    store = RecordStore(Begin(str(folder), bytes(16), SIZE, 20 * ROOM))
    store.put([given_of(MINE, number) for number in range(8)])
    for number in range(60):
        store.put([given_of(THEIRS, number)])
    assert store.order.held() == {MINE: 8, THEIRS: 12}
    write_about(folder, SIZE)
    store.close()
    (account,) = accounts(tmp_path, "stat")
    assert account.tenants == {MINE: 8, THEIRS: 12}
    store = RecordStore(Begin(str(folder), bytes(16), SIZE, 20 * ROOM))
    evicted = store.put([given_of(THEIRS, number) for number in range(100, 109)])
    assert {one[0] for one in evicted} == {THEIRS}
    store.put([given_of(MINE, number) for number in range(20, 26)])
    assert store.order.held() == {MINE: 10, THEIRS: 10}, "the asker counts: from then on it takes from itself"
    store.close()


def test_on_disk_what_a_lease_covers_goes_last_for_every_tenant() -> None:
    order = RecordEviction()
    for number in range(6):
        order.add(key(MINE, number), MINE)
    for number in range(2):
        order.add(key(THEIRS, number), THEIRS)
    order.lease([key(MINE, 0), key(MINE, 1)], on=True)
    gone = order.evicted(7, {THEIRS: 1}, ())
    assert gone[:2] == [key(MINE, 2), key(MINE, 3)] and gone[-1] in (key(MINE, 0), key(MINE, 1))
    assert set(gone[:6]) == {key(MINE, n) for n in range(2, 6)} | {key(THEIRS, n) for n in range(2)}
    order.lease([key(MINE, 0)], on=False)
    assert order.evicted(1, {MINE: 1}, ()) == [key(MINE, 0)]


def test_a_tenants_number_is_its_roots_and_the_same_ever_after() -> None:
    assert tenant_of(bytes(range(16))) == 0x0706050403020100
