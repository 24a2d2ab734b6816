"""The events of a turn: ``ReplyEvent``, from ``ReplyStarted`` to exactly one ``ReplyDone``.

An item begins with its first ``ReplyTextDelta`` or with ``ReplyCallStarted``. It ends when an event of another
item or ``ReplyDone`` comes. ``ReplyDone.items`` holds exactly the items that began.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec

from ..conversation.items import Item
from ..errors import TurnFailed


class ReplyStatus(StrEnum):
    """How a reply ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


class EndReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    """The model ended its turn, or a stop string matched."""
    CLIENT_CANCELLED = "client_cancelled"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    """The reply reached the turn's limit of tokens, or the end of the model's context."""
    REPETITION = "repetition"
    """The model repeated the same tokens again and again, so the reply was ended."""
    SERVER_LEAVING = "server_leaving"
    """The server shuts down and could not wait any longer."""
    STEERED = "steered"
    """The client added input during the reply, which was ended; the next turn answers the input."""
    ERROR = "error"

    @property
    def status(self) -> ReplyStatus:
        """How a reply ended that ended for this reason."""
        return _STATUSES.get(self, ReplyStatus.INCOMPLETE)


_STATUSES = {
    EndReason.STOP: ReplyStatus.COMPLETED,
    EndReason.CLIENT_CANCELLED: ReplyStatus.CANCELLED,
    EndReason.ERROR: ReplyStatus.FAILED,
}
"""The statuses that are not ``INCOMPLETE``, by the reason."""


class MissReason(StrEnum):
    """Why a turn computed more tokens than its new ones, or why that is not known."""

    INSTRUCTIONS_CHANGED = "instructions_changed"
    TOOLS_CHANGED = "tools_changed"
    HISTORY_EDITED = "history_edited"
    OVERRIDDEN = "overridden"
    """Instructions, tools or input were given for this turn alone."""
    ENGINE_RESTARTED = "engine_restarted"
    EVICTED = "evicted"
    INPUT_RETRACTED = "input_retracted"
    """Streamed input was prefilled and then taken back."""
    CONTEXT_TRUNCATED = "context_truncated"
    """Older turns were left out of the context, so what stays was computed again behind the instructions."""
    CHEAPER_TO_COMPUTE = "cheaper_to_compute"
    """The KV was on the host or disk tier, but by measured costs computing it again was faster than a
    restore."""
    UNREPORTED = "unreported"
    """The turn ended before the engine reported its work, and more than the new tokens may have been computed.
    The counts of cached, restored and computed tokens are 0: they are not known."""


class TurnUsage(msgspec.Struct, frozen=True):
    """What a turn cost, in tokens.

    ``input_tokens``: the whole prompt. ``cached_tokens``: the part of it that had KV already; ``host_tokens``
    and ``disk_tokens``: the parts of that which were restored from the host or disk tier. ``new_tokens``: the
    part that no turn had computed before: new items, text that the template writes, and the last token of the
    reply before, which has no KV. ``prefilled_tokens``: computed for the first time; streamed input that was
    taken back counts, too. ``recomputed_tokens``: computed again, for example after a preemption.
    ``restore_ms``: how long the turn waited for the disk, in milliseconds.
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
class LeftOut:
    """What was left out of a turn's prompt, because the context was full.

    ``items``: ids of the items, in order. ``tokens``: how many tokens that saved; a lower bound if the whole
    prompt was too long to be counted.
    """

    items: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class ReplyStarted:
    """The prompt was accepted; ``input_tokens`` is its length."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of the reply, or of the prompt, and its log probability. ``text``: what the token decodes to
    alone; a part of a character is U+FFFD. ``top``: the most likely tokens at its position, best first.
    ``split``: of a token that is no whole characters, its bytes, if the vocabulary tells them."""

    token: int
    text: str
    logprob: float
    top: tuple[TokenScore, ...] = ()
    split: bytes = b""

    @property
    def spelled(self) -> bytes:
        """The bytes that the token stands for, in UTF-8; none if they are not known."""
        return self.split or (b"" if "\ufffd" in self.text else self.text.encode())


@dataclass(frozen=True, slots=True)
class ReplyPromptScores:
    """The scores of the prompt's tokens behind the first one, before any output, if they were requested.
    ``first``: the text of the first token."""

    first: str
    scores: tuple[TokenScore, ...]


class ReplyTextDelta(msgspec.Struct, frozen=True, gc=False):
    """More text of the message ``item_id``; never empty, always whole characters. One is made for each token,
    so the garbage collector does not track it.

    ``scores``: if requested, the scores of the tokens since the message's last delta.
    """

    item_id: str
    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyReasoningDelta:
    """More reasoning before the answer. It is not part of an item."""

    text: str


@dataclass(frozen=True, slots=True)
class ReplyCallStarted:
    """The model begins a tool call."""

    item_id: str
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ReplyArgumentsDelta:
    """More of a tool call's arguments: JSON text."""

    item_id: str
    call_id: str
    delta: str


@dataclass(frozen=True, slots=True)
class ReplyCallDone:
    """A tool call ended. If not ``complete``, ``arguments`` are cut off or broken: do not run it."""

    item_id: str
    call_id: str
    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """The turn ended. ``items`` are now part of the conversation, unless the turn failed or was out of band.

    If it failed, the turn was rolled back. Then ``items`` are those that had begun, so that a client can close
    them, and ``error`` says what went wrong. ``left_out``: what later turns leave out since this turn. If the
    turn was out of band or overrode the conversation, only this turn left it out. ``stopped_by``: the stop
    string that ended the reply; it is not part of the text.
    """

    status: ReplyStatus
    reason: EndReason
    items: tuple[Item, ...]
    usage: TurnUsage
    error: TurnFailed | None = None
    left_out: LeftOut | None = None
    stopped_by: str | None = None


ReplyEvent: TypeAlias = (
    ReplyStarted
    | ReplyPromptScores
    | ReplyReasoningDelta
    | ReplyTextDelta
    | ReplyCallStarted
    | ReplyArgumentsDelta
    | ReplyCallDone
    | ReplyDone
)
