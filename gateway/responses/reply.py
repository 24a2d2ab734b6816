"""One response while it is written: `ReplyEvent`s in, events of its stream out. Pure.

The events of a response that has ended can be made again, with the same sequence numbers: `Cuts` has the
lengths of its deltas.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from ...sessions.errors import TurnFailed
from ...sessions.turn.events import (
    EndReason,
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyReasoningDelta,
    ReplyStatus,
    ReplyTextDelta,
    TokenScore,
    TurnUsage,
)
from ..errors import Draining, wire_error
from ..live.usage import receipt_of
from .events import (
    CachedInput,
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartEvent,
    OutputItemEvent,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseChanged,
    ResponseFault,
    ResponseObject,
    ResponseState,
    ResponseStreamEvent,
    ResponseUsage,
    Unfinished,
)
from .items import (
    ItemStatus,
    KeptCall,
    KeptItem,
    KeptMessage,
    KeptOutputText,
    KeptReasoning,
    KeptReasoningText,
    ScoredAlternative,
    ScoredOutput,
)

Cuts: TypeAlias = list[list[tuple[int, int]]]
"""For each output item of a response a list with a pair for each of its deltas: the delta's number of
characters, and the number of tokens that it has log probabilities of."""

_TERMINAL = {"completed": "response.completed", "failed": "response.failed"}
"""The type of a response's last event by the response's status. For other statuses it is
``response.incomplete``."""


def item_id(prefix: str, response_id: str, at: int) -> str:
    """The id of an item of a response, which names the response. ``at``: the item's number in the response,
    from 0; its input items count first."""
    return f"{prefix}_{response_id.partition('_')[2]}{at:05x}"


def response_named(name: str) -> str | None:
    """The part of an item's id that it shares with the response or other stored object in which the item was
    made: that object's id without ``resp_`` or ``conv_``. None if the id does not have the form of this
    server's ids."""
    kind, _, rest = name.partition("_")
    return f"{rest[:-5]}" if kind and len(rest) > 5 else None


