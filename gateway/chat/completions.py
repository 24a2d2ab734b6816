"""The older Completions protocol: prompts without a chat template, as text or as token ids. It has the bodies
of requests and answers, their translation into turns, and the replies. Also the bodies of ``/tokenize`` and
``/detokenize``.

No session keeps a prompt or its replies; cached KV of a prompt is still found by its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...sdk.errors import FieldInvalid, FieldUnsupported
from ...sdk.frames.sampling import TokenId
from ...sessions.conversation.items import Preamble
from ...sessions.errors import PromptTooLong
from ...sessions.turn.events import TokenScore
from ...sessions.turn.request import TurnRequest
from ...sessions.workers import Stopped
from ..clients import COMPLETIONS, RefusedFields, accepting
from ..live.reply import ReplyFold, ReplyPart
from ..live.requests import grammar_of, names_in, renaming
from ..live.sessions import Transcript
from ..live.transcripts import Ask, Transcripts
from .frames import ChatMessage, ChatTool, CompletionUsage, FinishReason, SamplingBody
from .reply import OpenAIAnswer, finish_reason, usage_of
from .translate import sampling_in, structured_of

MAX_PROMPTS = 256
MOST_CONTEXTS = 16
"""The prompts of one request have at most so many times the tokens that the context holds."""
MAX_LOGPROBS = 20
DEFAULT_TOKENS = 16
"""The most tokens of a reply if its request sets no limit, as the standard has it."""


class CompletionRequest(SamplingBody, kw_only=True, frozen=True, rename={"max_output_tokens": "max_tokens"}):
    """The body of ``POST /v1/completions``.

    ``echo``: the prompt's text comes before the reply's. ``logprobs``: each token's log probability, and those
    of so many alternatives; with ``echo`` also those of the prompt's tokens, but for the first one, and the
    whole prompt is computed for them.
    """

    prompt: str | list[Any]
    max_output_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
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


ACCEPTED = accepting(CompletionRequest, COMPLETIONS)
REQUEST = msgspec.json.Decoder(ACCEPTED)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)
REFUSED = RefusedFields(frozenset({"suffix", "prompt_embeds"}))


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
    given = {**transcripts.sampling, "max_output_tokens": DEFAULT_TOKENS, **sampling_in(body)}
    given["max_output_tokens"] = given["max_output_tokens"] or 1
    with renaming({**names_in(type(body)), "top_logprobs": "logprobs"}):
        request = TurnRequest.checked(
            **{**given, "top_logprobs": body.logprobs},
            bounds=bounds,
            out_of_band=True,
            prompt=prompts[0],
            format=grammar_of(structured_of(body)),
            prompt_logprobs=body.logprobs if body.echo else None,
            ignore_eos=bool(body.ignore_eos),
        )
    for prompt in prompts[1:]:
        TurnRequest.checked(bounds=bounds, out_of_band=True, prompt=prompt)
    texts = [backend.decode(list(prompt)) for prompt in prompts] if body.echo else []
    ask = Ask(Transcript(Preamble(), ()), request, body.n or 1, prompts=tuple(prompts))
    return ask if body.max_output_tokens != 0 else ask.prefilling(), texts


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


class CompletionAnswer(OpenAIAnswer[Completion]):
    """The answer of Completions. The ``index`` of a choice is the number of its reply. ``prompts``: the text of
    each prompt if it is to be echoed; else empty."""

    def __init__(self, model: str, body: CompletionRequest, prompts: Sequence[str] = ()) -> None:
        super().__init__("cmpl", model, body)
        self._choices = body.n or 1
        self._logprobs = body.logprobs is not None
        self._prompts = prompts
        self._lengths: dict[int, int] = {}  # characters so far, by the reply's number

    # --- a stream -------------------------------------------------------------------------------------------

    def started(self, reply: ReplyFold) -> Iterator[Completion]:
        if not self._logprobs and (echoed := self._echoed(reply)):  # else it comes with its scores
            yield self._part(CompletionChoice(index=reply.number, text=echoed))

    def scored(self, reply: ReplyFold) -> Iterator[Completion]:
        logprobs = self._scored(reply, 0, ())
        yield self._part(CompletionChoice(index=reply.number, text=self._echoed(reply), logprobs=logprobs))

    def grew(
        self, reply: ReplyFold, part: ReplyPart, text: str, scores: tuple[TokenScore, ...]
    ) -> Iterator[Completion]:
        offset = self._lengths.setdefault(reply.number, len(self._echoed(reply)))
        self._lengths[reply.number] += len(text)
        logprobs = self._scored(None, offset, scores)
        yield self._part(CompletionChoice(index=reply.number, text=text, logprobs=logprobs))

    def finished(self, reply: ReplyFold) -> Iterator[Completion]:
        yield self._part(CompletionChoice(index=reply.number, text="", finish_reason=finish_reason(reply)))

    def usage_chunk(self, replies: Sequence[ReplyFold]) -> Completion:
        return self._part(usage=usage_of(replies, self._choices))

    # --- a whole answer -------------------------------------------------------------------------------------

    def whole(self, replies: Sequence[ReplyFold]) -> Completion:
        return self._part(*map(self._choice, replies), usage=usage_of(replies, self._choices))

    def _choice(self, reply: ReplyFold) -> CompletionChoice:
        echoed = self._echoed(reply)
        scores = [score for part in reply.parts for score in part.scores]
        return CompletionChoice(
            index=reply.number,
            text=echoed + "".join(part.text for part in reply.parts),
            finish_reason=finish_reason(reply),
            logprobs=self._scored(reply, len(echoed), scores),
        )

    def _echoed(self, reply: ReplyFold) -> str:
        return self._prompts[reply.number // self._choices] if self._prompts else ""

    def _part(self, *choices: CompletionChoice, usage: CompletionUsage | UnsetType = UNSET) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=list(choices), usage=usage
        )

    def _scored(
        self, echoed: ReplyFold | None, offset: int, scores: Sequence[TokenScore]
    ) -> CompletionLogprobs | None:
        """The log probabilities of tokens that begin at ``offset`` of the text, behind those of the prompt of
        ``echoed``."""
        if not self._logprobs:
            return None
        prompt = None if echoed is None else echoed.prompt
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


def _offsets(tokens: Sequence[str], first: int) -> list[int]:
    """Where each of these texts begins, if they follow each other from ``first`` on."""
    return list(accumulate(map(len, tokens), initial=first))[:-1]
