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
    event = SessionLease(priority=priority, ttl=ttl, returns_in=returns_in)
    return await connection.request(event, SessionLeased)


async def stage(connection: Connection) -> SessionStaged:
    """Bring KV up; where it came from."""
    return await connection.request(SessionStage(), SessionStaged)


async def settle(connection: Connection, tier: Literal["host", "disk"]) -> SessionSettled:
    """Send KV down; where it is."""
    return await connection.request(SessionSettle(tier=tier), SessionSettled)
