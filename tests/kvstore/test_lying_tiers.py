"""What a tier may do wrong costs a record, and never a wrong byte, a slot or a wait without end."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.tier import MoveEnd, Presence, Record, Tier
from holdfast.kvstore.tiers import ASKED, AWAY_SECONDS, BELOW, HOST, REFUSED_SECONDS, SAVING, Tiers
from holdfast.tests.kvstore.host.records import audit, held

SIZE = 4096
KEY, OTHER = b"k" * 16, b"o" * 16
BYTES = bytes(range(256)) * (SIZE // 256)
RECORD = Record(KEY, 4, xxh3_64_intdigest(BYTES))


class Puppet(Tier):
    """A tier that says and does what the test tells it. ``found``: what it answers of each key; ``asked``: the
    tickets of fetches with their slots; ``given``: those of stores."""

    def __init__(self, name: str, found: Presence = Presence.FOUND) -> None:
        self.name = name
        self.found = found
        self.asked: dict[int, int | None] = {}
        self.given: dict[int, int] = {}
        self.ends: list[MoveEnd] = []
        self.refuses = False

    def __len__(self) -> int:
        return 1

    @property
    def room(self) -> int:
        return 4

    @property
    def waiting(self) -> bool:
        return bool(self.asked or self.given)

    def lookup(self, keys: Collection[bytes]) -> list[Presence]:
        return [self.found] * len(keys)

    def store(self, record: Record, slot: int, ticket: int, now: float) -> bool:
        self.given[ticket] = slot
        return not self.refuses

    def fetch(self, key: bytes, slot: int | None, ticket: int, now: float) -> bool:
        if self.found is not Presence.FOUND or self.refuses:
            return False
        self.asked[ticket] = slot
        return True

    def poll(self, now: float) -> list[MoveEnd]:
        ended, self.ends = self.ends, []
        return ended

    def touch(self, keys: Iterable[bytes]) -> None:
        """It has no order."""

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """It has no order."""

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        self.found = Presence.ABSENT


class Stand:
    """Four slots above two puppets."""

    def __init__(self) -> None:
        fd = make_memory(2 * 4096 + 4 * (SIZE + 64) + 4096)
        self.memory = SlotMemory(fd, bytes(16), SIZE)
        os.close(fd)
        self.host = HostTier(self.memory, recheck=False)
        self.slots = self.host.room
        self.near, self.far = Puppet("near"), Puppet("far")
        self.tiers = Tiers(self.host, (self.near, self.far))

    def begin(self) -> tuple[int, int]:
        """Have the near tier asked for the record; its ticket and its slot."""
        assert self.tiers.fetch(KEY, 0.0, 7) is Presence.FOUND
        ((ticket, slot),) = self.near.asked.items()
        assert slot is not None
        return ticket, slot

    def level(self) -> int:
        return self.tiers.levels((KEY,), (), whole=True)[0]


def test_a_record_that_comes_is_found_and_counts_for_its_tenant() -> None:
    here = Stand()
    ticket, slot = here.begin()
    assert here.level() == BELOW and here.tiers.fetch(KEY, 0.0, 7) is Presence.FOUND, "it is asked for once"
    here.memory.payload(slot)[:] = BYTES
    here.near.ends = [MoveEnd(ticket, True, RECORD)] * 2
    here.tiers.poll(0.0)
    assert here.level() == HOST and held(here.host) == {7: 1} and not here.far.asked
    audit(here.host)


WRONG = {
    "it fails": MoveEnd(1, False),
    "it says that it came and brings nothing": MoveEnd(1, True),
    "it brings it and says that it fails": MoveEnd(1, False, RECORD),
    "it is of another key": MoveEnd(1, True, Record(OTHER, 4, RECORD.digest)),
    "its bytes are others": MoveEnd(1, True, Record(KEY, 4, RECORD.digest ^ 1)),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_one_tier_does_not_bring_is_asked_of_the_next_into_the_same_slot(how: str) -> None:
    here = Stand()
    ticket, slot = here.begin()
    here.memory.payload(slot)[:] = BYTES
    here.near.ends = [WRONG[how]._replace(ticket=ticket)]
    here.tiers.poll(0.0)
    assert KEY not in here.host and here.tiers.fetching(KEY)
    ((again, same),) = here.far.asked.items()
    assert same == slot and again != ticket
    here.far.ends = [WRONG[how]._replace(ticket=again)]
    here.tiers.poll(0.0)
    assert not here.tiers.fetching(KEY) and here.host.room == here.slots, "nobody has it: the slot is free"
    audit(here.host)


def test_what_nobody_asked_for_is_not_believed() -> None:
    """Nor what one tier says of another's work: a slot is its own until it says so itself."""
    here = Stand()
    ticket, slot = here.begin()
    here.memory.payload(slot)[:] = BYTES
    here.far.ends = [MoveEnd(ticket, True, RECORD)]
    here.near.ends = [MoveEnd(ticket + 100, True, RECORD), MoveEnd(-1, False)]
    here.tiers.poll(0.0)
    assert here.level() == BELOW and KEY not in here.host and here.host.room == here.slots - 1