class ResponseReply:
    """Makes the events of one response, and keeps the response object. ``begun``: the response as it begins;
    ``inputs``: how many input items it has, which come before its output in the numbers of ids. ``silent``: it
    only prefills, so the stream shows no output. ``cuts``: the lengths of the deltas so far."""

    def __init__(self, begun: ResponseObject, inputs: int, *, silent: bool = False) -> None:
        self.response = begun
        self._silent = silent
        self.cuts: Cuts = []
        self._inputs = inputs
        self._number = 0
        self._items: list[KeptItem] = []
        self._open: str | None = None  # the item that is being written, by its id in the session
        self._text: list[str] = []
        self._scores: list[ScoredOutput] = []

    # --- what is told ---------------------------------------------------------------------------------------

    def begin(self) -> Iterator[ResponseStreamEvent]:
        """The first events: ``response.created`` and ``response.in_progress``."""
        yield self._changed("response.created")
        yield self._changed("response.in_progress")

    def events(self, event: ReplyEvent) -> Iterator[ResponseStreamEvent]:
        """The stream's events for one event of the turn. For `ReplyDone`, the turn's last event, these only
        close the open item: `end` makes the stream's last event."""
        if self._silent:
            return
        match event:
            case ReplyTextDelta(item_id=name, text=text, scores=scores):
                yield from self._write_text(name, text, [_scored(score) for score in scores])
            case ReplyReasoningDelta(text=text):
                yield from self._write_reasoning(text)
            case ReplyCallStarted(item_id=name, call_id=call_id, name=called):
                yield from self._begin_call(name, call_id, called)
            case ReplyArgumentsDelta(delta=delta):
                yield from self._write_arguments(delta)
            case ReplyCallDone(arguments=arguments, complete=complete):
                yield from self._end_call(arguments, complete=complete)
            case ReplyDone(status=status):
                yield from self._close("completed" if status is ReplyStatus.COMPLETED else "incomplete")

    def end(self, done: ReplyDone | None, error: Exception | None = None) -> ResponseStreamEvent:
        """Complete the response object, and make the stream's last event. ``done``: the turn's last event; None
        if the turn broke off because of ``error``."""
        self.response = self._ended(done, error)
        return self._changed(_TERMINAL.get(self.response.status, "response.incomplete"))

    def _ended(self, done: ReplyDone | None, error: Exception | None) -> ResponseObject:
        status, reason, fault = outcome(done, error)
        if self._silent and status == "incomplete":
            status, reason = "completed", None
        now = max(self.response.created_at, int(time.time()))  # the time of day may be set back
        ended = replace(
            self.response,
            status=status,
            completed_at=now if status == "completed" else None,
            error=None if fault is None else fault_of(fault),
            incomplete_details=None if reason is None else Unfinished(reason=reason),
            output=list(self._items),
        )
        if done is None:
            return ended
        return replace(ended, usage=usage_of(done.usage), kv=receipt_of(done.usage))

    def take(self, event: ReplyEvent) -> None:
        """Take in one event of the turn for the response object, without a stream."""
        for _ in self.events(event):
            pass

    def close(self) -> list[ResponseStreamEvent]:
        """Close the open item as incomplete, because the turn broke off. Returns the events of that; empty if
        no item is open."""
        return list(self._close("incomplete"))

    # --- items ----------------------------------------------------------------------------------------------

    def _write_text(self, name: str, text: str, scores: list[ScoredOutput]) -> Iterator[ResponseStreamEvent]:
        if self._open != name:
            yield from self._add(name, KeptMessage(id=self._id("msg"), role="assistant", content=[]))
            yield self._part("added", KeptOutputText(text=""))
        self._text.append(text)
        self._scores += scores
        self.cuts[-1].append((len(text), len(scores)))
        at, number = self._at, self._next()
        yield OutputTextDelta(
            type="response.output_text.delta",
            sequence_number=number,
            output_index=at,
            item_id=self._items[-1].id,
            delta=text,
            logprobs=scores,
        )

    def _write_reasoning(self, text: str) -> Iterator[ResponseStreamEvent]:
        if not (self._open == "" and isinstance(self._items[-1], KeptReasoning)):
            yield from self._add("", KeptReasoning(id=self._id("rs")))
            yield self._part("added", KeptReasoningText(text=""))
        self._text.append(text)
        self.cuts[-1].append((len(text), 0))
        at, number = self._at, self._next()
        yield ReasoningTextDelta(
            type="response.reasoning_text.delta",
            sequence_number=number,
            output_index=at,
            item_id=self._items[-1].id,
            delta=text,
        )

    def _begin_call(self, name: str, call_id: str, called: str) -> Iterator[ResponseStreamEvent]:
        yield from self._add(name, KeptCall(id=self._id("fc"), call_id=call_id, name=called, arguments=""))

    def _write_arguments(self, delta: str) -> Iterator[ResponseStreamEvent]:
        self._text.append(delta)
        self.cuts[-1].append((len(delta), 0))
        at, number = self._at, self._next()
        yield CallArgumentsDelta(
            type="response.function_call_arguments.delta",
            sequence_number=number,
            output_index=at,
            item_id=self._items[-1].id,
            delta=delta,
        )

    def _end_call(self, arguments: str, *, complete: bool) -> Iterator[ResponseStreamEvent]:
        if not self._text and arguments:
            yield from self._write_arguments(arguments)
        yield from self._close("completed" if complete else "incomplete")

    def _add(self, name: str, item: KeptItem) -> Iterator[ResponseStreamEvent]:
        yield from self._close("completed")
        self._open = name
        self._items.append(item)
        self.cuts.append([])
        yield self._item("added", replace(item, status="in_progress"))

    def _close(self, status: ItemStatus) -> Iterator[ResponseStreamEvent]:
        if self._open is None:
            return
        text, item, at = "".join(self._text), self._items[-1], self._at
        match item:
            case KeptMessage():
                part = KeptOutputText(text=text, logprobs=self._scores)
                item = replace(item, content=[part], status=status)
                yield OutputTextDone(
                    type="response.output_text.done",
                    sequence_number=self._next(),
                    output_index=at,
                    item_id=item.id,
                    text=text,
                    logprobs=self._scores,
                )
                yield self._part("done", part)
            case KeptReasoning():
                thought = KeptReasoningText(text=text)
                item = replace(item, content=[thought], status=status)
                yield ReasoningTextDone(
                    type="response.reasoning_text.done",
                    sequence_number=self._next(),
                    output_index=at,
                    item_id=item.id,
                    text=text,
                )
                yield self._part("done", thought)
            case KeptCall():
                item = replace(item, arguments=text, status=status)
                yield CallArgumentsDone(
                    type="response.function_call_arguments.done",
                    sequence_number=self._next(),
                    output_index=at,
                    item_id=item.id,
                    arguments=text,
                )
        self._items[-1] = item
        self._open, self._text, self._scores = None, [], []
        yield self._item("done", item)

    # --- events ---------------------------------------------------------------------------------------------

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _id(self, prefix: str) -> str:
        return item_id(prefix, self.response.id, self._inputs + len(self._items))

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _changed(self, kind: str) -> ResponseChanged:
        return ResponseChanged(type=kind, sequence_number=self._next(), response=self.response)

    def _item(self, change: str, item: KeptItem) -> OutputItemEvent:
        kind = f"response.output_item.{change}"
        return OutputItemEvent(type=kind, sequence_number=self._next(), output_index=self._at, item=item)

    def _part(self, change: str, part: KeptOutputText | KeptReasoningText) -> ContentPartEvent:
        return ContentPartEvent(
            type=f"response.content_part.{change}",
            sequence_number=self._next(),
            output_index=self._at,
            item_id=self._items[-1].id,
            part=part,
        )

    # --- a response that has ended --------------------------------------------------------------------------

    @classmethod
    def retold(cls, response: ResponseObject, inputs: int, cuts: Cuts) -> list[ResponseStreamEvent]:
        """All events of a response that has ended, the same as when it ran. ``inputs``: how many input items it
        has. ``cuts``: the lengths of its deltas."""
        begun = replace(
            response,
            status="in_progress",
            completed_at=None,
            error=None,
            incomplete_details=None,
            output=[],
            usage=None,
            kv=UNSET,
        )
        reply = cls(begun, inputs)
        told = list(reply.begin())
        for at, (item, cut) in enumerate(zip(response.output, cuts, strict=True)):
            told += reply._retell(str(at), item, cut)
        reply.response = response
        told.append(reply._changed(_TERMINAL.get(response.status, "response.incomplete")))
        return told

    def _retell(
        self, name: str, item: KeptItem, cut: Sequence[tuple[int, int]]
    ) -> Iterator[ResponseStreamEvent]:
        match item:
            case KeptMessage(content=content, status=status):
                part = content[0]
                scores = part.logprobs if isinstance(part, KeptOutputText) else []
                scored = 0
                for text, (_, count) in _pieces(part.text, cut):
                    yield from self._write_text(name, text, scores[scored : scored + count])
                    scored += count
            case KeptReasoning(content=content, status=status):
                for text, _ in _pieces(content[0].text, cut):
                    yield from self._write_reasoning(text)
            case KeptCall(call_id=call_id, name=called, arguments=arguments, status=status):
                yield from self._begin_call(name, call_id, called)
                for text, _ in _pieces(arguments, cut):
                    yield from self._write_arguments(text)
            case _:
                return
        yield from self._close(status)


