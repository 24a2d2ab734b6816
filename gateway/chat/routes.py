"""The routes of Chat Completions and of Completions, and of tokenizing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...sdk.frames.codec import decode_body
from ...sessions.conversation.items import new_id
from ...sessions.errors import PromptTooLong
from ...sessions.turn.events import ReplyDone
from ..access.auth import caller_of, refusing
from ..documents.rows import RouteRow
from ..errors import http_answer
from ..live.session import log_refusal
from ..live.transcripts import AskedTurn
from ..net.bodies import (
    DONE,
    IDS,
    PROMPTS,
    TEXT,
    EventStream,
    json_answer,
    sent_event,
    while_connected,
)
from ..service import Service
from . import completions, frames
from .reply import ChatReply
from .translate import ask_of, tools_of, transcript_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


ROWS = (
    RouteRow(
        "POST",
        CHAT,
        "Reply to a conversation.",
        request=frames.ChatRequest,
        response=frames.ChatCompletion,
        streamed=frames.ChatChunk,
        group="Chat Completions",
    ),
    RouteRow(
        "POST",
        COMPLETIONS,
        "Continue prompts without a chat template.",
        request=completions.CompletionRequest,
        response=completions.Completion,
        streamed=completions.Completion,
        group="Chat Completions",
    ),
    RouteRow(
        "POST",
        TOKENIZE,
        "The token ids of a text, or of a conversation's prompt.",
        request=completions.TokenizeRequest,
        response=completions.Tokenized,
        group="Tokens",
    ),
    RouteRow(
        "POST",
        DETOKENIZE,
        "The text of token ids, special tokens included.",
        request=completions.DetokenizeRequest,
        response=completions.Detokenized,
        group="Tokens",
    ),
)
"""The routes of this module as rows of the OpenAPI document."""


def chat_routes(service: Service) -> list[Route]:
    """Make the routes ``/v1/chat/completions``, ``/v1/completions``, ``/tokenize`` and ``/detokenize``."""
    face = _ChatFace(service)
    served = (
        (CHAT, face.chat),
        (COMPLETIONS, face.complete),
        (TOKENIZE, face.tokenize),
        (DETOKENIZE, face.detokenize),
    )
    return [Route(path, refusing(serve), methods=["POST"]) for path, serve in served]


class _ChatFace:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        """Serve ``POST /v1/chat/completions``: run the turn and answer with all replies, or with a stream."""
        client = caller_of(request.scope)
        body, size = await self._service.read(
            request, lambda data: decode_body(data, frames.REQUEST, frames.is_unserved)
        )
        transcripts = await self._service.transcripts(body.model)
        bounds, sampling, most = transcripts.bounds, transcripts.sampling, transcripts.default_max_tokens
        ask = await self._service.aside(client.salt, size, lambda _: ask_of(body, bounds, sampling, most))
        model = body.model or self._service.model
        reply_id = new_id("chatcmpl").replace("_", "-")
        reply = ChatReply(reply_id, model, choices=ask.choices, logprobs=bool(body.logprobs))
        async with AsyncExitStack() as stack:
            turn = await stack.enter_async_context(transcripts.turn(client, ask, reply.id))
            if not body.stream:
                await while_connected(request, turn.whole(reply.add))
                await turn.durable()
                return json_answer(reply.whole(), headers={"x-request-id": reply.id})
            usage = bool(body.stream_options and body.stream_options.include_usage)
            kept = stack.pop_all()
            events = _streamed(kept, turn, reply, usage=usage)
            ended = partial(self._service.spawn_end, kept)
            return EventStream(events, {"x-request-id": reply.id}, ended)
        raise AssertionError("the block above returns")

    async def complete(self, request: Request) -> Response:
        """Serve ``POST /v1/completions``: complete the prompts and answer with all replies, or with a
        stream."""
        client = caller_of(request.scope)
        body, size = await self._service.read(
            request,
            lambda data: decode_body(data, completions.REQUEST, completions.is_unserved),
            PROMPTS,
        )
        transcripts = await self._service.transcripts(body.model)
        ask, prompts = await self._service.aside(
            client.salt, size, lambda stopped: completions.ask_of(body, transcripts, stopped)
        )
        model = body.model or self._service.model
        reply = completions.CompletionReply(new_id("cmpl").replace("_", "-"), model, body, prompts)
        async with AsyncExitStack() as stack:
            turn = await stack.enter_async_context(transcripts.turn(client, ask, reply.id))
            if not body.stream:
                await while_connected(request, turn.whole(reply.add))
                await turn.durable()
                return json_answer(reply.whole(), headers={"x-request-id": reply.id})
            usage = bool(body.stream_options and body.stream_options.include_usage)
            kept = stack.pop_all()
            events = _streamed(kept, turn, reply, usage=usage)
            ended = partial(self._service.spawn_end, kept)
            return EventStream(events, {"x-request-id": reply.id}, ended)
        raise AssertionError("the block above returns")

    async def tokenize(self, request: Request) -> Response:
        """Serve ``POST /tokenize``: answer with the token ids of a text, or of a conversation's prompt."""
        client = caller_of(request.scope)
        body, size = await self._service.read(
            request, lambda data: decode_body(data, completions.TOKENIZE), TEXT
        )
        transcripts = await self._service.transcripts(body.model)
        text, special, context = body.prompt, body.add_special_tokens, transcripts.context

        def answer(ids: list[int]) -> Response:
            return json_answer(completions.Tokenized(count=len(ids), max_model_len=context, tokens=ids))

        if text is not None:
            return await self._service.aside(
                client.salt,
                size,
                lambda stopped: answer(transcripts.raw_tokens(text, special=special, stopped=stopped)),
            )
        transcript = transcript_of(body.messages or (), tools_of(body.tools or ()))
        return answer(await transcripts.prompt_tokens(client, transcript))

    async def detokenize(self, request: Request) -> Response:
        """Serve ``POST /detokenize``: answer with the text of token ids, special tokens included. There may be
        as many as the context holds."""
        body, size = await self._service.read(
            request, lambda data: decode_body(data, completions.DETOKENIZE), IDS
        )
        transcripts = await self._service.transcripts(body.model)
        most = transcripts.context
        if len(body.tokens) > most:
            raise PromptTooLong.of(
                f"there are {len(body.tokens)} token ids", most, len(body.tokens), param="tokens"
            )
        return await self._service.aside(
            caller_of(request.scope).salt,
            size,
            lambda _: json_answer(completions.Detokenized(prompt=transcripts.raw_text(body.tokens))),
        )


async def _streamed(
    stack: AsyncExitStack,
    turn: AskedTurn,
    reply: ChatReply | completions.CompletionReply,
    *,
    usage: bool,
) -> AsyncIterator[bytes]:
    """The server-sent events of a streamed answer, encoded, some at a time. ``stack``: closing it, at the end,
    ends the turn. ``reply`` makes the chunks. ``usage``: a last chunk has the usage. An error ends the stream
    with an event that has the error object."""
    async with stack:
        try:
            async for batch in turn.events():
                if any(isinstance(event, ReplyDone) for _, event in batch):
                    await turn.durable()
                chunks = [
                    sent_event(chunk) for number, event in batch for chunk in reply.chunks(number, event)
                ]
                if chunks:
                    yield b"".join(chunks)
        except Exception as error:
            log_refusal(turn.live.id, error)
            body, _, _ = http_answer(error)
            yield sent_event(body)
            return
        yield (sent_event(reply.usage_chunk()) if usage else b"") + DONE
