"""How much of the journal is whose: sessions and bytes of the tenants that have a share of it, no more.

Bytes are those of a session's operations and record; what forks need of one that was forgotten still counts.
Whoever has more than its share loses its own sessions, the longest unused first, as long as one is not open.
Follows what was committed; writes and reads nothing.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice

from ..settings import JournalShare
from .state import SessionState


@dataclass(slots=True)
class _Held:
    """One tenant's: bytes by session, those that are kept in the order of their last use."""

    share: JournalShare
    sizes: dict[int, int] = field(default_factory=dict)
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    bytes: int = 0

    def surplus(self, live: Container[int]) -> Iterator[int]:
        """What must go, if none of it is needed by a fork."""
        sessions, size = len(self.kept), self.bytes
        for number in self.kept:
            if sessions <= self.share.sessions and size <= self.share.bytes:
                return
            if number not in live:
                sessions, size = sessions - 1, size - self.sizes[number]
                yield number


@dataclass(frozen=True, slots=True)
class Born:
    """A session of the tenant ``salt``, whose record takes ``size`` bytes."""

    number: int
    salt: bytes
    size: int


class TenantShares:
    """Of all tenants in ``shares``, by their salt; others are not counted."""

    def __init__(self, shares: Mapping[bytes, JournalShare]) -> None:
        self._held = {salt: _Held(share) for salt, share in shares.items()}
        self._salts: dict[int, bytes] = {}
        self._records: dict[int, int] = {}
        self._changed: set[bytes] = set()
        self._over: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._held)

    def enter(self, born: Iterable[Born]) -> None:
        """These sessions' records were written."""
        for one in born:
            if one.salt in self._held:
                self._salts[one.number], self._records[one.number] = one.salt, one.size

    def used(self, sizes: Mapping[int, int]) -> None:
        """These sessions were written to, and their operations take so many bytes now."""
        for number, size in sizes.items():
            held = self._of(number)
            if held is not None:
                self._resize(held, number, size + self._records[number])
                held.kept[number] = None
                held.kept.move_to_end(number)

    def forgotten(self, number: int, erased: Iterable[int]) -> None:
        """A session is kept no more; of ``erased`` nothing is left."""
        held = self._of(number)
        if held is not None:
            held.kept.pop(number, None)
        for gone in erased:
            if (of_gone := self._of(gone)) is not None:
                self._resize(of_gone, gone, 0)
                del of_gone.sizes[gone], self._salts[gone], self._records[gone]

    def look_again(self, salt: bytes) -> None:
        """A session of this tenant is not open any more."""
        if salt in self._held:
            self._changed.add(salt)

    def surplus(self, live: Container[int], most: int) -> list[int]:
        """The next sessions that tenants with more than their share lose; ask again until there are none."""
        while self._changed:
            salt = next(iter(self._changed))
            if gone := list(islice(self._held[salt].surplus(live), most)):
                return gone
            self._changed.discard(salt)
        return []

    def full(self) -> frozenset[bytes]:
        """Tenants that have more bytes than their share."""
        return frozenset(self._over)

    def statistics(self, salt: bytes) -> dict[str, float]:
        """What the tenant has; nothing of one without a share."""
        held = self._held.get(salt)
        return {} if held is None else {"kept": float(len(held.kept)), "journal": float(held.bytes)}

    def _of(self, number: int) -> _Held | None:
        salt = self._salts.get(number)
        return None if salt is None else self._held[salt]

    def _resize(self, held: _Held, number: int, size: int) -> None:
        held.bytes += size - held.sizes.get(number, 0)
        held.sizes[number] = size
        salt = self._salts[number]
        self._changed.add(salt)
        (self._over.add if held.bytes > held.share.bytes else self._over.discard)(salt)


def surplus(states: Iterable[SessionState], count: int, weigh: Callable[[SessionState], int]) -> list[int]:
    """Up to ``count`` of these sessions to forget.

    Each is taken from the tenant that holds most, by the sum of what ``weigh`` gives: first its forks that were
    never opened, then the session that it used longest ago.
    """
    holds: dict[bytes, int] = defaultdict(int)
    queues: dict[bytes, list[SessionState]] = defaultdict(list)
    if count <= 0:
        return []
    for state in states:
        holds[state.salt] += weigh(state)
        queues[state.salt].append(state)
    for queue in queues.values():
        queue.sort(key=lambda state: (not state.is_unopened_fork, state.used, state.last), reverse=True)
    tenants = [(-holds[salt], salt) for salt in queues]
    heapify(tenants)
    gone: list[int] = []
    while tenants and len(gone) < count:
        held, salt = tenants[0]
        state = queues[salt].pop()
        gone.append(state.number)
        if queues[salt]:
            heapreplace(tenants, (held + weigh(state), salt))
        else:
            heappop(tenants)
    return gone
