"""The verbs of a session on the wire: cut a reply where it was heard, go back.

Each is answered when the journal has it. Knows frames and one session; nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from ...sdk.errors import FieldMissing, FieldUnsupported, FrameError
from ...sdk.frames.client import ItemTruncate, SessionRewind
from ...sdk.frames.server import ItemTruncated, ServerEvent, SessionRewound
from ...sessions.errors import CutInvalid, SessionError
from ...sessions.items import Message
from ...sessions.session import Session
from ..errors import GatewayError
from .conversation import Conversation

VERBS = (ItemTruncate, SessionRewind)
"""Client events that are served here."""

Verb: TypeAlias = ItemTruncate | SessionRewind


class Verbs:
    """Those of one session. ``post`` lets events leave once all that was done is in the journal."""

    def __init__(
        self, session: Session, conversation: Conversation, post: Callable[[Iterable[ServerEvent]], None]
    ) -> None:
        self._session = session
        self._conversation = conversation
        self._post = post
        self._cuts: dict[str, list[ItemTruncate]] = {}  # by the response that has to end first

    async def serve(self, event: Verb) -> None:
        """Do what it asks, or refuse it: then nothing has changed."""
        try:
            match event:
                case ItemTruncate():
                    await self._truncate(event)
                case SessionRewind(to=to):
                    self._session.rewind(to)
                    self._post([self._rewound()])
        except (SessionError, FrameError, GatewayError) as error:
            self._post([self._conversation.refusal(error, event.event_id)])

    def answer_again(self, event: Verb) -> None:
        """The answer to one that was served before the session was opened again; it changes nothing."""
        match event:
            case ItemTruncate(item_id=item_id):
                response = self._session.saying(item_id)
                if response is None:
                    self._post([self._truncated(event)])
                else:
                    self._cuts.setdefault(response.id, []).append(event)
            case SessionRewind():
                self._post([self._rewound()])

    def ended(self, response_id: str) -> None:
        """A response is over: what had to wait for that is done."""
        self._post([self._truncated(event) for event in self._cuts.pop(response_id, [])])

    async def _truncate(self, event: ItemTruncate) -> None:
        response = self._session.cut(event.item_id, _end_of(event))
        if response is None:
            self._post([self._truncated(event)])
            return
        self._cuts.setdefault(response.id, []).append(event)
        await response.cancel()

    def _truncated(self, event: ItemTruncate) -> ServerEvent:
        try:
            item = self._session.history.get(event.item_id)
        except SessionError as error:  # its reply failed, and was rolled back
            return self._conversation.refusal(error, event.event_id)
        return ItemTruncated(
            event_id=self._conversation.event_id(),
            item_id=item.id,
            content_index=event.content_index,
            audio_end_ms=event.audio_end_ms or 0,
            text_end=len(item.text) if isinstance(item, Message) else 0,
        )

    def _rewound(self) -> SessionRewound:
        history = self._session.history
        items, head = history.items(), history.tree.head
        return SessionRewound(
            event_id=self._conversation.event_id(),
            item_id=items[-1].id if items else None,
            tokens=0 if head is None else head.length,
        )


def _end_of(event: ItemTruncate) -> int:
    """Where the message is to end, in characters. Raises a ``FrameError``, or ``CutInvalid``."""
    if event.content_index != 0:
        raise CutInvalid("A message has one part, with the index 0", param="content_index")
    if event.text_end is not None:
        return event.text_end
    if event.audio_end_ms is None:
        raise FieldMissing("Missing required parameter: 'text_end'", "text_end", event.event_id)
    if event.timing is None:
        raise FieldUnsupported(
            "`audio_end_ms` means nothing here without `timing`: send `text_end`",
            "audio_end_ms",
            event.event_id,
        )
    return max((heard.text_end for heard in event.timing if heard.ms <= event.audio_end_ms), default=0)
