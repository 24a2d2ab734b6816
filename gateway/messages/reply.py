"""The reply to one request of Messages: `ReplyEvent`s in, events of a stream or a whole answer out. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from ...sessions.conversation.items import new_id
from ...sessions.errors import TurnFailed
from ...sessions.turn.events import (
    EndReason,
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyReasoningDelta,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
)
from ..errors import Draining
from ..live.usage import receipt_of
from . import frames

NO_INPUT = msgspec.Raw(b"{}")


class MessageReply:
    """Makes the answer, or the events of a stream, for the reply to one request. A content block of the answer
    is one message of the reply, a stretch of its reasoning, or one tool call."""

    def __init__(self, model: str, body: frames.MessagesRequest) -> None:
        self.id = new_id("msg")
        self._model = model
        self._max_tokens = body.max_tokens
        thinking = body.thinking
        self._thinks = not isinstance(thinking, frames.ThinkingDisabled)
        self._omitted = getattr(thinking, "display", None) == "omitted"
        self._edits = UNSET if body.context_management is None else frames.EditsApplied()
        self._blocks: list[frames.ToldBlock] = []
        self._open: str | None = None  # the item of the open block; "" for reasoning
        self._said: list[str] = []  # the open block's deltas
        self._called = False
        self._done: ReplyDone | None = None

    # --- a stream -------------------------------------------------------------------------------------------

    def events(self, event: ReplyEvent) -> Iterator[frames.MessageStreamEvent]:
        """The events of a stream for one event of the reply. Raises ``TurnFailed`` for a turn that failed,
        ``Draining`` for one that the server's end cut off."""
        match event:
            case ReplyStarted(input_tokens=tokens):
                yield frames.MessageStart(
                    message=self._told([], frames.MessageUsage(input_tokens=tokens, output_tokens=0))
                )
                yield frames.Ping()
            case ReplyTextDelta(item_id=item_id, text=text):
                if self._open != item_id:
                    yield from self._begin(item_id, frames.ToldTextBlock(text=""))
                yield self._delta(text, frames.BlockText(text=text))
            case ReplyReasoningDelta(text=text) if self._thinks:
                if self._open != "":
                    yield from self._begin("", frames.ToldThinking(thinking="", signature=""))
                if self._omitted:
                    self._said.append(text)
                else:
                    yield self._delta(text, frames.BlockThinking(thinking=text))
            case ReplyCallStarted(item_id=item_id, call_id=call_id, name=name):
                yield from self._begin(item_id, frames.ToldToolUse(id=call_id, name=name, input=NO_INPUT))
            case ReplyArgumentsDelta(delta=delta):
                yield self._delta(delta, frames.BlockInput(partial_json=delta))
            case ReplyCallDone(complete=complete):
                self._called |= complete
            case ReplyDone():
                self._done = event
                ending = self._ending()
                yield from self._end()
                yield frames.MessageDelta(delta=ending, usage=self._usage(), context_management=self._edits)
                yield frames.MessageStop()

    def _begin(self, item_id: str, block: frames.ToldBlock) -> Iterator[frames.MessageStreamEvent]:
        yield from self._end()
        self._open = item_id
        self._blocks.append(block)
        yield frames.BlockStart(index=len(self._blocks) - 1, content_block=block)

    def _delta(
        self, text: str, delta: frames.BlockText | frames.BlockThinking | frames.BlockInput
    ) -> frames.MessageStreamEvent:
        self._said.append(text)
        return frames.BlockDelta(index=len(self._blocks) - 1, delta=delta)

    def _end(self) -> Iterator[frames.MessageStreamEvent]:
        if self._open is None:
            return
        index = len(self._blocks) - 1
        if isinstance(self._blocks[-1], frames.ToldThinking):
            signature = signature_of("".join(self._said))
            yield frames.BlockDelta(index=index, delta=frames.BlockSignature(signature=signature))
        yield frames.BlockStop(index=index)
        self._open = None
        self._said.clear()

    # --- a whole answer -------------------------------------------------------------------------------------

    def add(self, number: int, event: ReplyEvent) -> None:
        """Collect one event of the reply, for `whole`. ``number``: of the choice; there is one."""
        match event:
            case ReplyTextDelta(item_id=item_id, text=text):
                self._collect(item_id, text)
            case ReplyReasoningDelta(text=text) if self._thinks:
                self._collect("", text)
            case ReplyCallDone(call_id=call_id, name=name, arguments=arguments, complete=complete):
                self._close()
                self._called |= complete
                given = msgspec.Raw(arguments.encode()) if complete and arguments else NO_INPUT
                self._blocks.append(frames.ToldToolUse(id=call_id, name=name, input=given))
            case ReplyDone():
                self._close()
                self._done = event

    def _collect(self, item_id: str, text: str) -> None:
        if self._open != item_id:
            self._close()
            self._open = item_id
        self._said.append(text)

    def _close(self) -> None:
        """Add the open content block to the answer, with all of its text, if one is open."""
        text = "".join(self._said)
        if self._open == "":
            told = "" if self._omitted else text
            self._blocks.append(frames.ToldThinking(thinking=told, signature=signature_of(text)))
        elif self._open is not None:
            self._blocks.append(frames.ToldTextBlock(text=text))
        self._open = None
        self._said.clear()

    def whole(self) -> frames.MessageAnswer:
        """The answer, after the reply has ended. Raises ``TurnFailed`` if it failed, ``Draining`` if the
        server's end cut it off."""
        return self._told(self._blocks, self._usage(), self._ending())

    # --- both -----------------------------------------------------------------------------------------------

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
        )

    def _ending(self) -> frames.Ending:
        done = self._done
        assert done is not None, "the reply has ended"
        if done.status is ReplyStatus.FAILED:
            raise done.error or TurnFailed("The turn failed")
        if done.reason is EndReason.SERVER_LEAVING:
            raise Draining("The server is going away")
        return frames.Ending(stop_reason=self._reason(done), stop_sequence=done.stopped_by)

    def _reason(self, done: ReplyDone) -> frames.StopReason:
        if done.reason is EndReason.REPETITION:
            return "max_tokens"
        if done.reason is EndReason.MAX_OUTPUT_TOKENS:
            full = done.usage.output_tokens < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if done.stopped_by is not None:
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"

    def _usage(self) -> frames.MessageUsage:
        done = self._done
        assert done is not None, "the reply has ended"
        usage = done.usage
        return frames.MessageUsage(
            input_tokens=usage.input_tokens - usage.cached_tokens,
            output_tokens=usage.output_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            cache_creation_input_tokens=0,
            service_tier="standard",
            kv=receipt_of(usage),
        )


def signature_of(thinking: str) -> str:
    """The signature of a thinking block: a BLAKE2b digest of its text, 128 bits in hexadecimal. The server does
    not check it when a client sends it back."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()
