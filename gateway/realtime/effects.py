"""What the caller of `Conversation.receive` has to do for a client event: its effects, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...sdk.frames import server
from ...sessions.items import Growing
from ...sessions.turn.request import TurnRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``event`` to the client."""

    event: server.ServerEvent


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Begin the turn ``request``. Give its events to `Conversation.reply` with this ``response_id``."""

    response_id: str
    request: TurnRequest


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Cancel a running response. What it said so far stays, and it ends with `response.done` as usual."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PrefillText:
    """Prefill ``item``, the next item with the text that the client has streamed in so far, in place of what
    was asked for before. None: prefill nothing more, because the text was cleared or committed."""

    item: Growing | None


@dataclass(frozen=True, slots=True)
class TellCommitted:
    """The client's streamed text is in the history now, as ``item``. Ask how many of its tokens are prefilled,
    send `input_text_buffer.committed` with the answer, and then the events ``added``, which show the item."""

    added: tuple[Send, ...]
    item: Growing


Effect: TypeAlias = Send | StartResponse | CancelResponse | PrefillText | TellCommitted
