"""A block leaves an arena for the host tier and comes back, byte for byte; a tier without room refuses."""

from __future__ import annotations

import os

import pytest
import torch

from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.errors import RecordMissing
from holdfast.kvstore.groups import KVGroup
from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.tests.kvstore.host.records import get, put

GROUP = KVGroup(id=0, layers=(0, 1), kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4)
KEY = b"k" * 16


def two_slots() -> HostTier:
    fd = make_memory(2 * 4096 + 2 * (64 + GROUP.block_bytes))
    memory = SlotMemory(fd, bytes(16), GROUP.block_bytes)
    os.close(fd)
    assert memory.slots == 2
    return HostTier(memory)


def test_a_block_goes_down_and_comes_back_the_same_bytes() -> None:
    tier = two_slots()
    arena, later = DeviceArena(GROUP, 3), DeviceArena(GROUP, 2)
    arena.poison([1])
    arena.kv[1, :, :, :, :3] = torch.randn((2, 2, 2, 3, 8)).to(torch.bfloat16)
    arena.zero_behind(1, 3)
    assert put(tier, KEY, 3, memoryview(arena.bytes_of(1).numpy().tobytes()))
    arena.poison([1])
    record = get(tier, KEY)
    assert record[0] == 3
    later.bytes_of(0).copy_(torch.frombuffer(bytearray(record[1]), dtype=torch.uint8))
    assert not later.kv.isnan().any()
    assert put(tier, KEY, 4, memoryview(bytes(GROUP.block_bytes))), "the first wins"
    assert bytes(get(tier, KEY)[1]) == later.bytes_of(0).numpy().tobytes()


def test_a_tier_with_all_slots_being_read_refuses_and_a_missing_key_says_which() -> None:
    tier = two_slots()
    keys = [bytes([number]) * 16 for number in b"abc"]
    payload = memoryview(bytes(GROUP.block_bytes))
    for key in keys[:2]:
        assert put(tier, key, 4, payload)
        slot = tier.slot_of(key)
        assert slot is not None
        tier.hold(slot)
    assert not put(tier, keys[2], 4, payload)
    tier.drop(keys[0])
    assert (keys[0] in tier, keys[1] in tier) == (False, True)
    with pytest.raises(RecordMissing, match=f"record {keys[0].hex()}: not held") as missing:
        get(tier, keys[0])
    assert missing.value.key == keys[0]
    size = GROUP.block_bytes
    assert list(tier.statistics().values()) == [1, size, 2 * size, 0, 1, 0, 1, 1]
