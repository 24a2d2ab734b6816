"""A reply, as all protocols tell it: what the events of its turn add up to.

What a reply is, is decided here: its parts in their order, which tool call is whole, why it ended, what it cost
and by which error it failed. The code of a protocol writes that in its own frames: it is a `Telling`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

import msgspec

from ...sdk.frames.response import KVReceipt
from ...sessions.errors import TurnFailed
from ...sessions.turn.events import (
    EndReason,
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyPromptScores,
    ReplyReasoningDelta,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
    TokenScore,
    TurnUsage,
)
from ..errors import Draining

T = TypeVar("T")


class ScoredAlternative(msgspec.Struct, kw_only=True, frozen=True):
    """A token that is likely at one position of a reply, with its bytes in UTF-8, also if these are a part of a
    character; none if the vocabulary does not tell them."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(ScoredAlternative, kw_only=True, frozen=True):
    """A token of a reply, and the most likely tokens at its position."""

    top_logprobs: list[ScoredAlternative]

    @classmethod
    def of(cls, score: TokenScore) -> ScoredToken:
        """From the score of a token."""
        top = [
            ScoredAlternative(token=one.text, logprob=one.logprob, bytes=list(one.spelled))
            for one in score.top
        ]
        return cls(token=score.text, logprob=score.logprob, bytes=list(score.spelled), top_logprobs=top)


class PartKind(Enum):
    """What a part of a reply is."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass(slots=True, eq=False)
class ReplyPart:
    """One part of a reply: a message's text, a stretch of reasoning, or a tool call.

    ``item_id``: of the session's item; "" for reasoning, which is none. ``call_id``, ``name``: of a call.
    ``pieces``: its text, or a call's arguments, as it came. ``scores``: of a text's tokens, if they were
    requested. ``complete``: it has ended, and nothing of it is missing; a call that is not must not be run.
    """

    kind: PartKind
    item_id: str = ""
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        """The text, or the arguments, so far."""
        return "".join(self.pieces)


class ReplyEnding(Enum):
    """Why a reply ended."""

    STOP = auto()
    """The model ended it, without a whole call."""
    STOP_STRING = auto()
    CALLS = auto()
    """The model ended it, and it has one whole call or more."""
    LENGTH = auto()
    """It reached the request's limit of tokens."""
    CONTEXT = auto()
    """It reached the end of the model's context."""
    REPETITION = auto()
    CANCELLED = auto()
    STEERED = auto()
    LEAVING = auto()
    """The server shuts down."""
    FAILED = auto()


