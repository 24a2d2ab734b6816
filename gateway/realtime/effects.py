"""What the caller of `Conversation.receive` has to do for a client event: its effects, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...sdk.frames import server
from ...sessions.conversation.items import Growing
from ...sessions.turn.request import TurnRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``event`` to the client. ``refused``: the error because of which it refuses a client event; None: it
    refuses none."""

    event: server.ServerEvent
    refused: Exception | None = None


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Run the turn ``request``, and pass its events to `Conversation.reply` with this ``response_id``."""

    response_id: str
    request: TurnRequest


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Cancel a running response. What it said so far stays, and it ends with `response.done` as usual."""

    response_id: str


@dataclass(frozen=True, slots=True)
class PrefillText:
    """Prefill ``item``, which has the text that the client has streamed in so far, as the next item of the
    prompt, in place of the item of the last such effect. None: prefill no such text any more, because it was
    cleared or committed."""

    item: Growing | None


@dataclass(frozen=True, slots=True)
class TellCommitted:
    """The client's streamed text is in the history now, as ``item``. Find out how many of its tokens are
    prefilled, send `input_text_buffer.committed` with that number, and then the events ``added``, which show
    the item."""

    added: tuple[Send, ...]
    item: Growing


Effect: TypeAlias = Send | StartResponse | CancelResponse | PrefillText | TellCommitted
