"""The eviction order of records on disk: the longest unused of the tenant that holds most, leased ones last.

The rule among tenants is that of `quotas`. Knows keys and tenants.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Iterable, Mapping
from itertools import chain, filterfalse, islice

from ..quotas import by_largest


class RecordEviction:
    """The order in which records on disk are evicted: the keys of all records, by tenant, each tenant's
    longest unused first, and behind those the ones that leases cover."""

    def __init__(self) -> None:
        self._free: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._covered: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._tenants: dict[bytes, int] = {}
        self._leased: set[bytes] = set()  # keys that leases cover, also of records that are not here

    def held(self) -> Counter[int]:
        """The number of records of each tenant."""
        free, covered = ({t: len(queue) for t, queue in one.items()} for one in (self._free, self._covered))
        return Counter(free) + Counter(covered)

    def add(self, key: bytes, tenant: int) -> None:
        """Add a record of ``tenant`` that counts as used now: it is evicted after the tenant's others."""
        self.remove(key)
        self._tenants[key] = tenant
        self._queue_of(key)[tenant][key] = None

    def remove(self, key: bytes) -> None:
        """Remove a record, if it is there."""
        tenant = self._tenants.pop(key, None)
        if tenant is not None:
            del self._queue_of(key)[tenant][key]

    def move(self, key: bytes, *, last: bool) -> None:
        """Change a record's position among its tenant's: it is evicted after the others if ``last``, else
        before them. Does nothing if the record is not here."""
        tenant = self._tenants.get(key)
        if tenant is not None:
            self._queue_of(key)[tenant].move_to_end(key, last=last)

    def lease(self, keys: Iterable[bytes], *, on: bool) -> None:
        """With ``on``, note that leases cover these keys: their records, also those that come later, are
        evicted after all others. Without, note that no lease covers them any longer: they have waited long,
        and are the first of their tenants' to be evicted."""
        for key in keys:
            tenant = self._tenants.get(key)
            self.remove(key)
            (self._leased.add if on else self._leased.discard)(key)
            if tenant is not None:
                self.add(key, tenant)
                self.move(key, last=on)

    def evicted(self, count: int, coming: Mapping[int, int], besides: Container[bytes]) -> list[bytes]:
        """Choose ``count`` records to evict, in order (fewer, if there are not so many), to make room for new
        records. ``coming``: how many of these each tenant has. None of ``besides`` is chosen. What is chosen
        stays here until `remove`."""
        held, found = self.held() + Counter(coming), list[bytes]()
        for queues in (self._free, self._covered):
            left = {t: filterfalse(besides.__contains__, queue) for t, queue in queues.items()}
            found += islice(by_largest(held, left), count - len(found))
        return found

    def surplus(self, tenant: int, most: int) -> list[bytes]:
        """The records of ``tenant`` beyond ``most`` of them, in eviction order."""
        own = chain(self._free[tenant], self._covered[tenant])
        return list(islice(own, max(0, self.held()[tenant] - most)))

    def _queue_of(self, key: bytes) -> defaultdict[int, OrderedDict[bytes, None]]:
        """The queues, by tenant, in one of which the record stands."""
        return self._covered if key in self._leased else self._free