def test_a_tier_that_never_brings_it_is_left_alone_for_a_while() -> None:
    here = Stand()
    here.far.found = Presence.ABSENT
    here.begin()
    here.tiers.give_up(KEY, 10.0)
    here.tiers.poll(10.0)
    assert here.tiers.fetch(OTHER, 10.0, 7) is Presence.ABSENT and here.tiers.room == 1
    here.tiers.poll(10.0 + AWAY_SECONDS)
    assert here.tiers.fetch(OTHER, 10.0 + AWAY_SECONDS, 7) is Presence.FOUND
    assert here.host.room == here.slots - 2, "it has the first slot still"


def test_a_tier_that_never_says_whether_it_has_it_is_left_alone_for_a_while() -> None:
    here = Stand()
    here.near.found, here.far.found = Presence.PENDING, Presence.ABSENT
    assert here.level() == ASKED and here.tiers.unsure(KEY)
    assert here.tiers.fetch(KEY, 0.0, 7) is Presence.PENDING
    here.tiers.give_up(KEY, 10.0)
    here.tiers.poll(10.0)
    assert here.level() == 0 and here.tiers.fetch(KEY, 10.0, 7) is Presence.ABSENT
    here.tiers.poll(10.0 + AWAY_SECONDS)
    assert here.level() == ASKED


def test_a_tier_that_has_it_is_asked_though_a_nearer_one_does_not_know() -> None:
    here = Stand()
    here.near.found = Presence.PENDING
    assert here.level() == BELOW and here.tiers.fetch(KEY, 0.0, 7) is Presence.FOUND
    assert here.far.asked and not here.near.asked


def test_a_tier_that_says_it_has_it_and_is_not_willing_costs_no_slot() -> None:
    here = Stand()
    here.near.refuses = here.far.refuses = True
    assert here.tiers.fetch(KEY, 0.0, 7) is Presence.ABSENT and here.host.room == here.slots
    audit(here.host)


def _kept(here: Stand) -> int:
    """A record in the host tier that no other has; its slot."""
    here.near.found = here.far.found = Presence.ABSENT
    slot = here.host.reserve(KEY, 4, 7)
    assert slot is not None and here.level() == SAVING and here.tiers.saving(KEY)
    here.memory.payload(slot)[:] = BYTES
    here.host.filled(slot)
    return slot


def test_a_record_that_goes_down_keeps_its_slot_until_the_tier_says_so() -> None:
    here = Stand()
    slot = _kept(here)
    here.tiers.send([KEY, KEY])
    here.tiers.send_down({}, lambda key: False, 0.0)
    assert list(here.near.given.values()) == [slot] and not here.far.given
    here.host.drop(KEY)
    assert here.host.room == here.slots - 1, "the tier reads it"
    (ticket,) = here.near.given
    here.near.ends = [MoveEnd(ticket, True), MoveEnd(ticket, False), MoveEnd(ticket, True, RECORD)]
    here.tiers.poll(0.0)
    assert here.host.room == here.slots and here.tiers.room == 1
    audit(here.host)


def test_a_record_that_the_nearest_tier_does_not_take_goes_to_the_next() -> None:
    here = Stand()
    slot = _kept(here)
    here.near.refuses = True
    here.tiers.send([KEY])
    here.tiers.send_down({}, lambda key: False, 0.0)
    assert list(here.far.given.values()) == [slot]


def test_a_record_that_a_tier_fails_to_store_is_sent_again_after_a_while_and_not_at_once() -> None:
    """A full disk is not asked again in each step."""
    here = Stand()
    here.near.found = here.far.found = Presence.ABSENT
    for number in range(here.slots):
        slot = here.host.reserve(bytes([number]) * 16, 4, 7)
        assert slot is not None
        here.host.filled(slot)

    def sent(now: float) -> int:
        """How many records go down now; all of them fail."""
        here.near.given.clear()
        here.tiers.send_down({}, lambda key: False, now)
        here.near.ends = [MoveEnd(ticket, False) for ticket in here.near.given]
        here.tiers.poll(now)
        return len(here.near.given)

    assert sent(0.0) == 1 and sent(0.1) == 0 and sent(REFUSED_SECONDS / 2) == 0
    assert sent(REFUSED_SECONDS) == 1, "it is evicted next still"
