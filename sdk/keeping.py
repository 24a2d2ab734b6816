"""Where a session's KV is to be while nobody speaks: `chat.lease`, `chat.stage`, `chat.settle`.

None of them changes what is said; they may be sent at any time, and are answered while replies run.
"""

from __future__ import annotations

from typing import Literal

from .connection import Connection
from .frames.client import SessionLease, SessionSettle, SessionStage
from .frames.server import SessionLeased, SessionSettled, SessionStaged


async def lease(
    connection: Connection, priority: int | None, ttl: float | None, returns_in: float | None
) -> SessionLeased:
    """Ask for a lease; the receipt."""
    sent = await connection.send(SessionLease(priority=priority, ttl=ttl, returns_in=returns_in))
    leased = await connection.answer(sent, lambda event: isinstance(event, SessionLeased))
    assert isinstance(leased, SessionLeased)
    return leased


async def stage(connection: Connection) -> SessionStaged:
    """Bring KV up; where it came from."""
    sent = await connection.send(SessionStage())
    staged = await connection.answer(sent, lambda event: isinstance(event, SessionStaged))
    assert isinstance(staged, SessionStaged)
    return staged


async def settle(connection: Connection, tier: Literal["host", "disk"]) -> SessionSettled:
    """Send KV down; where it is."""
    sent = await connection.send(SessionSettle(tier=tier))
    settled = await connection.answer(sent, lambda event: isinstance(event, SessionSettled))
    assert isinstance(settled, SessionSettled)
    return settled
