"""What one tenant has of the book: sessions that are open, and replies that run, each up to its limit.

Counts; opens and ends nothing itself. Knows tenants by their salt alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from .errors import SessionLimit, TurnLimit
from .settings import TenantLimits


class Running(Protocol):
    """A reply, as far as it counts."""

    @property
    def over(self) -> bool:
        """Whether it runs no more."""


class Tenant:
    """One tenant's sessions and replies."""

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.sessions = 0
        """Open now."""
        self._running: list[Running] = []

    @property
    def turns(self) -> int:
        """Replies that run."""
        self._running = [reply for reply in self._running if not reply.over]
        return len(self._running)

    def check_sessions(self, more: int) -> None:
        """Raises ``SessionLimit`` where ``more`` cannot be opened."""
        most = self.limits.sessions
        if most is not None and self.sessions + more > most:
            raise SessionLimit(f"This tenant has {self.sessions} sessions open, and may have {most}")

    def check_turns(self) -> None:
        """Raises ``TurnLimit`` where no further reply may run."""
        most = self.limits.turns
        if most is not None and self.turns >= most:
            raise TurnLimit(f"This tenant has {most} replies running, as many as it may")

    def began(self, reply: Running) -> None:
        """One more runs, until it is ``over`` or was `left`."""
        self._running = [*(one for one in self._running if not one.over), reply]

    def left(self, replies: Iterable[Running]) -> None:
        """Nobody reads these any more: their session is closed."""
        gone = set(map(id, replies))
        self._running = [reply for reply in self._running if id(reply) not in gone]


class Tenants:
    """All tenants that have opened sessions, by their salt."""

    def __init__(self, limits: Mapping[bytes, TenantLimits]) -> None:
        self._limits = limits
        self._tenants: dict[bytes, Tenant] = {}

    def change(self, limits: Mapping[bytes, TenantLimits]) -> None:
        """From now on these hold."""
        self._limits = limits
        for salt, tenant in self._tenants.items():
            tenant.limits = limits.get(salt, TenantLimits())

    def __getitem__(self, salt: bytes) -> Tenant:
        if salt not in self._tenants:
            self._tenants[salt] = Tenant(self._limits.get(salt, TenantLimits()))
        return self._tenants[salt]
