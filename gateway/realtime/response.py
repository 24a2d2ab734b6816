"""One response on the wire: the events of a turn become server events, in the order of the standard.

    response.created
      response.reasoning_text.delta*                                                  (ours; of no item)
      output_item.added, conversation.item.added
        content_part.added, output_text.delta*, output_text.done, content_part.done      (a message)
        function_call_arguments.delta*, function_call_arguments.done                     (a call)
      output_item.done, conversation.item.done
    response.done

Out of band there are no `conversation.*` events. A response in brief has only `response.created`, text and
reasoning as they come, `output_item.done` and `response.done`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...sdk.frames import server
from ...sdk.frames.items import AnyItem, ItemStatus
from ...sdk.frames.response import Reason, Response, ResponseStatus, StatusDetails, StatusError
from ...sdk.frames.sampling import MaxOutputTokens, TokenLogprob
from ...sessions.conversation.items import FunctionCall, Item, Message
from ...sessions.turn.events import EndReason, ReplyDone, ReplyEvent, ReplyStatus, TokenScore
from ..errors import error_details
from ..live.reply import PartKind, ReplyFold, ReplyPart, Telling
from .event_log import UNSENT, DeltaFrames
from .translate import frame_of, logprobs_of, truncated_of, usage_of

_REASONS: dict[EndReason, Reason] = {
    EndReason.CLIENT_CANCELLED: "client_cancelled",
    EndReason.MAX_OUTPUT_TOKENS: "max_output_tokens",
    EndReason.STEERED: "steered",
    EndReason.REPETITION: "repetition",
}


class ResponseNote(msgspec.Struct, frozen=True, array_like=True):
    """What the journal keeps of a response for this protocol, so that the response's server events can be made
    again after a restart.

    ``asked_by``: the `event_id` of the client event that asked for it. ``metadata``: the client's. ``before``:
    the id of the item before the response's first item; None: no item was before it. ``brief``: it leaves out
    events that repeat others. ``unserved``: names of fields of the request that this server ignores.
    """

    asked_by: str | None
    metadata: dict[str, str] | None
    before: str | None
    brief: bool = False
    unserved: tuple[str, ...] = ()


@dataclass(slots=True)
class _OpenItem:
    """The output item that has begun and not ended. ``index``: its index in the response's output. ``item``:
    the item as it began, without text. ``previous_item_id``: the id of the item before it in the conversation;
    None if it is the first. ``parts``: of the reply, that make it up so far: a message goes on behind
    reasoning. ``frames``: the encoder of its deltas; None before the first call of `LiveResponse.open_text`."""

    index: int
    item: Message | FunctionCall
    previous_item_id: str | None
    parts: list[ReplyPart]
    frames: DeltaFrames | None = None

    def final(self, complete: bool) -> Message | FunctionCall:
        said = "".join(part.text for part in self.parts)
        if isinstance(self.item, Message):
            return msgspec.structs.replace(self.item, text=said, complete=complete)
        return msgspec.structs.replace(self.item, arguments=said, complete=complete)

    @property
    def logprobs(self) -> list[TokenLogprob] | UnsetType:
        return logprobs_of(score for part in self.parts for score in part.scores) or UNSET


class LiveResponse(Telling[server.ServerEvent]):
    """Makes the server events of one response, from `response.created` to `response.done`. It holds the items
    so far, and sends nothing.

    ``note``: what the journal keeps of it. ``conversation_id``: None for a response out of band. ``before``:
    the id of the item before its first one in the conversation, None if that is the first; UNSET: it is asked
    for when the item begins.

    ``item_ids``, ``call_ids``: of the items, and of the tool calls, that have begun. ``created``, ``done``: the
    first, and the last, event has been made. ``cancelling``: a cancel was asked for; the conversation sets it.
    """

    def __init__(
        self,
        response_id: str,
        note: ResponseNote,
        *,
        conversation_id: str | None,
        max_output_tokens: MaxOutputTokens,
        before: str | UnsetType | None = UNSET,
    ) -> None:
        self.id = response_id
        self.note = note
        self.conversation_id = conversation_id
        self.cancelling = False
        self.item_ids: list[str] = []
        self.call_ids: set[str] = set()
        self.created = False
        self.done = False
        self._before = before
        self._max_output_tokens = max_output_tokens
        self._reply = ReplyFold()
        self._last: Callable[[], str | None] = _none
        self._open: _OpenItem | None = None
        self._output: list[AnyItem] = []

    def feed(
        self, event: ReplyEvent, last: Callable[[], str | None] = lambda: None
    ) -> list[server.ServerEvent]:
        """Make the server events for ``event``, the next event of the turn. The first call makes
        `response.created` before all else, and `ReplyDone` makes `response.done`; nothing may follow that.
        ``last`` returns the id of the conversation's last item before the response, None if there is none."""
        assert not self.done, "nothing comes after the end of a reply"
        self._last = last
        try:
            return [*self._first(), *self._reply.told(event, self)]
        finally:
            self._last = _none  # it refers to the conversation, which has this

    def open_text(self, item_id: str) -> tuple[DeltaFrames, list[str]] | None:
        """For the fast way of sending a message's text: the encoder of its deltas, and the list to which the
        caller must append each text that it sends with it. None if the message with this id is not the open
        item."""
        opened = self._open
        if opened is None or opened.item.id != item_id or opened.parts[-1] is not self._reply.parts[-1]:
            return None
        if opened.frames is None:
            opened.frames = DeltaFrames(server.TextDelta(**self._part(opened), delta=""))
        return opened.frames, opened.parts[-1].pieces

    def item(self, item_id: str) -> AnyItem | None:
        """The item with this id, as it is so far. None if the response has not begun it."""
        if self._open is not None and self._open.item.id == item_id:
            return frame_of(self._open.final(complete=True), "in_progress")
        return next((item for item in self._output if item.id == item_id), None)

    def fail(self, error: Exception) -> list[server.ServerEvent]:
        """Make the last events of a response that has been created, after its turn raised ``error``: its open
        item ends, its items are deleted, and `response.done` says `failed`."""
        assert self.created and not self.done
        return [*self._close(complete=False), *self._taken_back(), self._ended("failed", error)]

    def _first(self) -> Iterator[server.ServerEvent]:
        if self.created:
            return
        self.created = True
        response = self._response("in_progress")
        if self.note.unserved:
            response = msgspec.structs.replace(response, unserved=list(self.note.unserved))
        yield server.ResponseCreated(event_id=UNSENT, response=response)

    # --- as `Telling` ---

    def begun(self, reply: ReplyFold, part: ReplyPart) -> Iterator[server.ServerEvent]:
        opened = self._open
        if part.kind is PartKind.REASONING:
            return
        if opened is not None and opened.item.id == part.item_id:
            opened.parts.append(part)
            return
        yield from self._close(complete=True)
        if self.item_ids or self.note.brief:
            before = self.item_ids[-1] if self.item_ids else None
        else:
            before = self._last() if self._before is UNSET else self._before
        item: Message | FunctionCall = Message(id=part.item_id, role="assistant", text="")
        if part.kind is PartKind.CALL:
            item = FunctionCall(id=part.item_id, call_id=part.call_id, name=part.name, arguments="")
            self.call_ids.add(part.call_id)
        opened = self._open = _OpenItem(len(self._output), item, before, [part])
        self.item_ids.append(item.id)
        if self.note.brief:
            return
        yield from self._shown(server.OutputItemAdded, server.ItemAdded, opened, item, "in_progress")
        if isinstance(item, Message):
            yield server.ContentPartAdded(**self._part(opened), part=server.ContentPart(text=""))

    def grew(
        self, reply: ReplyFold, part: ReplyPart, text: str, scores: tuple[TokenScore, ...]
    ) -> Iterator[server.ServerEvent]:
        opened = self._open
        if part.kind is PartKind.REASONING:
            yield server.ReasoningDelta(event_id=UNSENT, response_id=self.id, delta=text)
        elif opened is None:
            raise AssertionError("a part grows after it has begun")
        elif isinstance(opened.item, Message):
            yield server.TextDelta(**self._part(opened), delta=text, logprobs=logprobs_of(scores) or UNSET)
        elif not self.note.brief:
            yield server.ArgumentsDelta(**self._call(opened, opened.item), delta=text)

    def ended(self, reply: ReplyFold, part: ReplyPart) -> Iterator[server.ServerEvent]:
        if part.kind is PartKind.CALL:  # a message may go on
            yield from self._close(part.complete)

    def over(self, reply: ReplyFold) -> Iterator[server.ServerEvent]:
        done = reply.done
        assert done is not None, "the reply is over"
        complete = {item.id for item in done.items if getattr(item, "complete", True)}
        yield from self._close(self._open is not None and self._open.item.id in complete)
        if done.status is ReplyStatus.FAILED:
            yield from self._taken_back()
        yield self._ended(done.status.value, reply.error, done)

    # --- one item ---

    def _close(self, complete: bool) -> Iterator[server.ServerEvent]:
        """End the open item and add it to the output; no events if no item is open. ``complete``: false if the
        item was cut off."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        item = opened.final(complete)
        if self.note.brief:
            frame = frame_of(item)
            yield server.OutputItemDone(
                event_id=UNSENT, response_id=self.id, output_index=opened.index, item=frame
            )
            self._output.append(frame)
            return
        if isinstance(item, Message):
            part = self._part(opened)
            yield server.TextDone(**part, text=item.text, logprobs=opened.logprobs)
            yield server.ContentPartDone(**part, part=server.ContentPart(text=item.text))
        else:
            yield server.ArgumentsDone(**self._call(opened, item), name=item.name, arguments=item.arguments)
        yield from self._shown(server.OutputItemDone, server.ItemDone, opened, item)
        self._output.append(frame_of(item))

    def _shown(
        self,
        output: type[server.OutputItemAdded | server.OutputItemDone],
        conversation: type[server.ItemAdded | server.ItemDone],
        opened: _OpenItem,
        item: Item,
        status: ItemStatus | None = None,
    ) -> Iterator[server.ServerEvent]:
        """The two events that show ``item``: one of the type ``output`` for the response and, unless that is
        out of band, one of the type ``conversation``. ``status``: `in_progress` while the item grows; None: the
        final one."""
        frame = frame_of(item, status)
        yield output(event_id=UNSENT, response_id=self.id, output_index=opened.index, item=frame)
        if self.conversation_id is not None:
            yield conversation(event_id=UNSENT, item=frame, previous_item_id=opened.previous_item_id)

    def _part(self, opened: _OpenItem) -> dict[str, Any]:
        return {**self._fields(opened), "content_index": 0}

    def _call(self, opened: _OpenItem, call: FunctionCall) -> dict[str, Any]:
        return {**self._fields(opened), "call_id": call.call_id}

    def _fields(self, opened: _OpenItem) -> dict[str, Any]:
        return {
            "event_id": UNSENT,
            "response_id": self.id,
            "output_index": opened.index,
            "item_id": opened.item.id,
        }

    # --- the end ---

    def _taken_back(self) -> Iterator[server.ServerEvent]:
        """A `conversation.item.deleted` for each item of the output that has ended, because the turn failed and
        was rolled back. Out of band there are none."""
        if self.conversation_id is not None:
            for item in self._output:
                yield server.ItemDeleted(event_id=UNSENT, item_id=item.id or "")

    def _ended(
        self, status: ResponseStatus, error: Exception | None, done: ReplyDone | None = None
    ) -> server.ResponseDone:
        self.done = True
        details = None
        if status in ("cancelled", "incomplete", "failed"):
            reason = None if done is None else _REASONS.get(done.reason)
            details = StatusDetails(type=status, reason=reason, error=_error(error))
        ended = self._response(status, details)
        if done is not None:
            usage, left_out = self._reply.usage, done.left_out
            truncated = UNSET if left_out is None else truncated_of(left_out)
            ended = msgspec.structs.replace(
                ended, usage=usage_of(usage), kv=self._reply.receipt, truncated=truncated
            )
        return server.ResponseDone(event_id=UNSENT, response=ended)

    def _response(self, status: ResponseStatus, details: StatusDetails | None = None) -> Response:
        return Response(
            id=self.id,
            status=status,
            status_details=details,
            conversation_id=self.conversation_id,
            max_output_tokens=self._max_output_tokens,
            metadata=self.note.metadata,
            output=[] if self.note.brief else list(self._output),
        )


def _none() -> None:
    """No item is before the response."""


def _error(error: Exception | None) -> StatusError | None:
    if error is None:
        return None
    told = error_details(error)
    return StatusError(type=told.type, code=told.code, message=told.message)
