"""Eviction among tenants: the tenant that holds most gives up a record, so that a flood stays within its share.

The rule is max-min fairness, with no number to set. Room is always taken from the largest holder, and the
tenant that asks for room counts as holding what comes. One tenant alone may fill a tier; when a second one
comes, it grows at the cost of the first until both hold as much. No tenant loses a record while another holds
more. Records that a lease covers are evicted after all others. Inside a tenant the order is that of
`eviction`. A tenant is a number; 0 is for records of unknown tenants. Knows no keys, no bytes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import filterfalse, groupby
from typing import TypeVar

from .eviction import EvictionOrder

T = TypeVar("T")

TENANT_BYTES = 8
"""How many bytes of a root make a tenant's number."""


def tenant_of(root: bytes) -> int:
    """The number of the tenant with the key ``root`` before its first block (`BlockHasher.root`); the same
    after a restart."""
    return int.from_bytes(root[:TENANT_BYTES], "little")


def by_largest(held: Mapping[int, int], orders: Mapping[int, Iterator[T]]) -> Iterator[T]:
    """Yield records in eviction order across tenants: always the next of the tenant that then holds most.

    ``held``: how many records each tenant holds at first. ``orders``: each tenant's records, in the order in
    which it gives them up.
    """
    heap = [(-held.get(tenant, 0), tenant) for tenant in orders]
    heapq.heapify(heap)
    while heap:
        count, tenant = heap[0]
        for given in orders[tenant]:
            heapq.heapreplace(heap, (count + 1, tenant))
            yield given
            break
        else:
            heapq.heappop(heap)


class FairOrder:
    """The eviction order of a tier's slots, shared by tenants: the tenant that holds most gives up the next
    slot; within each tenant the order is that of an `EvictionOrder`. ``slots``: how many slots the tier
    has."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._orders: dict[int, EvictionOrder] = {}
        self._tenants: dict[int, int] = {}  # by slot, those that are in no order, too
        self._held: Counter[int] = Counter()
        self._changed: dict[int, None] = {}  # tenants with other records than `foresee` has seen
        self._withdrawn: list[int] = []

    def __len__(self) -> int:
        """How many slots can be evicted."""
        return sum(map(len, self._orders.values()))

    def __contains__(self, slot: int) -> bool:
        tenant = self._tenants.get(slot)
        return tenant is not None and slot in self._orders[tenant]

    def take(self, slot: int, tenant: int) -> None:
        """Note that the slot holds, or is being filled with, a record of ``tenant``: it counts as the
        tenant's. It cannot be evicted before `add`."""
        self._tenants[slot] = tenant
        self._held[tenant] += 1
        if tenant not in self._orders:
            self._orders[tenant] = EvictionOrder(self._slots, self._withdrawn)

    def free(self, slot: int) -> None:
        """Note that the slot is empty, after its record is forgotten: it counts for no tenant any more."""
        tenant = self._tenants.pop(slot)
        self._changed[tenant] = None
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant], self._orders[tenant]

    def lease(self, slot: int, returns: float | None) -> None:
        """Note that a lease covers the record in the slot, which is wanted again at ``returns`` (seconds), so
        that it is evicted late; with None, that no lease covers it any more."""
        self._of(slot).lease(slot, returns)

    def hit(self, slots: Iterable[int]) -> None:
        """Count a hit for the record in each of these slots; more hits give it a higher rank when it is added
        to the order next."""
        for order, those in self._by_tenant(slots):
            order.hit(list(those))

    def forget(self, slot: int) -> None:
        """Take the slot out of the eviction order, and forget the hits and the lease of its record, which is
        gone."""
        order = self._of(slot)
        order.remove(slot)
        order.forget([slot])

    def add(self, slots: Iterable[int]) -> None:
        """Put slots into the eviction order, as used now. ``slots``: the end of a sequence before its
        beginning."""
        for order, those in self._by_tenant(slots):
            order.add(those)

    def put_first(self, slots: Iterable[int]) -> None:
        """Put each of these slots into the eviction order before all others of its tenant. One that a lease
        covers gets its usual position instead."""
        for order, those in self._by_tenant(slots):
            for slot in those:
                order.put_first(slot)

    def remove_each(self, slots: Iterable[int]) -> list[int]:
        """Take many slots out of the eviction order; they still count as their tenants'. Returns those that
        were in."""
        held = filter(self._tenants.__contains__, slots)
        return [slot for order, those in self._by_tenant(held) for slot in filter(order.remove, those)]

    def is_elsewhere(self, slot: int) -> bool:
        """Whether the slot stands among those that `put_first` has put before all others of its tenant."""
        return slot in self._tenants and self._of(slot).is_elsewhere(slot)

    def foresee(self, share: int, most: int, at_once: int) -> tuple[list[int], list[int]]:
        """Foresee which slots each tenant gives up next, once those that are kept elsewhere are gone: one in
        ``share`` of its others, ``most`` at most. Returns those that came and those that are foreseen no
        longer, since the last call; the same slot may be in both. At most about ``at_once`` come: the others
        do so with the next calls. O(changes since the last call).
        """
        came: list[int] = []
        while self._changed and len(came) < at_once:
            tenant = next(iter(self._changed))
            order = self._orders.get(tenant)
            left = at_once - len(came)
            found = [] if order is None else order.foresee(min(most, -(-order.alone // share)), left)
            came += found
            if len(found) < left:
                del self._changed[tenant]
        gone = self._withdrawn[:]
        self._withdrawn.clear()
        return came, gone

    def slots(self, coming: Iterable[int] = (), besides: Container[int] = ()) -> Iterator[int]:
        """All slots that can be evicted, in eviction order, to make room for new records. ``coming``: the
        tenants of these. None of ``besides`` is among them. They stay in the order."""
        held = self._held + Counter(coming)
        for which in (EvictionOrder.unleased, EvictionOrder.leased):
            orders = {tenant: which(order) for tenant, order in self._orders.items()}
            left = {one: filterfalse(besides.__contains__, order) for one, order in orders.items()}
            yield from by_largest(held, left)

    def _by_tenant(self, slots: Iterable[int]) -> Iterator[tuple[EvictionOrder, Iterator[int]]]:
        for tenant, those in groupby(slots, self._tenants.__getitem__):
            self._changed[tenant] = None
            yield self._orders[tenant], those

    def _of(self, slot: int) -> EvictionOrder:
        tenant = self._tenants[slot]
        self._changed[tenant] = None
        return self._orders[tenant]
