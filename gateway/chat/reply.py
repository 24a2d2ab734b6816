"""The replies to one request of Chat Completions: `ReplyEvent`s in, a stream's chunks or a whole answer out.
Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from ...sdk.frames.response import KVReceipt
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
from ..errors import Draining
from ..live.usage import receipt_of
from .frames import (
    AlternativeToken,
    CallDelta,
    ChatChunk,
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    CompletionUsage,
    Delta,
    FinishReason,
    PromptTokensDetails,
    ScoredToken,
    ToldCall,
    ToldFunction,
    ToldMessage,
)


@dataclass(slots=True)
class _Reply:
    """What was collected of one choice so far. ``scores``: its tokens' log probabilities. ``messages``: ids of
    its message items. ``begun``: its first chunk was made. ``done``: its last event."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToldCall] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    messages: set[str] = field(default_factory=set)
    begun: bool = False
    done: ReplyDone | None = None


class ChatReply:
    """Makes the answer, or the chunks of a stream, for all replies to one request. ``reply_id``: the answer's
    id. ``choices``: the number of replies. ``logprobs``: the client asked for log probabilities."""

    def __init__(self, reply_id: str, model: str, *, choices: int = 1, logprobs: bool = False) -> None:
        self.id = reply_id
        self._model = model
        self._created = int(time.time())
        self._logprobs = logprobs
        self._replies = [_Reply() for _ in range(choices)]

    # --- a stream -------------------------------------------------------------------------------------------

    def chunks(self, number: int, event: ReplyEvent) -> Iterator[ChatChunk]:
        """The stream's chunks for one event of the choice with this number. Raises ``TurnFailed`` for a turn
        that failed, ``Draining`` for one that the server's end cut off."""
        reply = self._replies[number]
        if not reply.begun:
            reply.begun = True
            yield self._chunk(ChunkChoice(index=number, delta=Delta(role="assistant", content="")))
        match event:
            case ReplyTextDelta(item_id=item_id, text=text, scores=scores):
                delta = Delta(content=_gap(reply, item_id) + text)
                yield self._chunk(ChunkChoice(index=number, delta=delta, logprobs=self._scored(scores)))
            case ReplyReasoningDelta(text=text):
                yield self._chunk(ChunkChoice(index=number, delta=Delta(reasoning_content=text)))
            case ReplyCallStarted(call_id=call_id, name=name):
                place = len(reply.calls)
                reply.calls.append(ToldCall(id=call_id, function=ToldFunction(name=name)))
                called = ToldFunction(name=name, arguments="")
                yield self._call(number, CallDelta(index=place, id=call_id, type="function", function=called))
            case ReplyArgumentsDelta(delta=arguments):
                place = len(reply.calls) - 1
                function = ToldFunction(arguments=arguments)
                yield self._call(number, CallDelta(index=place, function=function))
            case ReplyDone():
                reply.done = event
                reason = self._reason(reply)
                yield self._chunk(ChunkChoice(index=number, delta=Delta(), finish_reason=reason))

    def usage_chunk(self) -> ChatChunk:
        """The last chunk of a stream, if the client asked for the usage."""
        return ChatChunk(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=self._usage(),
            kv=self._receipt(),
        )

    def _call(self, number: int, call: CallDelta) -> ChatChunk:
        return self._chunk(ChunkChoice(index=number, delta=Delta(tool_calls=[call])))

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return ChatChunk(id=self.id, created=self._created, model=self._model, choices=[choice])

    # --- a whole answer -------------------------------------------------------------------------------------

    def add(self, number: int, event: ReplyEvent) -> None:
        """Collect one event of the choice with this number, for `whole`."""
        reply = self._replies[number]
        match event:
            case ReplyTextDelta(item_id=item_id, text=text, scores=scores):
                reply.text.append(_gap(reply, item_id) + text)
                if (scored := self._scored(scores)) is not None:
                    reply.scores += scored.content or ()
            case ReplyReasoningDelta(text=text):
                reply.reasoning.append(text)
            case ReplyCallDone(call_id=call_id, name=name, arguments=arguments):
                called = ToldFunction(name=name, arguments=arguments)
                reply.calls.append(ToldCall(id=call_id, function=called))
            case ReplyDone():
                reply.done = event

    def whole(self) -> ChatCompletion:
        """The answer, after all choices have ended. Raises ``TurnFailed`` if one failed, ``Draining`` if the
        server's end cut one off."""
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._choice(number, reply) for number, reply in enumerate(self._replies)],
            usage=self._usage(),
            kv=self._receipt(),
        )

    def _choice(self, number: int, reply: _Reply) -> Choice:
        text = "".join(reply.text)
        message = ToldMessage(
            content=text if text or not reply.calls else None,
            tool_calls=reply.calls or UNSET,
            reasoning_content="".join(reply.reasoning) or UNSET,
        )
        logprobs = ChoiceLogprobs(content=reply.scores) if self._logprobs else None
        return Choice(index=number, message=message, finish_reason=self._reason(reply), logprobs=logprobs)

    # --- both -----------------------------------------------------------------------------------------------

    def _scored(self, scores: Iterable[TokenScore]) -> ChoiceLogprobs | None:
        return ChoiceLogprobs(content=[scored_token(score) for score in scores]) if self._logprobs else None

    def _reason(self, reply: _Reply) -> FinishReason:
        done = reply.done
        assert done is not None, "the reply has ended"
        return finish_reason(done, called=bool(reply.calls))

    def _usage(self) -> CompletionUsage:
        return usage_of(reply.done.usage for reply in self._replies if reply.done is not None)

    def _receipt(self) -> KVReceipt | UnsetType:
        done = self._replies[0].done
        return UNSET if done is None else receipt_of(done.usage)


