"""The older Completions protocol: prompts without a chat template, as text or as token ids. It has the bodies
of requests and answers, their translation into turns, and the replies. Also the bodies of ``/tokenize`` and
``/detokenize``.

No session keeps a prompt or its replies; cached KV of a prompt is still found by its tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...sdk.errors import FieldInvalid, FieldUnsupported
from ...sdk.frames.sampling import TokenId
from ...sessions.conversation.items import Preamble
from ...sessions.errors import PromptTooLong
from ...sessions.turn.events import (
    ReplyDone,
    ReplyEvent,
    ReplyPromptScores,
    ReplyStarted,
    ReplyTextDelta,
    TokenScore,
)
from ...sessions.turn.request import TurnRequest
from ...sessions.workers import Stopped
from ..live.sessions import Transcript
from ..live.transcripts import Ask, Transcripts
from .frames import ChatMessage, ChatTool, CompletionUsage, FinishReason, PromptTokensDetails, SamplingBody
from .reply import finish_reason
from .translate import sampling_of, structured_of

MAX_PROMPTS = 256
MOST_CONTEXTS = 16
"""The prompts of one request have at most so many times the tokens that the context holds."""
MAX_LOGPROBS = 20
DEFAULT_TOKENS = 16
"""The most tokens of a reply if its request sets no limit, as the standard has it."""


class CompletionRequest(SamplingBody, kw_only=True, frozen=True):
    """The body of ``POST /v1/completions``.

    ``echo``: the prompt's text comes before the reply's. ``logprobs``: each token's log probability, and those
    of so many alternatives; with ``echo`` also those of the prompt's tokens, but for the first one, and the
    whole prompt is computed for them. ``user`` has no effect.
    """

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool = True


class TokenizeRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /tokenize``: a text (``prompt``), or a conversation (``messages``, with ``tools``)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[ChatTool] | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("Either `prompt` or `messages` must be given")


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /detokenize``: token ids."""

    model: str | None = None
    tokens: list[TokenId]


class Tokenized(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of ``/tokenize``: the token ids and their number, ``count``. ``max_model_len``: the tokens
    that the model's context holds."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of ``/detokenize``: the text, as ``prompt``."""

    prompt: str


REQUEST = msgspec.json.Decoder(CompletionRequest)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def is_unserved(path: str, value: Any) -> bool:
    """Whether the standard has this field, and this server refuses it. ``path``: where it is in the body.
    ``value`` does not matter."""
    return re.sub(r"\[\d+\]", "[]", path) in {"suffix", "prompt_embeds"}


# --- the request --------------------------------------------------------------------------------------------


def ask_of(
    body: CompletionRequest, transcripts: Transcripts, stopped: Stopped = bool
) -> tuple[Ask, list[str]]:
    """The turns that a body asks for, and the text of each prompt if the body wants them echoed, else an empty
    list. ``transcripts``: the model's tokenizer, context and defaults. Takes long for long prompts. Once
    ``stopped`` returns true, the result may be incomplete.

    Raises ``FieldInvalid``, ``FieldUnsupported``, ``PromptTooLong``, and what `TurnRequest.checked` raises.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise FieldUnsupported("`best_of` is served only as the same number as `n`", "best_of")
    bounds, backend = transcripts.bounds, transcripts.tokenizer.backend
    prompts = prompts_of(body, transcripts, stopped)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    request = TurnRequest.checked(
        bounds=bounds,
        out_of_band=True,
        prompt=prompts[0],
        format=structured_of(body),
        max_output_tokens=most,
        top_logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        **sampling_of(body, transcripts.sampling),
    )
    for prompt in prompts[1:]:
        TurnRequest.checked(bounds=bounds, out_of_band=True, prompt=prompt)
    texts = [backend.decode(list(prompt)) for prompt in prompts] if body.echo else []
    return Ask(Transcript(Preamble(), ()), request, body.n or 1, prompts=tuple(prompts)), texts


def prompts_of(
    body: CompletionRequest, transcripts: Transcripts, stopped: Stopped = bool
) -> list[tuple[int, ...]]:
    """The token ids of each prompt in the body's ``prompt``. Raises ``FieldInvalid`` if that is not of a valid
    form, a prompt has no tokens, or all have too many together; ``PromptTooLong`` for the first that does not
    fit into the context."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and all(_is_id(one) for one in given):
        given = [given]
    if not 1 <= len(given) <= MAX_PROMPTS or not all(map(_is_prompt, given)):
        told = f"`prompt` must be a text, 1 to {MAX_PROMPTS} texts, token ids, or lists of token ids"
        raise FieldInvalid(told, "prompt")
    context, special, total = transcripts.context, body.add_special_tokens, 0
    found: list[tuple[int, ...]] = []
    for one in given:
        if isinstance(one, str):
            ids = transcripts.raw_tokens(one, special=special, most=context, stopped=stopped)
        elif len(one) >= context:
            raise PromptTooLong.of(f"it has {len(one)} tokens", context, len(one), param="prompt")
        else:
            ids = one
        if not ids:
            raise FieldInvalid("A prompt has no tokens", "prompt")
        found.append(tuple(ids))
        total += len(ids)
        if total > MOST_CONTEXTS * context:
            most = MOST_CONTEXTS * context
            raise FieldInvalid(f"The prompts have more than {most} tokens together: send fewer", "prompt")
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_id, value)))


