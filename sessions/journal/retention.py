"""Retention: which sessions are forgotten when the journal, or a tenant's share of it, has too many.

A tenant beyond its share loses its own sessions, the longest unused first, but none that is open. Its bytes are
those of its sessions' operations and records; what forks need of a forgotten session still counts. Writes and
reads nothing: the store tells it what was committed.
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
class _TenantHolding:
    """One tenant's share and what it holds: bytes by session; kept sessions, the longest unused first."""

    share: JournalShare
    sizes: dict[int, int] = field(default_factory=dict)
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    bytes: int = 0

    def surplus(self, live: Container[int]) -> Iterator[int]:
        """The sessions to forget, if no fork needs them."""
        sessions, size = len(self.kept), self.bytes
        for number in self.kept:
            if sessions <= self.share.sessions and size <= self.share.bytes:
                return
            if number not in live:
                sessions, size = sessions - 1, size - self.sizes[number]
                yield number


class TenantShares:
    """The tenants that have a share of the journal, by salt; others are not counted."""

    def __init__(self, shares: Mapping[bytes, JournalShare]) -> None:
        self._held = {salt: _TenantHolding(share) for salt, share in shares.items()}
        self._changed: set[bytes] = set()
        self._over: set[bytes] = set()

    def count(self, state: SessionState, size: int) -> None:
        """A session was written to, or forgotten: its records take ``size`` bytes now."""
        held = self._held.get(state.salt)
        if held is None:
            return
        held.bytes += size - held.sizes.pop(state.number, 0)
        if size:
            held.sizes[state.number] = size
        held.kept.pop(state.number, None)
        if state.kept:
            held.kept[state.number] = None
        self._changed.add(state.salt)
        (self._over.add if held.bytes > held.share.bytes else self._over.discard)(state.salt)

    def look_again(self, salt: bytes) -> None:
        """A session of this tenant was closed, and may be forgotten now."""
        if salt in self._held:
            self._changed.add(salt)

    def surplus(self, live: Container[int], most: int) -> list[int]:
        """The next sessions, at most ``most``, that a tenant beyond its share loses; call again until empty."""
        while self._changed:
            salt = next(iter(self._changed))
            if gone := list(islice(self._held[salt].surplus(live), most)):
                return gone
            self._changed.discard(salt)
        return []

    def full(self) -> frozenset[bytes]:
        """The tenants with more bytes than their share."""
        return frozenset(self._over)

    def statistics(self, salt: bytes) -> dict[str, float]:
        """A tenant's kept sessions and bytes; empty if it has no share."""
        held = self._held.get(salt)
        return {} if held is None else {"kept": float(len(held.kept)), "journal": float(held.bytes)}


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
