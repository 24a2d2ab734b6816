"""The interface of a tier: what keeps records of KV, each found by its key.

`tiers.Tiers` has them in an order, each slower than the one before. The first is the host's memory: records
lie in its *slots*, and the device copies from and to these. A lower tier copies a record out of a slot when it
stores it, and into a slot when it brings it up. No method waits: what takes time is begun by `store` and
`fetch`, and `poll` tells what has ended. A tier may answer late, never, twice or wrongly; that costs a
recompute. Knows keys, slots and bytes; no sequences.

::

    lookup ──▶ FOUND   ──▶ fetch ──▶ … poll ──▶ MoveEnd: the bytes are in the slot, or will not come
               ABSENT  ──▶ store ──▶ … poll ──▶ MoveEnd: the record is here, or was refused
               PENDING ──▶ ask again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

Reach: TypeAlias = Callable[[int], memoryview] | None
"""Gives the bytes of a device block as writable memory, for its id; None: this process cannot write them."""


class Presence(IntEnum):
    """What `Tier.lookup` answers of a key. PENDING: its record is on the way into the tier, or the tier does
    not know yet."""

    ABSENT = 0
    PENDING = 1
    FOUND = 2


class Record(NamedTuple):
    """A record: its ``key`` of 16 bytes, its number of ``tokens`` (1 to those of a block), the 64-bit xxh3
    ``digest`` of its bytes, and the number of its ``tenant``, of 64 bits."""

    key: bytes
    tokens: int
    digest: int
    tenant: int = 0


class MoveEnd(NamedTuple):
    """The end of the store or the fetch with this ``ticket``: its slot is the caller's again, and the tier
    neither reads nor writes it any more. ``done``: the
    record is where it was to go; else the slot may hold anything. ``record``: what came, of a fetch that is
    done."""

    ticket: int
    done: bool
    record: Record | None = None


class Tier(ABC):
    """A tier of records. One thread uses it. To open one may raise; afterwards no method does.

    ``name``: in statistics, such as ``disk``. ``deadline``: after how many seconds without a record that was
    asked for a turn waits no longer, and is computed. ``checks``: records that it brings into slots were
    compared with their digests there; else the caller does that.
    """

    name: str
    deadline: float = 8.0
    checks: bool = False

    @abstractmethod
    def __len__(self) -> int:
        """How many records it has; 0 while it is away. A tier that cannot know says 1 while it may have any."""

    @abstractmethod
    def lookup(self, keys: Collection[bytes]) -> list[Presence]:
        """Whether it has the record of each key. Not a use of it."""

    @abstractmethod
    def store(self, record: Record, slot: int, ticket: int, now: float) -> bool:
        """Begin to keep a record. Its bytes are in ``slot``, which does not change before the end is told.
        Returns False, and begins nothing, if it has the record or cannot take it, as far as it knows now: then
        the next tier is asked. ``ticket``: a number that its end repeats; ``now``: seconds."""

    @abstractmethod
    def fetch(self, key: bytes, slot: int | None, ticket: int, now: float) -> bool:
        """Begin to bring a record into ``slot``, which nothing else uses until the end is told. None: only to
        where `read` finds it, if it ``reads``. Returns False, and begins nothing, if it does not have the
        record."""

    @abstractmethod
    def poll(self, now: float) -> list[MoveEnd]:
        """Which stores and fetches have ended since the last call."""

    @property
    def ready(self) -> bool:
        """Whether it answers. What it owes while it does not is not waited for."""
        return True

    @property
    @abstractmethod
    def room(self) -> int:
        """How many more stores it can be asked for now; 0 while it is away. It is asked often; a tier without a
        limit may say any large number."""

    @property
    def full(self) -> bool:
        """Whether a record that comes now evicts another."""
        return False

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether it owes an end, be it one that the next `poll` tells."""

    @abstractmethod
    def touch(self, keys: Iterable[bytes]) -> None:
        """Count those of these records that are here as used now. ``keys``: in the order of their sequence, of
        which the end is evicted before the beginning."""

    @abstractmethod
    def evict_first(self, keys: Iterable[bytes]) -> None:
        """Let those of these records that are here be evicted before all others of their tenants, the last of
        them first: a tier above has them, or they are unlikely to be wanted again."""

    @abstractmethod
    def drop(self, key: bytes, *, erase: bool = False) -> None:
        """Forget a record, also on its way. With ``erase`` its bytes are gone soon, whatever happens to the
        tier meanwhile; else at some time."""

    def lease(self, keys: Iterable[bytes], *, on: bool) -> None:  # noqa: B027
        """Note that leases cover these keys from now on, or with ``on`` false no longer: their records, also
        those that come later, are evicted after all others."""

    # --- reading without a slot -----------------------------------------------------------------------------

    reads: bool = False
    """Whether `read` may find anything."""

    def readable(self, key: bytes) -> bool:
        """Whether `read` may succeed now or after a `fetch`."""
        return False

    def near(self, key: bytes) -> bool:
        """Whether `read` is likely to succeed now."""
        return False

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[int]:
        """Copy records into memory, without waiting for any, and check them there: ``keys[i]`` into
        ``blocks[i]``. Returns the number of tokens of each record that came, the longest beginning; the other
        blocks may hold anything then."""
        return []

    def statistics(self) -> dict[str, int]:
        """``records`` now, and other figures."""
        return {"records": len(self)}

    def close(self) -> None:  # noqa: B027
        """End: what was stored stays, if the tier outlives the process."""