def _gap(reply: _Reply, item_id: str) -> str:
    """The text to put before more text of the message ``item_id``: a line break where a further message of the
    reply begins, else nothing. A reply with a tool call in its middle has several messages, and Chat
    Completions has one text. It also notes that the message has begun."""
    first = item_id not in reply.messages
    reply.messages.add(item_id)
    return "\n" if first and len(reply.messages) > 1 else ""


def finish_reason(done: ReplyDone, *, called: bool) -> FinishReason:
    """Why a reply ended, in the standard's words. ``done``: its last event; ``called``: it has a tool call.
    Raises the error of a turn that failed, or ``Draining`` if the server's end cut it off."""
    if done.status is ReplyStatus.FAILED:
        raise done.error or TurnFailed("The turn failed")
    if done.reason is EndReason.SERVER_LEAVING:
        raise Draining("The server is going away")
    if done.reason in (EndReason.MAX_OUTPUT_TOKENS, EndReason.REPETITION):
        return "length"
    return "tool_calls" if called else "stop"


def usage_of(parts: Iterable[TurnUsage]) -> CompletionUsage:
    """The usage of a request from that of its turns, one for each choice. The prompt counts once."""
    usages = list(parts)
    first = usages[0] if usages else TurnUsage()
    output = sum(usage.output_tokens for usage in usages)
    return CompletionUsage(
        prompt_tokens=first.input_tokens,
        completion_tokens=output,
        total_tokens=first.input_tokens + output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=first.cached_tokens),
    )


def scored_token(score: TokenScore) -> ScoredToken:
    """A token's log probability and those of the likeliest tokens at its place, as the answer has them."""
    top = [_alternative(other) for other in score.top]
    own = _alternative(score)
    return ScoredToken(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)


def _alternative(score: TokenScore) -> AlternativeToken:
    whole = "�" not in score.text
    spelled = list(score.text.encode()) if whole else None
    return AlternativeToken(token=score.text, logprob=score.logprob, bytes=spelled)
