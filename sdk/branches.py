"""A session's tree, of which it is one branch: `chat.tree`, `name`, `prune`; and going back on it: `rewind`."""

from __future__ import annotations

from .connection import Connection
from .frames.verbs import (
    Relative,
    SessionName,
    SessionNamed,
    SessionPrune,
    SessionPruned,
    SessionRewind,
    SessionRewound,
    SessionTree,
    SessionTreeListed,
)

MOST = 1000
"""Sessions of a tree that are asked for at once."""


async def rewind(connection: Connection, to: str | int) -> SessionRewound:
    """Go back to an item, a number of tokens, or the root."""
    sent = await connection.send(SessionRewind(to=to))
    rewound = await connection.answer(sent, lambda event: isinstance(event, SessionRewound))
    assert isinstance(rewound, SessionRewound)
    return rewound


async def tree(connection: Connection) -> list[Relative]:
    """Ask for it, page by page."""
    found: list[Relative] = []
    after: str | None = None
    while True:
        sent = await connection.send(SessionTree(limit=MOST, after=after))
        listed = await connection.answer(sent, lambda event: isinstance(event, SessionTreeListed))
        assert isinstance(listed, SessionTreeListed)
        found += listed.sessions
        if not listed.has_more:
            return found
        after = listed.next


async def name(connection: Connection, name: str) -> None:
    """Name the session."""
    sent = await connection.send(SessionName(name=name))
    await connection.answer(sent, lambda event: isinstance(event, SessionNamed))


async def prune(connection: Connection, session_id: str) -> None:
    """End another one for good."""
    sent = await connection.send(SessionPrune(session=session_id))
    await connection.answer(
        sent, lambda event: isinstance(event, SessionPruned) and event.session == session_id
    )
