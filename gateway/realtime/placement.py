"""Leases, stages and settles of a session: asked of the engine beside all that is said meanwhile.

Each is answered when the engine has answered; nothing of it is kept in the journal. Knows one session and its
feed; nothing of sockets.
"""

from __future__ import annotations

import asyncio
import logging

from ...sdk.frames import client
from ...sdk.frames.server import ServerEvent
from ...sessions.session import Session
from ..errors import INTERNAL, TooManyMoves, wire_error
from .conversation import Conversation
from .effects import KeepingEvent
from .event_log import NEWS, EventLog

log = logging.getLogger(__name__)


class Moves:
    """Those of one session, at most ``most`` on their way: an engine may be long over each."""

    def __init__(self, session: Session, conversation: Conversation, feed: EventLog, most: int) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._session = session
        self._conversation = conversation
        self._event_log = feed
        self._most = most

    def begin(self, event: KeepingEvent) -> None:
        """Ask, and answer when there is an answer; or refuse at once."""
        if len(self.tasks) >= self._most:
            many = TooManyMoves(f"At most {self._most} leases, stages and settles are on their way at once")
            self._event_log.post([self._conversation.refusal(many, event.event_id)])
            return
        task = asyncio.create_task(self._move(event))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _move(self, event: KeepingEvent) -> None:
        try:
            answer = await self._asked(event)
        except Exception as error:  # whatever it is, it ends this event and no more
            if wire_error(error) is INTERNAL:
                log.exception("%s failed", event.type)
            answer = self._conversation.refusal(error, event.event_id)
        self._event_log.post([answer], NEWS)

    async def _asked(self, event: KeepingEvent) -> ServerEvent:
        placement = self._session.placement
        match event:
            case client.SessionLease(priority=priority, ttl=ttl, returns_in=returns_in):
                return self._conversation.kept(event, await placement.lease(priority, ttl, returns_in))
            case client.SessionStage():
                return self._conversation.kept(event, await placement.stage())
            case client.SessionSettle(tier=tier):
                return self._conversation.kept(event, await placement.settle(disk=tier == "disk"))
