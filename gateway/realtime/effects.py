"""What a client event asks of the session, as plain data. `Conversation.receive` returns these effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...sdk.frames import server
from ...sessions.items import Growing
from ...sessions.turn.request import TurnRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Send this event to the client."""

    event: server.ServerEvent


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Run this turn; give what it tells to `Conversation.reply` under `response_id`."""

    response_id: str
    request: TurnRequest


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Cut this response short. It still ends with its last event."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PrefillText:
    """Prefill what has come of the next item. None: the text was taken back."""

    item: Growing | None


@dataclass(frozen=True, slots=True)
class TellCommitted:
    """The text became this item: tell how much of it was prefilled, and then send what was ``added``."""

    added: tuple[Send, ...]
    item: Growing


Effect: TypeAlias = Send | StartResponse | CancelResponse | PrefillText | TellCommitted
