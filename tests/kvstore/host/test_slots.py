"""The slots' memory: what a state may follow, and when another process takes it for its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from holdfast.kvstore.errors import SlotMisused
from holdfast.kvstore.host.slots import SlotMemory, SlotState, make_memory

SPACE = bytes(range(16))


@pytest.fixture
def fd() -> Iterator[int]:
    fd = make_memory(1 << 16)
    yield fd
    os.close(fd)


def test_every_illegal_move_is_refused_with_both_states(fd: int) -> None:
    legal = {
        ("FREE", "FILLING"),
        ("FILLING", "READY"),
        ("FILLING", "FREE"),
        ("READY", "READING"),
        ("READY", "FREE"),
        ("READING", "READING"),
        ("READING", "READY"),
    }
    ways = {
        SlotState.FREE: (),
        SlotState.FILLING: (SlotState.FILLING,),
        SlotState.READY: (SlotState.FILLING, SlotState.READY),
        SlotState.READING: (SlotState.FILLING, SlotState.READY, SlotState.READING),
    }
    memory = SlotMemory(fd, SPACE, 100)
    slots = iter(range(memory.slots))
    for state, way in ways.items():
        for wanted in SlotState:
            slot = next(slots)
            for step in way:
                memory.move(slot, step)
            if (state.name, wanted.name) in legal:
                memory.move(slot, wanted)
                assert memory.state(slot) is wanted
                continue
            with pytest.raises(SlotMisused, match=f"slot {slot} is {state.name}: .* {wanted.name}"):
                memory.move(slot, wanted)


@pytest.mark.parametrize("block_bytes", [64, 100, 4096, 5000])
def test_slots_lie_beside_each_other_and_inside_the_memory(fd: int, block_bytes: int) -> None:
    memory = SlotMemory(fd, SPACE, block_bytes)
    assert memory.slots > 5
    for slot in range(memory.slots):
        memory.payload(slot)[:] = bytes([slot % 251]) * block_bytes
        memory.describe(slot, bytes([slot % 256]) * 16, slot)
    for slot in range(memory.slots):
        assert bytes(memory.payload(slot)) == bytes([slot % 251]) * block_bytes
        assert (memory.record(slot).key, memory.record(slot).tokens) == (bytes([slot % 256]) * 16, slot)
    assert memory.offset_of(memory.slots - 1) + block_bytes <= 1 << 16
    assert block_bytes < 4096 or memory.offset_of(1) % 4096 == 0
    every = np.arange(memory.slots)
    assert memory.offsets_of(every).tolist() == [memory.offset_of(slot) for slot in range(memory.slots)]


def test_the_same_description_adopts_and_any_other_begins_anew(fd: int) -> None:
    first = SlotMemory(fd, SPACE, 100)
    assert not first.adopted
    first.move(3, SlotState.FILLING)
    again = SlotMemory(fd, SPACE, 100)
    assert again.adopted and again.state(3) is SlotState.FILLING
    for space, block_bytes in ((bytes(16), 100), (SPACE, 100), (SPACE, 200)):
        other = SlotMemory(fd, space, block_bytes)
        assert not other.adopted and not other.directory["state"].any()


def test_a_memory_too_small_for_a_slot_has_none() -> None:
    fd = make_memory(8192)
    assert SlotMemory(fd, SPACE, 100).slots == 0
    os.close(fd)