# --- the answer ---------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """The log probabilities of a reply's tokens, behind those of the prompt if that is echoed; its first token
    has none. ``text_offset``: where each token begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One reply, or in a stream its new text. ``index``: for the reply with number i (from 0) to the prompt
    with number p (from 0), ``p * n + i``."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to a request, or one event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | UnsetType = UNSET
    object: str = "text_completion"
    system_fingerprint: str | None = None


@dataclass(slots=True)
class _CompletionSoFar:
    text: list[str] = field(default_factory=list)
    prompt: ReplyPromptScores | None = None
    scores: list[TokenScore] = field(default_factory=list)
    length: int = 0  # characters so far
    done: ReplyDone | None = None


class CompletionReply:
    """Makes the answer, or the events of a stream, for all replies to one request. ``reply_id``: the answer's
    id. ``prompts``: the text of each prompt if it is to be echoed; else empty."""

    def __init__(
        self, reply_id: str, model: str, body: CompletionRequest, prompts: Sequence[str] = ()
    ) -> None:
        self.id = reply_id
        self._model = model
        self._choices = body.n or 1
        self._logprobs = body.logprobs is not None
        self._prompts = prompts
        self._created = int(time.time())
        self._replies: dict[int, _CompletionSoFar] = {}

    def chunks(self, number: int, event: ReplyEvent) -> Iterator[Completion]:
        """The stream's chunks for one event of the reply with this number, which is the ``index`` of its
        choice. Raises ``TurnFailed`` for a turn that failed, ``Draining`` for one that the server's end cut
        off."""
        reply = self._reply(number)
        if self._logprobs and isinstance(event, ReplyStarted):
            return  # the prompt's text comes with its scores
        echoed = "".join(reply.text)  # only before the first chunk
        reply.text.clear()
        match event:
            case ReplyPromptScores():
                logprobs = self._scored((), 0, event)
                yield self._part(CompletionChoice(index=number, text=echoed, logprobs=logprobs))
            case ReplyTextDelta(text=text, scores=scores):
                logprobs = self._scored(scores, reply.length)
                reply.length += len(text)
                yield self._part(CompletionChoice(index=number, text=echoed + text, logprobs=logprobs))
            case ReplyDone():
                reply.done = event
                reason = finish_reason(event, called=False)
                yield self._part(CompletionChoice(index=number, text=echoed, finish_reason=reason))
            case _ if echoed:
                yield self._part(CompletionChoice(index=number, text=echoed))

    def usage_chunk(self) -> Completion:
        """The last chunk of a stream, if the client asked for the usage."""
        return self._part(usage=self._usage())

    def add(self, number: int, event: ReplyEvent) -> None:
        """Collect one event of the reply with this number, for `whole`."""
        reply = self._reply(number)
        match event:
            case ReplyPromptScores():
                reply.prompt = event
            case ReplyTextDelta(text=text, scores=scores):
                reply.text.append(text)
                reply.scores += scores
            case ReplyDone():
                reply.done = event

    def whole(self) -> Completion:
        """The answer, after all replies have ended. Raises ``TurnFailed`` if one failed, ``Draining`` if the
        server's end cut one off."""
        choices = []
        for number, reply in sorted(self._replies.items()):
            assert reply.done is not None, "all replies have ended"
            choices.append(
                CompletionChoice(
                    index=number,
                    text="".join(reply.text),
                    finish_reason=finish_reason(reply.done, called=False),
                    logprobs=self._scored(reply.scores, reply.length, reply.prompt),
                )
            )
        return self._part(*choices, usage=self._usage())

    def _reply(self, number: int) -> _CompletionSoFar:
        if number not in self._replies:
            echoed = [self._prompts[number // self._choices]] if self._prompts else []
            self._replies[number] = _CompletionSoFar(text=echoed, length=sum(map(len, echoed)))
        return self._replies[number]

    def _part(self, *choices: CompletionChoice, usage: CompletionUsage | UnsetType = UNSET) -> Completion:
        return Completion(
            id=self.id, created=self._created, model=self._model, choices=list(choices), usage=usage
        )

    def _scored(
        self, scores: Sequence[TokenScore], offset: int, prompt: ReplyPromptScores | None = None
    ) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        first = [] if prompt is None else [prompt.first]
        before = () if prompt is None else prompt.scores
        known = [*before, *scores]
        return CompletionLogprobs(
            tokens=[*first, *(score.text for score in known)],
            token_logprobs=[*(None for _ in first), *(score.logprob for score in known)],
            top_logprobs=[
                *(None for _ in first),
                *({other.text: other.logprob for other in (*score.top, score)} for score in known),
            ],
            text_offset=[
                *_offsets([*first, *(score.text for score in before)], 0),
                *_offsets([score.text for score in scores], offset),
            ],
        )

    def _usage(self) -> CompletionUsage:
        """The token counts of the request: each prompt counts once, however many replies it has."""
        done = {number: reply.done.usage for number, reply in self._replies.items() if reply.done is not None}
        firsts = [usage for number, usage in done.items() if number % self._choices == 0]
        read = sum(usage.input_tokens for usage in firsts)
        written = sum(usage.output_tokens for usage in done.values())
        cached = sum(usage.cached_tokens for usage in firsts)
        return CompletionUsage(
            prompt_tokens=read,
            completion_tokens=written,
            total_tokens=read + written,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


def _offsets(tokens: Sequence[str], first: int) -> list[int]:
    """Where each of these texts begins, if they follow each other from ``first`` on."""
    return list(accumulate(map(len, tokens), initial=first))[:-1]
