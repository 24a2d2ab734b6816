"""The outputs of `offline.LLM`, in the shape of vLLM's: ``RequestOutput``, ``CompletionOutput``, ``Logprob``;
and `GrowingCompletion`, which collects one from the events of a running reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ...sessions.errors import TurnFailed
from ...sessions.turn.events import (
    EndReason,
    ReplyCallDone,
    ReplyEvent,
    ReplyPromptScores,
    ReplyReasoningDelta,
    ReplyTextDelta,
    TokenScore,
)
from ...sessions.turn.generation import ReplyEnd
from ...sessions.turn.reply_reader import ReplyReader

FinishReason: TypeAlias = Literal["stop", "length", "repetition", "error"]

_REASONS: dict[EndReason, FinishReason] = {
    EndReason.STOP: "stop",
    EndReason.MAX_OUTPUT_TOKENS: "length",
    EndReason.REPETITION: "repetition",
}


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token at one position of a prompt or completion, as the model gives it, before
    temperature, filters and penalties.

    ``rank``: 1 for the likeliest token; None for a token of the text that is not among the likeliest ones that
    were asked for. ``decoded_token``: what the token decodes to alone; a part of a character is U+FFFD.
    """

    logprob: float
    rank: int | None
    decoded_token: str

    @classmethod
    def by_token(cls, score: TokenScore) -> dict[int, Logprob]:
        """The token of the text first, then the likeliest ones, by their ids."""
        ranks = {other.token: rank for rank, other in enumerate(score.top, 1)}
        each = (score, *(other for other in score.top if other.token != score.token))
        return {one.token: cls(one.logprob, ranks.get(one.token), one.text) for one in each}


@dataclass(frozen=True, slots=True)
class OutputCall:
    """A tool call in a reply. ``arguments``: JSON text. ``complete``: false if the arguments are cut off or no
    valid JSON."""

    id: str
    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    ``index``: 0 to ``n`` - 1. ``text``: without special tokens and without what ended it. ``token_ids``:
    ``[tokens]``, with the end token, stop id or the ids of the stop string that ended it. ``logprobs``: for
    each of ``token_ids`` a dict by token id, with the sampled token first and then the likeliest ones;
    ``cumulative_logprob``: the sum of the sampled tokens' log probabilities. Both are None unless
    `SamplingParams.logprobs` is set.

    ``finish_reason``: ``stop`` (the model's end token, a stop id or a stop string), ``length`` (``max_tokens``,
    or a full context), ``repetition`` (only in `LLM.chat`: the same tokens came again and again, as in a
    session), ``error``. ``stop_reason``: the stop string or stop id that ended it; None for the model's own
    end. ``error``: why it failed; its ``code`` is stable, and the text so far stays.

    ``reasoning``, ``tool_calls``: only in `LLM.chat`, which reads them out of the text as a session does.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: list[OutputCall] = field(default_factory=list)
    error: TurnFailed | None = None

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions.

    ``request_id``: counts the prompts of one `LLM`. ``prompt``: the text, for a conversation as the chat
    template writes it; None if only ids were given. ``prompt_token_ids``: ``[tokens]``. ``outputs``: ``n``
    completions in order. ``num_cached_tokens``: prompt tokens that needed no computing for the first of them.
    ``prompt_logprobs``: ``[tokens]``; None for the first token, and for each other one a dict by token id, with
    the prompt's own token first and then the likeliest ones. It is None unless `SamplingParams.prompt_logprobs`
    is set, and if the first completion failed before it had a token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class CompletionPiece(str):
    """Text that a running completion has added: a ``str`` with its origin. ``prompt``: the index of its prompt
    in the call, from 0. ``completion``: which of that prompt's ``n`` completions, from 0."""

    __slots__ = ("completion", "prompt")

    prompt: int
    completion: int

    @classmethod
    def of(cls, text: str, prompt: int, completion: int) -> CompletionPiece:
        """Make a piece with this text. ``prompt``: the index of its prompt in the call, from 0. ``completion``:
        which of that prompt's completions, from 0."""
        piece = cls(text)
        piece.prompt, piece.completion = prompt, completion
        return piece


class GrowingCompletion:
    """One completion while it is generated. `take` takes in the events of its reply and gives the text that
    they add; `output` makes the output at the end.

    ``index``: which of its prompt's completions it is, from 0. ``reader``: the reader of its reply, which has
    the token ids and log probabilities. ``keep_stop``: the stop string that ends it stays in its text.

    ``prompt_logprobs``: those of `RequestOutput`, once the reply has told them.
    """

    def __init__(self, index: int, reader: ReplyReader, *, keep_stop: bool) -> None:
        self._index = index
        self._reader = reader
        self._keep_stop = keep_stop
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[OutputCall] = []
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def take(self, events: Iterable[ReplyEvent]) -> str:
        """Take in the next events of the reply. Returns the text that they add."""
        texts: list[str] = []
        for event in events:
            match event:
                case ReplyTextDelta(text=text):
                    texts.append(text)
                case ReplyReasoningDelta(text=text):
                    self._reasoning.append(text)
                case ReplyCallDone(call_id=call_id, name=name, arguments=arguments, complete=complete):
                    self._calls.append(OutputCall(call_id, name, arguments, complete))
                case ReplyPromptScores(scores=scores):
                    self.prompt_logprobs = [None, *map(Logprob.by_token, scores)]
        self._texts += texts
        return "".join(texts)

    def end(self) -> str:
        """Call it after the last events. Returns the text that is to be added at the end: the stop string, if
        it stays; else nothing."""
        kept = self._reader.stopped_by or "" if self._keep_stop else ""
        self._texts.append(kept)
        return kept

    def output(self, ending: ReplyEnd) -> CompletionOutput:
        """Make the output of the completion. ``ending``: how the reply has ended."""
        reader = self._reader
        ids, scores = list(reader.ids), list(map(reader.score, reader.ids, reader.logprobs))
        told = bool(ids) and len(scores) == len(ids)
        return CompletionOutput(
            index=self._index,
            text="".join(self._texts),
            token_ids=ids,
            cumulative_logprob=sum(score.logprob for score in scores) if told else None,
            logprobs=list(map(Logprob.by_token, scores)) if told else None,
            finish_reason=_REASONS.get(ending.reason, "error"),
            stop_reason=ids[-1] if reader.halted else reader.stopped_by,
            reasoning="".join(self._reasoning),
            tool_calls=self._calls,
            error=ending.error,
        )
