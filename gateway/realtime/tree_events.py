"""A session's tree on the wire: who was forked from whom is listed, named, pruned.

Names and what was pruned are answered when the journal has them. Knows frames and one session; who the others
are its keeper knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from ...sdk.frames.client import SessionName, SessionPrune, SessionTree
from ...sdk.frames.server import Relative, ServerEvent, SessionNamed, SessionPruned, SessionTreeListed
from ...sessions.errors import SessionError
from ...sessions.fork_tree import Member, Page
from .conversation import Conversation

TREE_VERBS = (SessionTree, SessionName, SessionPrune)
"""Client events that are served here."""

TreeVerb: TypeAlias = SessionTree | SessionName | SessionPrune


class Keeper(Protocol):
    """Knows all sessions. Its methods raise ``SessionError``; then nothing has changed."""

    async def tree(self, session_id: str, limit: int, after: str | None) -> Page:
        """Some of the session's tree, parents before their children."""

    async def name(self, session_id: str, name: str) -> str:
        """Name the session; the name as it is kept."""

    async def prune(self, session_id: str, target: str) -> None:
        """End and forget another session of its tree, whoever has it."""


class TreeEvents:
    """Those of one session. ``post`` lets events leave once all that was done is in the journal."""

    def __init__(
        self, session_id: str, conversation: Conversation, post: Callable[[Iterable[ServerEvent]], None]
    ) -> None:
        self.keeper: Keeper | None = None
        self._id = session_id
        self._conversation = conversation
        self._post = post

    async def serve(self, event: TreeVerb) -> None:
        """Do what it asks, or refuse it: then nothing has changed."""
        try:
            answer = await self._served(event)
        except SessionError as error:
            answer = self._conversation.refusal(error, event.event_id)
        self._post([answer])

    async def answer_again(self, event: TreeVerb) -> None:
        """The answer to one that was served before; what was pruned is not there to be pruned again."""
        if isinstance(event, SessionPrune):
            self._post([SessionPruned(event_id=self._conversation.event_id(), session=event.session)])
        else:
            await self.serve(event)

    async def _served(self, event: TreeVerb) -> ServerEvent:
        assert self.keeper is not None, "somebody keeps every session that is served"
        match event:
            case SessionTree(limit=limit, after=after):
                page = await self.keeper.tree(self._id, limit, after)
                return SessionTreeListed(
                    event_id=self._conversation.event_id(),
                    sessions=[_relative(member) for member in page.members],
                    has_more=page.after is not None,
                    next=page.after,
                )
            case SessionName(name=name):
                kept = await self.keeper.name(self._id, name)
                return SessionNamed(event_id=self._conversation.event_id(), name=kept)
            case SessionPrune(session=target):
                await self.keeper.prune(self._id, target)
                return SessionPruned(event_id=self._conversation.event_id(), session=target)


def _relative(member: Member) -> Relative:
    return Relative(
        id=member.id,
        parent=member.parent,
        name=member.name,
        open=member.open,
        items=member.items,
        tokens=member.tokens,
    )
