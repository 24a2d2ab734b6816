"""What lies below the device: the interface that the host and disk tiers fill.

A tier keeps records by key; it is a cache, so it may forget any of them, and never makes the device wait.
Knows no blocks, sequences or policies; a record's format on its medium is the tier's own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """One block on its way: the first ``tokens`` slots of ``payload`` (``block_bytes`` long) are filled.

    ``key`` is a block key of `keys.BlockHasher`, in which namespace, group and tenant are already mixed.
    """

    key: bytes
    tokens: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """``records`` and ``bytes`` now, of ``capacity`` bytes; counts since birth.

    ``hits``, ``misses``, ``damaged``: how each `Tier.get` ended. ``refused``: puts without room.
    ``dropped``: records given up, for room or when told to.
    """

    records: int
    bytes: int
    capacity: int
    hits: int
    misses: int
    damaged: int
    refused: int
    dropped: int


class Tier(Protocol):
    """A place for records below the device."""

    def put(self, record: Record) -> bool:
        """Keep a copy; of two records with one key the first wins.

        Returns:
            False where there is no room: a tier never makes its caller wait.
        """
        ...

    def get(self, key: bytes) -> Record:
        """The record, whole and checked; its payload may be read until the next call on this tier.

        Raises:
            RecordMissing: it is not here.
            RecordDamaged: it failed its checks; it is dropped and counted.
        """
        ...

    def drop(self, key: bytes) -> None:
        """Forget the record, if there is one."""
        ...

    def __contains__(self, key: bytes) -> bool:
        """Whether `get` is likely to succeed."""
        ...

    def statistics(self) -> TierStatistics:
        """Gauges and counters."""
        ...
