"""The routes of Chat Completions and of Completions, and of tokenizing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ...sdk.frames.codec import decode_body
from ...sessions.errors import PromptTooLong
from ..access.auth import caller_of
from ..answers import answered
from ..clients import Asked, asked
from ..documents.rows import RouteRow
from ..live.requests import tools_of
from ..net.bodies import IDS, PROMPTS, TEXT, json_answer
from ..service import Service
from . import completions, frames
from .reply import ChatAnswer
from .translate import ask_of, transcript_of


async def chat(service: Service, request: Request) -> Response:
    """Serve ``POST /v1/chat/completions``."""
    client = caller_of(request.scope)
    given, size = await service.read(request, _chat)
    body = given.body
    transcripts = await service.transcripts(body.model)
    bounds, sampling, most = transcripts.bounds, transcripts.sampling, transcripts.default_max_tokens
    ask = await service.aside(client.salt, size, lambda _: ask_of(body, bounds, sampling, most))
    answer = ChatAnswer(body.model or service.model, given)
    return await answered(service, request, client, transcripts, ask, answer)


async def complete(service: Service, request: Request) -> Response:
    """Serve ``POST /v1/completions``."""
    client = caller_of(request.scope)
    body, size = await service.read(
        request,
        lambda data: decode_body(data, completions.REQUEST, completions.REFUSED),
        PROMPTS,
    )
    transcripts = await service.transcripts(body.model)
    ask, prompts = await service.aside(
        client.salt, size, lambda stopped: completions.ask_of(body, transcripts, stopped)
    )
    answer = completions.CompletionAnswer(body.model or service.model, body, prompts)
    return await answered(service, request, client, transcripts, ask, answer)


async def tokenize(service: Service, request: Request) -> Response:
    """Serve ``POST /tokenize``: answer with the token ids of a text, or of a conversation's prompt."""
    client = caller_of(request.scope)
    given, size = await service.read(request, _tokenize, TEXT)
    body = given.body
    transcripts = await service.transcripts(body.model)
    text, special, context = body.prompt, body.add_special_tokens, transcripts.context

    def answer(ids: list[int]) -> Response:
        told = completions.Tokenized(count=len(ids), max_model_len=context, tokens=ids)
        return json_answer(told, headers=given.headers)

    if text is not None:
        return await service.aside(
            client.salt,
            size,
            lambda stopped: answer(transcripts.raw_tokens(text, special=special, stopped=stopped)),
        )
    transcript = transcript_of(body.messages or (), tools_of(tool.function for tool in body.tools or ()))
    return answer(await transcripts.prompt_tokens(client, transcript))


async def detokenize(service: Service, request: Request) -> Response:
    """Serve ``POST /detokenize``: answer with the text of token ids, special tokens included. There may be
    as many as the context holds."""
    body, size = await service.read(request, lambda data: decode_body(data, completions.DETOKENIZE), IDS)
    transcripts = await service.transcripts(body.model)
    most = transcripts.context
    if len(body.tokens) > most:
        raise PromptTooLong.of(
            f"there are {len(body.tokens)} token ids", most, len(body.tokens), param="tokens"
        )
    return await service.aside(
        caller_of(request.scope).salt,
        size,
        lambda _: json_answer(completions.Detokenized(prompt=transcripts.raw_text(body.tokens))),
    )


def _chat(data: bytes) -> Asked[frames.ChatRequest]:
    return asked(data, lambda left: decode_body(left, frames.REQUEST, frames.REFUSED), frames.UNSERVED_TOOLS)


def _tokenize(data: bytes) -> Asked[completions.TokenizeRequest]:
    return asked(data, lambda left: decode_body(left, completions.TOKENIZE), frames.UNSERVED_TOOLS)


ROWS = (
    RouteRow(
        "POST",
        "/v1/chat/completions",
        "Reply to a conversation.",
        chat,
        request=frames.ACCEPTED,
        response=frames.ChatCompletion,
        streamed=frames.ChatChunk,
        group="Chat Completions",
    ),
    RouteRow(
        "POST",
        "/v1/completions",
        "Continue prompts without a chat template.",
        complete,
        request=completions.ACCEPTED,
        response=completions.Completion,
        streamed=completions.Completion,
        group="Chat Completions",
    ),
    RouteRow(
        "POST",
        "/tokenize",
        "The token ids of a text, or of a conversation's prompt.",
        tokenize,
        request=completions.TokenizeRequest,
        response=completions.Tokenized,
        group="Tokens",
    ),
    RouteRow(
        "POST",
        "/detokenize",
        "The text of token ids, special tokens included.",
        detokenize,
        request=completions.DetokenizeRequest,
        response=completions.Detokenized,
        group="Tokens",
    ),
)
"""The routes of this module."""
