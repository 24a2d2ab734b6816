"""What a turn tells while it runs: ``ReplyEvent``, from ``ReplyStarted`` to exactly one ``ReplyDone``.

An item begins with its first ``ReplyTextDelta`` or with ``ReplyCallStarted``, and ends when an event of another
item or ``ReplyDone`` comes; ``ReplyDone.items`` holds precisely the items that began. Knows nothing of
frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from ..errors import TurnFailed
from ..items import Item


class ReplyStatus(StrEnum):
    """How a reply ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


class EndReason(StrEnum):
    """Why, where the status leaves it open."""

    STOP = "stop"
    """The model ended its turn, or a stop string matched."""
    CLIENT_CANCELLED = "client_cancelled"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    """The turn's limit, or the end of the model's context."""
    SERVER_LEAVING = "server_leaving"
    """The server goes away and could not wait any longer."""
    STEERED = "steered"
    """The client said something else meanwhile: the next turn answers that."""
    ERROR = "error"


class MissReason(StrEnum):
    """Why a turn computed more than its truly new tokens."""

    INSTRUCTIONS_CHANGED = "instructions_changed"
    TOOLS_CHANGED = "tools_changed"
    HISTORY_EDITED = "history_edited"
    OVERRIDDEN = "overridden"
    """Instructions, tools or input were given for this turn alone."""
    ENGINE_RESTARTED = "engine_restarted"
    EVICTED = "evicted"
    INPUT_RETRACTED = "input_retracted"
    """Text was computed while it came, and taken back."""
    CHEAPER_TO_COMPUTE = "cheaper_to_compute"
    """A tier below held it; by what was measured here computing it took less time than bringing it up."""


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """What a turn cost, in tokens.

    ``input_tokens``: the whole prompt; ``cached_tokens``: of these, found computed; ``new_tokens``: truly
    new, that is appended + written by the template + the pending last token of the reply before;
    ``prefilled_tokens``: computed for the first time; ``recomputed_tokens``: again after a preemption;
    ``host_tokens``, ``disk_tokens``: of the cached ones, brought up from that tier; ``restore_ms``:
    milliseconds it waited for the disk.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    restore_ms: float = 0.0
    miss_reason: MissReason | None = None


@dataclass(frozen=True, slots=True)
class ReplyStarted:
    """The prompt is fit to run; ``input_tokens`` is its length."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of the reply and its log probability; ``top``: the likeliest in its place, the best first.

    ``text`` is what the token alone decodes to: U+FFFD where it is a piece of a character.
    """

    token: int
    text: str
    logprob: float
    top: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyTextDelta:
    """More text of the message ``item_id``; never empty, always whole characters.

    ``scores``, where they were asked for, are of the tokens read since the message's last delta.
    """

    item_id: str
    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyReasoningDelta:
    """More of what the model thinks before it speaks; it is part of no item."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyCallStarted:
    """The model calls a tool."""

    item_id: str
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ReplyArgumentsDelta:
    """More of a call's arguments: JSON text."""

    item_id: str
    call_id: str
    delta: str


@dataclass(frozen=True, slots=True)
class ReplyCallDone:
    """A call ended. Not ``complete``: it was cut or broke, ``arguments`` is a prefix; do not run it."""

    item_id: str
    call_id: str
    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """The turn ended. ``items`` are now part of the conversation, unless it failed or was out-of-band.

    On ``failed`` the turn was rolled back: ``items`` are those that had begun, not complete, to close
    them on the wire, and ``error`` says what went wrong.
    """

    status: ReplyStatus
    reason: EndReason
    items: tuple[Item, ...]
    usage: TurnUsage
    error: TurnFailed | None = None


ReplyEvent: TypeAlias = (
    ReplyStarted
    | ReplyReasoningDelta
    | ReplyTextDelta
    | ReplyCallStarted
    | ReplyArgumentsDelta
    | ReplyCallDone
    | ReplyDone
)
