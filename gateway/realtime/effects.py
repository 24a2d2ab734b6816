"""What a client event asks of whoever owns the loop, as plain data. Knows nothing of how it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...sdk.frames import client, server
from ...sessions.items import Growing
from ...sessions.turn.request import TurnRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Let this event leave."""

    event: server.ServerEvent


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Run this turn; report what it tells under `response_id`."""

    response_id: str
    request: TurnRequest


@dataclass(frozen=True, slots=True)
class CancelResponse:
    """Cut this response short; its end is reported like any other."""

    response_id: str


@dataclass(frozen=True, slots=True)
class Expect:
    """So much of the next item has come; None: nothing is on its way any more."""

    item: Growing | None


@dataclass(frozen=True, slots=True)
class CountArrival:
    """The text is this item now: let `committed` tell how much was prefilled, and then that it is there."""

    added: tuple[Send, ...]
    item: Growing


@dataclass(frozen=True, slots=True)
class MoveKV:
    """Do with the session's KV what the event asks, beside all else; what came of it goes to `kept`."""

    event: KeepingEvent


KeepingEvent: TypeAlias = client.SessionLease | client.SessionStage | client.SessionSettle
Effect: TypeAlias = Send | StartResponse | CancelResponse | Expect | CountArrival | MoveKV