def _pieces(text: str, cut: Iterable[tuple[int, int]]) -> Iterator[tuple[str, tuple[int, int]]]:
    begin = 0
    for one in cut:
        yield text[begin : begin + one[0]], one
        begin += one[0]


def outcome(
    done: ReplyDone | None, error: Exception | None = None
) -> tuple[ResponseState, str | None, Exception | None]:
    """How a turn ended, as three values: the response's status; for an incomplete one the reason, else None;
    for a failed one the error, else None. ``done``: the turn's last event; None if the turn broke off because
    of ``error``."""
    if done is None:
        return "failed", None, error or TurnFailed("The turn broke off")
    if done.status is ReplyStatus.FAILED:
        return "failed", None, done.error or TurnFailed("The turn failed")
    if done.reason is EndReason.SERVER_LEAVING:
        return "failed", None, Draining("The server is going away")
    if done.status is ReplyStatus.CANCELLED:
        return "cancelled", None, None
    if done.reason is EndReason.STEERED:
        return "incomplete", "steered", None
    if done.reason in (EndReason.MAX_OUTPUT_TOKENS, EndReason.REPETITION):
        return "incomplete", "max_output_tokens", None
    return "completed", None, None


def fault_of(error: Exception) -> ResponseFault:
    """The error of a failed response as the response object shows it, with one of the standard's codes."""
    wire = wire_error(error)
    code = "server_error" if wire.status >= 500 else "invalid_prompt"
    if wire.status in (429, 503) and wire.type == "rate_limit_error":
        code = "rate_limit_exceeded"
    message = getattr(error, "message", None) if wire.code != "internal_error" else None
    told = message if isinstance(message, str) else "The server made a mistake; it is logged"
    return ResponseFault(code=code, message=told, type=wire.code)


def usage_of(usage: TurnUsage) -> ResponseUsage:
    """A turn's token counts, in the form of the response object."""
    return ResponseUsage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        input_tokens_details=CachedInput(
            cached_tokens=usage.cached_tokens, cache_write_tokens=usage.prefilled_tokens
        ),
    )


def _scored(score: TokenScore) -> ScoredOutput:
    own = _alternative(score)
    top = [_alternative(other) for other in score.top]
    return ScoredOutput(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)


def _alternative(score: TokenScore) -> ScoredAlternative:
    whole = "�" not in score.text
    spelled = list(score.text.encode()) if whole else []
    return ScoredAlternative(token=score.text, logprob=score.logprob, bytes=spelled)
