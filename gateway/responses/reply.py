"""One response while it is written: what its reply adds up to, as events of its stream. Pure.

The events of a response that has ended can be made again, with the same sequence numbers: `Cuts` has the
lengths of its deltas.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from ...sessions.errors import TurnFailed
from ...sessions.turn.events import (
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyEvent,
    ReplyReasoningDelta,
    ReplyTextDelta,
    TokenScore,
    TurnUsage,
)
from ..errors import wire_error
from ..live.reply import PartKind, ReplyEnding, ReplyFold, ReplyPart, ScoredToken, Telling
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
from .frames import OfferedNamespace
from .items import (
    ItemStatus,
    KeptCall,
    KeptItem,
    KeptMessage,
    KeptOutputText,
    KeptReasoning,
    KeptReasoningText,
    whole_name,
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


class ResponseReply(Telling[ResponseStreamEvent]):
    """Makes the events of one response, and keeps the response object. ``begun``: the response as it begins;
    ``inputs``: how many input items it has, which come before its output in the numbers of ids. ``cuts``: the
    lengths of the deltas so far."""

    def __init__(self, begun: ResponseObject, inputs: int) -> None:
        self.response = begun
        self._namespaces = {
            whole_name(space.name, function.name): space.name
            for space in begun.tools
            if isinstance(space, OfferedNamespace)
            for function in space.tools
        }
        self.cuts: Cuts = []
        self._inputs = inputs
        self._number = 0
        self._items: list[KeptItem] = []

    # --- the response ---------------------------------------------------------------------------------------

    def begin(self) -> Iterator[ResponseStreamEvent]:
        """The first events: ``response.created`` and ``response.in_progress``."""
        yield self._changed("response.created")
        yield self._changed("response.in_progress")

    def end(self, reply: ReplyFold, error: Exception | None = None) -> ResponseStreamEvent:
        """Complete the response object, and make the stream's last event. ``error``: by which the turn broke
        off, if it did."""
        status, reason, fault = outcome(reply, error)
        if reply.silent and status == "incomplete":
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
        if reply.done is not None:
            ended = replace(ended, usage=usage_of(reply.usage), kv=reply.receipt)
        self.response = ended
        return self._changed(_TERMINAL.get(status, "response.incomplete"))

    # --- its items ------------------------------------------------------------------------------------------

    def begun(self, reply: ReplyFold, part: ReplyPart) -> Iterator[ResponseStreamEvent]:
        item: KeptItem
        match part.kind:
            case PartKind.TEXT:
                item = KeptMessage(id=self._id("msg"), role="assistant", content=[])
            case PartKind.REASONING:
                item = KeptReasoning(id=self._id("rs"))
            case PartKind.CALL:
                space = self._namespaces.get(part.name, UNSET)
                name = part.name if space is UNSET else part.name.removeprefix(whole_name(space, ""))
                item = KeptCall(
                    id=self._id("fc"), call_id=part.call_id, name=name, arguments="", namespace=space
                )
        self._items.append(item)
        self.cuts.append([])
        yield self._item("added", replace(item, status="in_progress"))
        match part.kind:
            case PartKind.TEXT:
                yield self._part("added", KeptOutputText(text=""))
            case PartKind.REASONING:
                yield self._part("added", KeptReasoningText(text=""))

    def grew(
        self, reply: ReplyFold, part: ReplyPart, text: str, scores: tuple[TokenScore, ...]
    ) -> Iterator[ResponseStreamEvent]:
        self.cuts[-1].append((len(text), len(scores)))
        match part.kind:
            case PartKind.TEXT:
                logprobs = list(map(ScoredToken.of, scores))
                yield OutputTextDelta(
                    type="response.output_text.delta", **self._fields(), delta=text, logprobs=logprobs
                )
            case PartKind.REASONING:
                yield ReasoningTextDelta(type="response.reasoning_text.delta", **self._fields(), delta=text)
            case PartKind.CALL:
                yield CallArgumentsDelta(
                    type="response.function_call_arguments.delta", **self._fields(), delta=text
                )

    def ended(self, reply: ReplyFold, part: ReplyPart) -> Iterator[ResponseStreamEvent]:
        text, item = part.text, self._items[-1]
        status: ItemStatus = "completed" if part.complete else "incomplete"
        match item:
            case KeptMessage():
                logprobs = list(map(ScoredToken.of, part.scores))
                said = KeptOutputText(text=text, logprobs=logprobs)
                item = replace(item, content=[said], status=status)
                yield OutputTextDone(
                    type="response.output_text.done", **self._fields(), text=text, logprobs=logprobs
                )
                yield self._part("done", said)
            case KeptReasoning():
                thought = KeptReasoningText(text=text)
                item = replace(item, content=[thought], status=status)
                yield ReasoningTextDone(type="response.reasoning_text.done", **self._fields(), text=text)
                yield self._part("done", thought)
            case KeptCall():
                item = replace(item, arguments=text, status=status)
                yield CallArgumentsDone(
                    type="response.function_call_arguments.done", **self._fields(), arguments=text
                )
        self._items[-1] = item
        yield self._item("done", item)

    # --- events ---------------------------------------------------------------------------------------------

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _fields(self) -> dict[str, Any]:
        number = self._next()
        return {"sequence_number": number, "output_index": self._at, "item_id": self._items[-1].id}

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
        by, reply = cls(begun, inputs), ReplyFold()
        told = list(by.begin())
        for item, cut in zip(response.output, cuts, strict=True):
            for event in _events(item, cut):
                told += reply.told(event, by)
            told += reply.close(by, complete=getattr(item, "status", "") == "completed")
        by.response = response
        told.append(by._changed(_TERMINAL.get(response.status, "response.incomplete")))
        return told


def _events(item: KeptItem, cut: Sequence[tuple[int, int]]) -> Iterator[ReplyEvent]:
    """The events of the turn that wrote an item. ``cut``: the lengths of its deltas."""
    match item:
        case KeptMessage(content=[KeptOutputText(logprobs=scores) as part]):
            scored = 0
            for text, count in _pieces(part.text, cut):
                yield ReplyTextDelta(item.id, text, tuple(map(_score, scores[scored : scored + count])))
                scored += count
        case KeptReasoning(content=content):
            for text, _ in _pieces(content[0].text, cut):
                yield ReplyReasoningDelta(text)
        case KeptCall(call_id=call_id, called=name, arguments=arguments, status=status):
            yield ReplyCallStarted(item.id, call_id, name)
            for text, _ in _pieces(arguments, cut):
                yield ReplyArgumentsDelta(item.id, call_id, text)
            yield ReplyCallDone(item.id, call_id, name, arguments, status == "completed")


def _pieces(text: str, cut: Iterable[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    begin = 0
    for length, count in cut:
        yield text[begin : begin + length], count
        begin += length


def _score(told: ScoredToken) -> TokenScore:
    top = tuple(TokenScore(0, one.token, one.logprob, (), bytes(one.bytes)) for one in told.top_logprobs)
    return TokenScore(0, told.token, told.logprob, top, bytes(told.bytes))


def outcome(
    reply: ReplyFold, error: Exception | None = None
) -> tuple[ResponseState, str | None, Exception | None]:
    """How a turn ended, as three values: the response's status; for an incomplete one the reason, else None;
    for a failed one the error, else None. ``error``: by which the turn broke off, if it did."""
    if reply.done is None:
        return "failed", None, error or TurnFailed("The turn broke off")
    if reply.error is not None:
        return "failed", None, reply.error
    match reply.ending:
        case ReplyEnding.CANCELLED:
            return "cancelled", None, None
        case ReplyEnding.STEERED:
            return "incomplete", "steered", None
        case ReplyEnding.LENGTH | ReplyEnding.CONTEXT | ReplyEnding.REPETITION:
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
