"""Whole records in a host tier, for tests."""

from __future__ import annotations

from collections import Counter

from holdfast.kvstore.errors import RecordCorrupt, RecordMissing
from holdfast.kvstore.host.tier import HostTier


def find(tier: HostTier, key: bytes) -> int | None:
    """The slot that holds the record, its bytes checked."""
    return next(iter(tier.find([key])), None)


def audit(tier: HostTier) -> None:
    """Check all of the tier at once."""
    for _ in tier.audit_in_slices():
        continue


def held(tier: HostTier) -> Counter[int]:
    """The number of records of each tenant."""
    return Counter(tier.memory.record(slot).tenant for slot in tier.here.values())


def put(tier: HostTier, key: bytes, tokens: int, payload: bytes | memoryview) -> bool:
    """Keep a copy; False where there is no room. Of two records with one key the first wins."""
    if tier.has_slot(key):
        return True
    slot = tier.reserve(key, tokens)
    if slot is None:
        return False
    tier.memory.payload(slot)[:] = payload
    tier.filled(slot)
    return True


def get(tier: HostTier, key: bytes) -> tuple[int, memoryview]:
    """Tokens and payload, checked. Raises `RecordMissing`, `RecordCorrupt`."""
    damaged = tier.statistics()["damaged"]
    slot = find(tier, key)
    if slot is not None:
        return tier.tokens_of(slot), tier.memory.payload(slot)
    if tier.statistics()["damaged"] > damaged:
        raise RecordCorrupt(key, "its bytes are not those that were stored")
    raise RecordMissing(key, "not held")