class ReplyFold:
    """One reply. ``number``: its number among the replies to one request. ``limit``: the most tokens that the
    request allows; None: as many as the context holds. ``input_tokens``: of the prompt, known once it was
    accepted. ``parts``: those that have begun. ``prompt``: scores of the prompt's tokens, if they were
    requested. ``done``: its last event. ``silent``: only the prompt is wanted, so the reply has no parts and no
    output tokens."""

    def __init__(self, number: int = 0, limit: int | None = None, *, silent: bool = False) -> None:
        self.number = number
        self.silent = silent
        self.input_tokens = 0
        self.parts: list[ReplyPart] = []
        self.prompt: ReplyPromptScores | None = None
        self.done: ReplyDone | None = None
        self._limit = limit
        self._open: ReplyPart | None = None

    def told(self, event: ReplyEvent, by: Telling[T]) -> Iterator[T]:
        """Take in the next event of the turn, and yield what ``by`` says of it."""
        if self.silent and isinstance(event, _OUTPUT):
            return
        match event:
            case ReplyTextDelta(item_id=item_id, text=text, scores=scores):
                yield from self._write(PartKind.TEXT, item_id, text, scores, by)
            case ReplyReasoningDelta(text=text):
                yield from self._write(PartKind.REASONING, "", text, (), by)
            case ReplyCallStarted(item_id=item_id, call_id=call_id, name=name):
                yield from self._begin(ReplyPart(PartKind.CALL, item_id, call_id, name), by)
            case ReplyArgumentsDelta(item_id=item_id, delta=delta):
                yield from self._write(PartKind.CALL, item_id, delta, (), by)
            case ReplyCallDone(item_id=item_id, arguments=arguments, complete=complete):
                call = self._open
                assert call is not None and call.item_id == item_id, "a call ends after it has begun"
                if arguments and not call.pieces:
                    yield from self._write(PartKind.CALL, item_id, arguments, (), by)
                yield from self.close(by, complete=complete)
            case ReplyStarted(input_tokens=tokens):
                self.input_tokens = tokens
                yield from by.started(self)
            case ReplyPromptScores():
                self.prompt = event
                yield from by.scored(self)
            case ReplyDone():
                yield from self.close_at(event, by)
                self.done = event
                yield from by.over(self)

    def close(self, by: Telling[T], *, complete: bool) -> Iterator[T]:
        """End the part that is open, if one is."""
        if (part := self._open) is not None:
            self._open, part.complete = None, complete
            yield from by.ended(self, part)

    def close_at(self, done: ReplyDone, by: Telling[T]) -> Iterator[T]:
        """End the part that is open at the reply's end, before `told` gets its last event."""
        name = None if self._open is None else self._open.item_id
        item = next((item for item in done.items if item.id == name), None)
        completed = done.status is ReplyStatus.COMPLETED
        yield from self.close(by, complete=completed if item is None else getattr(item, "complete", True))

    def _begin(self, part: ReplyPart, by: Telling[T]) -> Iterator[T]:
        yield from self.close(by, complete=True)
        self._open = part
        self.parts.append(part)
        yield from by.begun(self, part)

    def _write(
        self, kind: PartKind, item_id: str, text: str, scores: tuple[TokenScore, ...], by: Telling[T]
    ) -> Iterator[T]:
        part = self._open
        if part is None or part.kind is not kind or part.item_id != item_id:
            yield from self._begin(part := ReplyPart(kind, item_id), by)
        part.pieces.append(text)
        part.scores += scores
        yield from by.grew(self, part, text, scores)

    # --- once it has ended ----------------------------------------------------------------------------------

    @property
    def ending(self) -> ReplyEnding:
        """Why it ended."""
        done = self.done
        assert done is not None, "the reply has ended"
        if done.status is ReplyStatus.FAILED:
            return ReplyEnding.FAILED
        if self.silent and done.reason in (EndReason.STOP, EndReason.MAX_OUTPUT_TOKENS):
            return ReplyEnding.LENGTH
        if done.reason is EndReason.MAX_OUTPUT_TOKENS:
            full = self._limit is None or done.usage.output_tokens < self._limit
            return ReplyEnding.CONTEXT if full else ReplyEnding.LENGTH
        if done.reason is not EndReason.STOP:
            return _ENDINGS[done.reason]
        if done.stopped_by is not None:
            return ReplyEnding.STOP_STRING
        return (
            ReplyEnding.CALLS if any(part.complete for part in self.of(PartKind.CALL)) else ReplyEnding.STOP
        )

    @property
    def error(self) -> Exception | None:
        """The error by which it failed, or by which the server's end cut it off; None: it did not."""
        if self.ending is ReplyEnding.LEAVING:
            return Draining("The server is going away")
        failed = self.ending is ReplyEnding.FAILED and self.done is not None
        return (self.done.error or TurnFailed("The turn failed")) if failed and self.done else None

    @property
    def usage(self) -> TurnUsage:
        """What its turn cost; nothing until it has ended."""
        usage = TurnUsage() if self.done is None else self.done.usage
        return msgspec.structs.replace(usage, output_tokens=0) if self.silent else usage

    @property
    def receipt(self) -> KVReceipt:
        """How many prompt tokens were computed, how many had their KV on the device, in the host tier or on
        disk, how long the disk took, and why KV was missed."""
        usage = self.usage
        return KVReceipt(
            new=usage.new_tokens,
            prefilled=usage.prefilled_tokens,
            resident=usage.cached_tokens - usage.host_tokens - usage.disk_tokens,
            recomputed=usage.recomputed_tokens,
            host=usage.host_tokens,
            disk=usage.disk_tokens,
            restore_ms=usage.restore_ms,
            miss_reason=None if usage.miss_reason is None else usage.miss_reason.value,
        )

    @property
    def text(self) -> str:
        """The text of all its messages as one, for protocols that have one: a line break stands between two."""
        return "".join(self.gap(part) + part.text for part in self.of(PartKind.TEXT))

    def gap(self, part: ReplyPart) -> str:
        """What stands before a part of the text in `text`: a line break, where it begins a further message. A
        message has several parts if it goes on behind reasoning."""
        before = [one.item_id for one in self.parts[: self.parts.index(part)] if one.kind is PartKind.TEXT]
        return "\n" if before and part.item_id not in before else ""

    @property
    def reasoning(self) -> str:
        """All its reasoning."""
        return "".join(part.text for part in self.of(PartKind.REASONING))

    def of(self, kind: PartKind) -> list[ReplyPart]:
        """Its parts of one kind."""
        return [part for part in self.parts if part.kind is kind]


class Telling(Generic[T]):
    """What the code of a protocol says of replies, in its own frames: nothing, where it does not say it."""

    def started(self, reply: ReplyFold) -> Iterable[T]:
        """The prompt was accepted."""
        return ()

    def scored(self, reply: ReplyFold) -> Iterable[T]:
        """The scores of the prompt's tokens are there."""
        return ()

    def begun(self, reply: ReplyFold, part: ReplyPart) -> Iterable[T]:
        """A part has begun, and is still empty."""
        return ()

    def grew(
        self, reply: ReplyFold, part: ReplyPart, text: str, scores: tuple[TokenScore, ...]
    ) -> Iterable[T]:
        """The open part has more text, or arguments, with these scores."""
        return ()

    def ended(self, reply: ReplyFold, part: ReplyPart) -> Iterable[T]:
        """The open part has ended."""
        return ()

    def over(self, reply: ReplyFold) -> Iterable[T]:
        """The reply has ended."""
        return ()


SILENT: Telling[bytes] = Telling()
"""Says nothing: for replies of which only the whole is told."""

_OUTPUT = (ReplyTextDelta, ReplyReasoningDelta, ReplyCallStarted, ReplyArgumentsDelta, ReplyCallDone)
_ENDINGS = {
    EndReason.CLIENT_CANCELLED: ReplyEnding.CANCELLED,
    EndReason.REPETITION: ReplyEnding.REPETITION,
    EndReason.SERVER_LEAVING: ReplyEnding.LEAVING,
    EndReason.STEERED: ReplyEnding.STEERED,
    EndReason.ERROR: ReplyEnding.FAILED,
}
