"""A session's tree, of which it is one branch: `chat.tree`, `name`, `prune`; and going back on it: `rewind`."""

from __future__ import annotations

from .connection import Connection
from .frames.client import SessionName, SessionPrune, SessionRewind, SessionTree
from .frames.server import Relative, SessionNamed, SessionPruned, SessionRewound, SessionTreeListed

MOST = 1000
"""Sessions of a tree that are asked for at once."""


async def rewind(connection: Connection, to: str | int) -> SessionRewound:
    """Go back to an item, a number of tokens, or the root."""
    return await connection.request(SessionRewind(to=to), SessionRewound)


async def tree(connection: Connection) -> list[Relative]:
    """Ask for it, page by page."""
    found: list[Relative] = []
    after: str | None = None
    while True:
        listed = await connection.request(SessionTree(limit=MOST, after=after), SessionTreeListed)
        found += listed.sessions
        if not listed.has_more:
            return found
        after = listed.next


async def name(connection: Connection, name: str) -> None:
    """Name the session."""
    await connection.request(SessionName(name=name), SessionNamed)


async def prune(connection: Connection, session_id: str) -> None:
    """End another one for good."""
    prune = SessionPrune(session=session_id)
    await connection.request(prune, SessionPruned, lambda event: event.session == session_id)
