"""Limits of tenants: how many sessions each has open and how many replies it runs.

A tenant's limit is also its reservation: so many places are set aside for it. Of the rest, half of an equal
part is set aside for each known tenant without a limit; what is left goes to the first to ask. When all places
are taken, the tenant that holds most gives some up (max-min fairness, as with records of KV in `kvstore`). This
module counts; it opens and closes nothing. A tenant is known by its salt alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

from .errors import SessionLimit, TurnLimit
from .settings import TenantLimits
from .workers import Workers, WorkerSlot

_Idle = TypeVar("_Idle")


class Tenant:
    """One tenant's open sessions and running replies, and its slot at the worker threads."""

    def __init__(self, limits: TenantLimits, slot: WorkerSlot | None = None) -> None:
        self.limits = limits
        self.slot = slot or WorkerSlot(Workers())
        self.sessions = 0
        """Sessions open now."""
        self._running: set[object] = set()

    @property
    def turns(self) -> int:
        """Replies that run now."""
        return len(self._running)

    def check_sessions(self, more: int) -> None:
        """Raises ``SessionLimit`` if ``more`` sessions exceed the tenant's limit."""
        most = self.limits.sessions
        if most is not None and self.sessions + more > most:
            raise SessionLimit(f"This tenant has {self.sessions} sessions open, and may have {most}")

    def check_turns(self) -> None:
        """Raises ``TurnLimit`` if as many replies run as this tenant may have at once."""
        most = self.limits.turns
        if most is not None and self.turns >= most:
            raise TurnLimit(f"This tenant has {most} replies running, as many as it may")

    def began(self, reply: object) -> None:
        """Count a reply that begins, until `left` is called for it."""
        self._running.add(reply)

    def left(self, replies: Iterable[object]) -> None:
        """Do not count these replies any more: they are over, or the session that they ran in is closed."""
        self._running.difference_update(replies)


class OpenTenants:
    """All tenants that have opened sessions, by salt. ``places``: how many sessions they may all have open
    together. ``limits``: those of the known tenants, by salt; a known tenant may have no limit. ``workers``:
    threads on which each tenant gets a slot."""

    def __init__(self, limits: Mapping[bytes, TenantLimits], places: int, workers: Workers) -> None:
        self._limits = limits
        self._workers = workers
        self._places = places
        self._tenants: dict[bytes, Tenant] = {}
        self._open = 0
        self._set_aside()

    def change(self, limits: Mapping[bytes, TenantLimits]) -> None:
        """Replace the limits, and with them the places set aside. Open sessions stay open."""
        self._limits = limits
        for salt, tenant in self._tenants.items():
            tenant.limits = limits.get(salt, TenantLimits())
        self._set_aside()

    def __getitem__(self, salt: bytes) -> Tenant:
        if salt not in self._tenants:
            self._tenants[salt] = Tenant(self._limits.get(salt, TenantLimits()), WorkerSlot(self._workers))
        return self._tenants[salt]

    def enter(self, salt: bytes) -> None:
        """Count one more open session of the tenant with this ``salt``. The caller has checked the limits by
        `check`."""
        self._change(salt, 1)

    def leave(self, salt: bytes) -> None:
        """Count one open session less of the tenant with this ``salt``."""
        self._change(salt, -1)

    def check(self, salt: bytes, more: int = 1) -> None:
        """Raises ``SessionLimit`` if this tenant cannot open ``more`` sessions now."""
        self[salt].check_sessions(more)
        if self._lack(salt, more) > 0:
            raise self._full()

    def room(self, salt: bytes, more: int, idle: Mapping[bytes, Iterable[_Idle]]) -> list[_Idle]:
        """Choose idle sessions to close, so that the tenant with this ``salt`` can open ``more``. Returns them.

        ``idle``: by tenant's salt, the sessions that may be closed, the first to be closed first. Beyond its
        own limit the tenant loses sessions of its own. For places that are lacking still, the tenant with most
        open sessions loses one, again and again. This tenant counts as if it had the new ones; another one must
        hold more than it, and keeps what is set aside for it. Raises ``SessionLimit`` if that is not enough.
        """
        left = {tenant: iter(sessions) for tenant, sessions in idle.items()}
        holds = {tenant: self[tenant].sessions for tenant in left}
        holds[salt] = self[salt].sessions + more
        given: list[_Idle] = []
        most = self[salt].limits.sessions
        lack = self._lack(salt, more)
        if most is not None:
            own = holds[salt] - most
            given += _first(left.get(salt, iter(())), own)
            if len(given) < own:
                self[salt].check_sessions(more)
            lack -= len(given)
        givers = [(-held, tenant) for tenant, held in holds.items() if tenant in left]
        heapq.heapify(givers)
        while lack > 0:
            held, tenant = givers[0] if givers else (0, salt)
            if not givers or (tenant != salt and -held <= holds[salt]):
                raise self._full()
            one = _first(left[tenant], 1) if -held > self._aside(tenant) else []
            if one:
                given += one
                lack -= 1
                heapq.heapreplace(givers, (held + 1, tenant))
                holds[tenant] -= 1
            else:
                heapq.heappop(givers)
        return given

    def _set_aside(self) -> None:
        """Compute from the limits how many places are set aside for each known tenant without a limit
        (`_floor`), and how many places are taken in all: set aside, or in use beyond that (`_taken`)."""
        promised = sum(one.sessions or 0 for one in self._limits.values())
        free = sum(one.sessions is None for one in self._limits.values())
        self._floor = max(0, self._places - promised) // (2 * free) if free else 0
        known = {*self._limits, *self._tenants}
        self._taken = sum(max(self._aside(salt), self[salt].sessions) for salt in known)

    def _full(self) -> SessionLimit:
        return SessionLimit(f"{self._places} sessions are open, or set aside for other tenants")

    def _lack(self, salt: bytes, more: int) -> int:
        """How many places are missing for ``more`` sessions of this tenant; 0 or less if there is room."""
        held, aside = self[salt].sessions, self._aside(salt)
        grown = max(aside, held + more) - max(aside, held)
        beyond = self._taken + grown - self._places if grown else 0
        return max(self._open + more - self._places, beyond)

    def _aside(self, salt: bytes) -> int:
        """How many places are set aside for this tenant, used or not: its limit; an equal part if it is known
        and has no limit; 0 if it is not known."""
        limits = self._limits.get(salt)
        if limits is None:
            return 0
        return self._floor if limits.sessions is None else limits.sessions

    def _change(self, salt: bytes, by: int) -> None:
        tenant, aside = self[salt], self._aside(salt)
        before = max(aside, tenant.sessions)
        tenant.sessions += by
        self._open += by
        self._taken += max(aside, tenant.sessions) - before


def _first(queue: Iterator[_Idle], count: int) -> list[_Idle]:
    return list(islice(queue, max(0, count)))
