"""The eviction order of records on disk: the longest unused of the tenant that holds most, leased ones last.

The rule among tenants is that of `quotas`. Knows keys and tenants.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Container, Iterable, Iterator
from itertools import chain, islice

from ..quotas import by_largest


class RecordEviction:
    """The order in which records on disk are evicted: the keys of all records, by tenant, each tenant's
    longest unused first."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[bytes, None]] = {}
        self._tenants: dict[bytes, int] = {}
        self._leased: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, key: bytes) -> bool:
        return key in self._tenants

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._queues.values())

    def held(self) -> dict[int, int]:
        """The number of records of each tenant."""
        return {tenant: len(queue) for tenant, queue in self._queues.items()}

    def add(self, key: bytes, tenant: int) -> None:
        """Add a record of ``tenant`` that counts as used now: it is evicted after the tenant's others."""
        self.remove(key)
        self._tenants[key] = tenant
        self._queues.setdefault(tenant, OrderedDict())[key] = None

    def remove(self, key: bytes) -> None:
        """Remove a record, if it is there."""
        tenant = self._tenants.pop(key, None)
        if tenant is not None:
            del self._queues[tenant][key]
            if not self._queues[tenant]:
                del self._queues[tenant]

    def move(self, key: bytes, *, last: bool) -> None:
        """Change a record's place among its tenant's: it is evicted after the others if ``last``, else before
        them. Does nothing if the record is not here."""
        tenant = self._tenants.get(key)
        if tenant is not None:
            self._queues[tenant].move_to_end(key, last=last)

    def lease(self, keys: Iterable[bytes], *, on: bool) -> None:
        """With ``on``, note that leases cover these keys: their records, also those that come later, are
        evicted after all others. Without, note that no lease covers them any longer."""
        (self._leased.update if on else self._leased.difference_update)(keys)

    def evicted(self, count: int, coming: Iterable[int], besides: Container[bytes]) -> list[bytes]:
        """Choose ``count`` records to evict, in order (fewer, if there are not so many), to make room for new
        records. ``coming``: the tenants of these, one entry for each. None of ``besides`` is chosen. What is
        chosen stays here until `remove`."""
        held = Counter(self.held()) + Counter(coming)
        first = by_largest(held, {t: self._keys(t, besides, leased=False) for t in self._queues})
        last = by_largest(held, {t: self._keys(t, besides, leased=True) for t in self._queues})
        return list(islice(chain(first, last), count))

    def surplus(self, tenant: int, most: int, coming: int, besides: Collection[bytes] = ()) -> list[bytes]:
        """The records of ``tenant``, which has a cap of ``most`` records, that must go for ``coming`` new
        ones of its own, in eviction order. ``besides``: keys that are removed anyway, and are not chosen."""
        leaving = sum(self._tenants.get(key) == tenant for key in besides)
        staying = len(self._queues.get(tenant, ())) - leaving
        own = (self._keys(tenant, besides, leased=leased) for leased in (False, True))
        return list(islice(chain.from_iterable(own), max(0, staying + coming - most)))

    def _keys(self, tenant: int, besides: Container[bytes], *, leased: bool) -> Iterator[bytes]:
        queue: Iterable[bytes] = self._queues.get(tenant, ())
        return (key for key in queue if key not in besides and (key in self._leased) == leased)
