"""The tier interface is enough for a block to leave an arena and come back, through the plainest tier."""

from __future__ import annotations

import pytest
import torch

from holdfast.kvstore.arena import DeviceArena
from holdfast.kvstore.errors import RecordMissing
from holdfast.kvstore.groups import KVGroup
from holdfast.kvstore.tier import Record, Tier, TierStatistics

GROUP = KVGroup(id=0, layers=(0, 1), kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4)


class DictTier:
    """Records in a dict, two at most."""

    def __init__(self) -> None:
        self._records: dict[bytes, tuple[int, bytes]] = {}
        self._hits = self._misses = self._refused = self._dropped = 0

    def put(self, record: Record) -> bool:
        if record.key not in self._records and len(self._records) == 2:
            self._refused += 1
            return False
        self._records.setdefault(record.key, (record.tokens, bytes(record.payload)))
        return True

    def get(self, key: bytes) -> Record:
        if key not in self._records:
            self._misses += 1
            raise RecordMissing(key, "not held")
        self._hits += 1
        tokens, payload = self._records[key]
        return Record(key, tokens, memoryview(payload))

    def drop(self, key: bytes) -> None:
        self._dropped += self._records.pop(key, None) is not None

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def statistics(self) -> TierStatistics:
        size = sum(len(payload) for _, payload in self._records.values())
        capacity = 2 * GROUP.block_bytes
        counts = (self._hits, self._misses, 0, self._refused, self._dropped)
        return TierStatistics(len(self._records), size, capacity, *counts)


def test_a_block_goes_down_and_comes_back_the_same_bytes() -> None:
    tier: Tier = DictTier()
    arena, later = DeviceArena(GROUP, 3), DeviceArena(GROUP, 2)
    arena.poison([1])
    arena.kv[1, :, :, :, :3] = torch.randn((2, 2, 2, 3, 8)).to(torch.bfloat16)
    arena.zero_behind(1, 3)
    assert tier.put(Record(b"k", 3, memoryview(arena.bytes_of(1).numpy().tobytes())))
    arena.poison([1])
    record = tier.get(b"k")
    assert record.tokens == 3
    later.bytes_of(0).copy_(torch.frombuffer(bytearray(record.payload), dtype=torch.uint8))
    assert not later.kv.isnan().any()
    assert tier.put(Record(b"k", 4, memoryview(bytes(GROUP.block_bytes)))), "the first wins"
    assert bytes(tier.get(b"k").payload) == later.bytes_of(0).numpy().tobytes()


def test_a_full_tier_refuses_and_a_missing_key_says_which() -> None:
    tier: Tier = DictTier()
    payload = memoryview(bytes(GROUP.block_bytes))
    assert [tier.put(Record(key, 4, payload)) for key in (b"a", b"b", b"c")] == [True, True, False]
    tier.drop(b"a")
    assert (b"a" in tier, b"b" in tier) == (False, True)
    with pytest.raises(RecordMissing, match="record 61: not held") as missing:
        tier.get(b"a")
    assert missing.value.key == b"a"
    assert tier.statistics() == TierStatistics(1, GROUP.block_bytes, 2 * GROUP.block_bytes, 0, 1, 0, 1, 1)
