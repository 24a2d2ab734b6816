"""The replies to one request of Chat Completions, as its answer or as the chunks of a stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec import UNSET

from ...sessions.conversation.items import new_id
from ...sessions.turn.events import TokenScore
from ..answers import Answer
from ..clients import Asked
from ..errors import http_answer
from ..live.reply import PartKind, ReplyEnding, ReplyFold, ReplyPart, ScoredToken
from ..net.bodies import DONE, sent_event
from .frames import (
    CallDelta,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    CompletionUsage,
    Delta,
    FinishReason,
    PromptTokensDetails,
    SamplingBody,
    ToldCall,
    ToldFunction,
    ToldMessage,
)

T = TypeVar("T")
FINISH: dict[ReplyEnding, FinishReason] = {
    ReplyEnding.CALLS: "tool_calls",
    ReplyEnding.LENGTH: "length",
    ReplyEnding.CONTEXT: "length",
    ReplyEnding.REPETITION: "length",
}
"""Why a reply ended, in the standard's words; for all other endings it is ``stop``."""


class OpenAIAnswer(Answer[T]):
    """What the answers of Chat Completions and of Completions share. ``prefix``: of its id. ``model``: its
    name."""

    def __init__(self, prefix: str, model: str, body: SamplingBody, unserved: Sequence[str] = ()) -> None:
        answer_id = new_id(prefix).replace("_", "-")
        super().__init__(answer_id, streamed=bool(body.stream), unserved=unserved)
        self.model = model
        self.created = int(time.time())
        self._told_usage = bool(body.stream_options and body.stream_options.include_usage)

    def encode(self, event: T) -> bytes:
        return sent_event(event)

    def last(self, replies: Sequence[ReplyFold]) -> bytes:
        return (sent_event(self.usage_chunk(replies)) if self._told_usage else b"") + DONE

    def failed(self, error: Exception) -> bytes:
        return sent_event(http_answer(error)[0])

    @abstractmethod
    def usage_chunk(self, replies: Sequence[ReplyFold]) -> T:
        """The last chunk of a stream, if the client asked for the usage."""


class ChatAnswer(OpenAIAnswer[ChatChunk]):
    """The answer of Chat Completions."""

    def __init__(self, model: str, asked: Asked[ChatRequest]) -> None:
        super().__init__("chatcmpl", model, asked.body, asked.unserved)
        self._logprobs = bool(asked.body.logprobs)

    # --- a stream -------------------------------------------------------------------------------------------

    def started(self, reply: ReplyFold) -> Iterator[ChatChunk]:
        first = ChunkChoice(index=reply.number, delta=Delta(role="assistant", content=""))
        yield self._chunk(first, unserved=self.unserved)

    def begun(self, reply: ReplyFold, part: ReplyPart) -> Iterator[ChatChunk]:
        if part.kind is PartKind.CALL:
            called = ToldFunction(name=part.name, arguments="")
            yield self._call(reply, id=part.call_id, type="function", function=called)

    def grew(
        self, reply: ReplyFold, part: ReplyPart, text: str, scores: tuple[TokenScore, ...]
    ) -> Iterator[ChatChunk]:
        match part.kind:
            case PartKind.TEXT:
                delta = Delta(content=text if len(part.pieces) > 1 else reply.gap(part) + text)
                yield self._chunk(ChunkChoice(index=reply.number, delta=delta, logprobs=self._scored(scores)))
            case PartKind.REASONING:
                yield self._chunk(ChunkChoice(index=reply.number, delta=Delta(reasoning_content=text)))
            case PartKind.CALL:
                yield self._call(reply, function=ToldFunction(arguments=text))

    def finished(self, reply: ReplyFold) -> Iterator[ChatChunk]:
        yield self._chunk(ChunkChoice(index=reply.number, delta=Delta(), finish_reason=finish_reason(reply)))

    def usage_chunk(self, replies: Sequence[ReplyFold]) -> ChatChunk:
        return self._chunk(usage=usage_of(replies), kv=replies[0].receipt)

    def _call(self, reply: ReplyFold, **fields: Any) -> ChatChunk:
        delta = Delta(tool_calls=[CallDelta(index=len(reply.of(PartKind.CALL)) - 1, **fields)])
        return self._chunk(ChunkChoice(index=reply.number, delta=delta))

    def _chunk(self, *choices: ChunkChoice, **more: Any) -> ChatChunk:
        return ChatChunk(id=self.id, created=self.created, model=self.model, choices=list(choices), **more)

    # --- a whole answer -------------------------------------------------------------------------------------

    def whole(self, replies: Sequence[ReplyFold]) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=list(map(self._choice, replies)),
            usage=usage_of(replies),
            kv=replies[0].receipt,
            unserved=self.unserved,
        )

    def _choice(self, reply: ReplyFold) -> Choice:
        texts, calls = reply.of(PartKind.TEXT), reply.of(PartKind.CALL)
        message = ToldMessage(
            content=reply.text if texts or not calls else None,
            tool_calls=[
                ToldCall(id=call.call_id, function=ToldFunction(name=call.name, arguments=call.text))
                for call in calls
            ]
            or UNSET,
            reasoning_content=reply.reasoning or UNSET,
        )
        return Choice(
            index=reply.number,
            message=message,
            finish_reason=finish_reason(reply),
            logprobs=self._scored(score for part in texts for score in part.scores),
        )

    def _scored(self, scores: Iterable[TokenScore]) -> ChoiceLogprobs | None:
        return ChoiceLogprobs(content=list(map(ScoredToken.of, scores))) if self._logprobs else None


def finish_reason(reply: ReplyFold) -> FinishReason:
    """Why a reply ended, in the standard's words."""
    return FINISH.get(reply.ending, "stop")


def usage_of(replies: Sequence[ReplyFold], choices: int = 0) -> CompletionUsage:
    """The usage of a request from that of its replies. Each prompt counts once; ``choices``: replies of each,
    0 for all."""
    prompts = [reply.usage for reply in replies[:: choices or len(replies)]]
    read = sum(usage.input_tokens for usage in prompts)
    written = sum(reply.usage.output_tokens for reply in replies)
    return CompletionUsage(
        prompt_tokens=read,
        completion_tokens=written,
        total_tokens=read + written,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(usage.cached_tokens for usage in prompts)
        ),
    )
