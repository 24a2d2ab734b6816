"""A session's tree, of which it is one branch: `chat.tree`, `name`, `prune`; and going back on it: `rewind`."""

from __future__ import annotations

from .connection import Exchange
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


async def rewind(exchange: Exchange, to: str | int) -> SessionRewound:
    """Go back to an item, a number of tokens, or the root."""
    sent = await exchange.send(SessionRewind(to=to))
    rewound = await exchange.answer(sent, lambda event: isinstance(event, SessionRewound))
    assert isinstance(rewound, SessionRewound)
    return rewound


async def tree(exchange: Exchange) -> list[Relative]:
    """Ask for it, page by page."""
    found: list[Relative] = []
    after: str | None = None
    while True:
        sent = await exchange.send(SessionTree(limit=MOST, after=after))
        listed = await exchange.answer(sent, lambda event: isinstance(event, SessionTreeListed))
        assert isinstance(listed, SessionTreeListed)
        found += listed.sessions
        if not listed.has_more:
            return found
        after = listed.next


async def name(exchange: Exchange, name: str) -> None:
    """Name the session."""
    sent = await exchange.send(SessionName(name=name))
    await exchange.answer(sent, lambda event: isinstance(event, SessionNamed))


async def prune(exchange: Exchange, session_id: str) -> None:
    """End another one for good."""
    sent = await exchange.send(SessionPrune(session=session_id))
    await exchange.answer(
        sent, lambda event: isinstance(event, SessionPruned) and event.session == session_id
    )
