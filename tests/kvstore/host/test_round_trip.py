"""A block leaves an arena for host and disk and comes back, byte for byte; a tier without room refuses."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.block_mover import BlockMover
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.errors import RecordMissing
from holdfast.kvstore.groups import HeadLayout, KVGroup, LatentLayout, Layout
from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.tier import Record
from holdfast.tests.kvstore.host.records import get, put

GROUP = KVGroup(id=0, layers=(0, 1), layout=HeadLayout(2, 8), dtype="bfloat16", block_tokens=4)
KEY = b"k" * 16


def two_slots() -> HostTier:
    fd = make_memory(2 * 4096 + 2 * (64 + GROUP.block_bytes))
    memory = SlotMemory(fd, bytes(16), GROUP.block_bytes)
    os.close(fd)
    assert memory.slots == 2
    return HostTier(memory)


@pytest.mark.parametrize("layout", [GROUP.layout, LatentLayout(28, 4)], ids=["heads", "latent"])
def test_a_block_goes_to_the_disk_and_comes_back_the_same_bytes(layout: Layout, tmp_path: Path) -> None:
    tier, after = two_slots(), two_slots()
    arena, later = (DeviceArena(replace(GROUP, layout=layout), blocks) for blocks in (3, 2))
    arena.poison([1])
    arena.kv[1, ..., :3, :] = cells = torch.randn(*arena.kv.shape[1:-2], 3, arena.kv.shape[-1]).bfloat16()
    slot = tier.reserve(KEY, 3)
    assert slot is not None
    BlockMover(arena, tier.memory).move([(1, slot, 3)], [])
    tier.filled(slot)
    arena.poison([1])
    tokens, payload = get(tier, KEY)
    with closing(RecordStore(Begin(str(tmp_path), bytes(16), GROUP.block_bytes, 1 << 20))) as store:
        store.put([(Record(KEY, tokens, tier.memory.record(slot).digest), payload)])
    with closing(RecordStore(Begin(str(tmp_path), bytes(16), GROUP.block_bytes, 1 << 20))) as store:
        assert store.get(KEY, into := memoryview(bytearray(GROUP.block_bytes))).tokens == 3
    assert put(after, KEY, 3, into)
    back = after.here.get(KEY)
    assert back is not None
    later.poison([0, 1])
    BlockMover(later, after.memory).move([], [(back, 0)])
    assert torch.equal(later.kv[0, ..., :3, :], cells)
    assert later.kv[0, ..., 3:, :].eq(0.0).all() and later.kv[1].isnan().all()


def test_of_two_records_with_one_key_the_first_wins() -> None:
    tier = two_slots()
    assert put(tier, KEY, 3, bytes(range(256)) * (GROUP.block_bytes // 256))
    assert put(tier, KEY, 4, bytes(GROUP.block_bytes))
    assert get(tier, KEY) == (3, bytes(range(256)) * (GROUP.block_bytes // 256))


def test_a_tier_with_all_slots_being_read_refuses_and_a_missing_key_says_which() -> None:
    tier = two_slots()
    keys = [bytes([number]) * 16 for number in b"abc"]
    payload = memoryview(bytes(GROUP.block_bytes))
    for key in keys[:2]:
        assert put(tier, key, 4, payload)
        slot = tier.here.get(key)
        assert slot is not None
        tier.hold(slot)
    assert not put(tier, keys[2], 4, payload)
    tier.drop(keys[0])
    assert (keys[0] in tier, keys[1] in tier) == (False, True)
    with pytest.raises(RecordMissing, match=f"record {keys[0].hex()}: not held"):
        get(tier, keys[0])
    size = GROUP.block_bytes
    assert list(tier.statistics().values()) == [1, size, 2 * size, 0, 1, 0, 1, 1]
