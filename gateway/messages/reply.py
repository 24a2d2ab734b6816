"""The reply to one request of Messages, as its answer or as the events of a stream. A content block is one part
of the reply."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET

from ...sessions.conversation.items import new_id
from ...sessions.turn.events import TokenScore
from ..answers import Answer
from ..clients import Asked
from ..errors import messages_answer
from ..live.reply import PartKind, ReplyEnding, ReplyFold, ReplyPart
from ..net.bodies import sent_event
from . import frames

NO_INPUT = msgspec.Raw(b"{}")
STOP_REASONS: dict[ReplyEnding, frames.StopReason] = {
    ReplyEnding.STOP_STRING: "stop_sequence",
    ReplyEnding.CALLS: "tool_use",
    ReplyEnding.LENGTH: "max_tokens",
    ReplyEnding.REPETITION: "max_tokens",
    ReplyEnding.CONTEXT: "model_context_window_exceeded",
}
"""Why a reply ended, in Anthropic's words; for all other endings it is ``end_turn``."""


class MessageReply(Answer[frames.MessageStreamEvent]):
    """The answer of Messages. ``request_id``: of the HTTP request."""

    PING = sent_event(frames.Ping(), "ping")

    def __init__(self, asked: Asked[frames.MessagesRequest], request_id: str) -> None:
        body, headers = asked.body, {"request-id": request_id}
        super().__init__(new_id("msg"), streamed=bool(body.stream), headers=headers, unserved=asked.unserved)
        self._request_id = request_id
        self._model = body.model
        thinking = body.thinking
        self._thinks = not isinstance(thinking, frames.ThinkingDisabled)
        self._omitted = getattr(thinking, "display", None) == "omitted"
        self._edits = UNSET if body.context_management is None else frames.EditsApplied()

    def encode(self, event: frames.MessageStreamEvent) -> bytes:
        return sent_event(event, event.name)

    def failed(self, error: Exception) -> bytes:
        return sent_event(messages_answer(error, self._request_id)[0], "error")

    # --- a stream -------------------------------------------------------------------------------------------

    def started(self, reply: ReplyFold) -> Iterator[frames.MessageStreamEvent]:
        usage = frames.MessageUsage(input_tokens=reply.input_tokens, output_tokens=0)
        yield frames.MessageStart(message=self._told([], usage))
        yield frames.Ping()

    def begun(self, reply: ReplyFold, part: ReplyPart) -> Iterator[frames.MessageStreamEvent]:
        if self._shown(part):
            yield frames.BlockStart(index=self._at(reply), content_block=self._block(part))

    def grew(
        self, reply: ReplyFold, part: ReplyPart, text: str, scores: tuple[TokenScore, ...]
    ) -> Iterator[frames.MessageStreamEvent]:
        delta: frames.AnyDelta
        match part.kind:
            case PartKind.TEXT:
                delta = frames.BlockText(text=text)
            case PartKind.CALL:
                delta = frames.BlockInput(partial_json=text)
            case PartKind.REASONING:
                if not self._thinks or self._omitted:
                    return
                delta = frames.BlockThinking(thinking=text)
        yield frames.BlockDelta(index=self._at(reply), delta=delta)

    def ended(self, reply: ReplyFold, part: ReplyPart) -> Iterator[frames.MessageStreamEvent]:
        if not self._shown(part):
            return
        if part.kind is PartKind.REASONING:
            signature = frames.BlockSignature(signature=signature_of(part.text))
            yield frames.BlockDelta(index=self._at(reply), delta=signature)
        yield frames.BlockStop(index=self._at(reply))

    def finished(self, reply: ReplyFold) -> Iterator[frames.MessageStreamEvent]:
        yield frames.MessageDelta(
            delta=ending_of(reply), usage=usage_of(reply), context_management=self._edits
        )
        yield frames.MessageStop()

    def _at(self, reply: ReplyFold) -> int:
        return sum(map(self._shown, reply.parts)) - 1

    # --- both -----------------------------------------------------------------------------------------------

    def whole(self, replies: Sequence[ReplyFold]) -> frames.MessageAnswer:
        (reply,) = replies
        blocks = [self._block(part) for part in reply.parts if self._shown(part)]
        return self._told(blocks, usage_of(reply), ending_of(reply))

    def _shown(self, part: ReplyPart) -> bool:
        return self._thinks or part.kind is not PartKind.REASONING

    def _block(self, part: ReplyPart) -> frames.ToldBlock:
        """A part as a content block; one that has only begun is empty."""
        text, begun = part.text, not part.pieces
        match part.kind:
            case PartKind.TEXT:
                return frames.ToldTextBlock(text=text)
            case PartKind.REASONING:
                signature = "" if begun else signature_of(text)
                return frames.ToldThinking(thinking="" if self._omitted else text, signature=signature)
            case PartKind.CALL:
                given = msgspec.Raw(text.encode()) if part.complete and text else NO_INPUT
                return frames.ToldToolUse(id=part.call_id, name=part.name, input=given)

    def _told(
        self, content: list[frames.ToldBlock], usage: frames.MessageUsage, ending: frames.Ending | None = None
    ) -> frames.MessageAnswer:
        return frames.MessageAnswer(
            id=self.id,
            model=self._model,
            content=content,
            usage=usage,
            stop_reason=None if ending is None else ending.stop_reason,
            stop_sequence=None if ending is None else ending.stop_sequence,
            context_management=UNSET if ending is None else self._edits,
            unserved=self.unserved,
        )


def ending_of(reply: ReplyFold) -> frames.Ending:
    """Why a reply ended."""
    stopped_by = None if reply.done is None else reply.done.stopped_by
    return frames.Ending(stop_reason=STOP_REASONS.get(reply.ending, "end_turn"), stop_sequence=stopped_by)


def usage_of(reply: ReplyFold) -> frames.MessageUsage:
    """What a reply cost."""
    usage = reply.usage
    return frames.MessageUsage(
        input_tokens=usage.input_tokens - usage.cached_tokens,
        output_tokens=usage.output_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        cache_creation_input_tokens=0,
        service_tier="standard",
        kv=reply.receipt,
    )


def signature_of(thinking: str) -> str:
    """The signature of a thinking block: a BLAKE2b digest of its text, 128 bits in hexadecimal. The server does
    not check it when a client sends it back."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()
