"""The HTTP routes of Anthropic's Messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...sdk.errors import FieldUnsupported
from ...sdk.frames.codec import decode_body
from ...sessions.turn.events import ReplyDone
from ..access.auth import MESSAGES, REQUEST, TurnCaller, caller_of, refusing
from ..documents.rows import RouteRow
from ..errors import ThreadsNotServed, messages_answer
from ..live.session import log_refusal
from ..live.transcripts import AskedTurn, Transcripts
from ..net.bodies import EventStream, json_answer, sent_event, while_connected
from ..service import Service
from . import frames
from .reply import MessageReply
from .translate import ask_of, begun, transcript_of

_T = TypeVar("_T", bound=frames.MessagesConversation)
PING = sent_event(frames.Ping(), "ping")


COUNT = f"{MESSAGES}/count_tokens"
ROWS = (
    RouteRow(
        "POST",
        MESSAGES,
        "Reply to a conversation.",
        request=frames.MessagesRequest,
        response=frames.MessageAnswer,
        streamed=frames.MessageEvent,
        refused=frames.MessagesError,
        group="Anthropic Messages",
    ),
    RouteRow(
        "POST",
        COUNT,
        "Count the tokens of a conversation's prompt.",
        request=frames.CountRequest,
        response=frames.TokenCount,
        refused=frames.MessagesError,
        group="Anthropic Messages",
    ),
)
"""The routes of this module as rows of the OpenAPI document."""


def messages_routes(service: Service) -> list[Route]:
    """Make the routes ``/v1/messages`` and ``/v1/messages/count_tokens``."""
    face = _MessagesFace(service)
    served = ((MESSAGES, face.create), (COUNT, face.count))
    return [Route(path, refusing(serve), methods=["POST"]) for path, serve in served]


class _MessagesFace:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._limits = service.settings.limits

    async def create(self, request: Request) -> Response:
        """Serve ``POST /v1/messages``: run the turn and answer with the reply, or with a stream."""
        client = caller_of(request.scope)
        body, size = await self._read(request, frames.REQUEST)
        transcripts = await self._service.transcripts(body.model)
        prompt = None
        if begun(body):
            prompt = tuple(await self._begun_prompt(transcripts, client, body, size))
        bounds, sampling = transcripts.bounds, transcripts.sampling
        ask = await self._service.aside(client.salt, size, lambda _: ask_of(body, bounds, sampling, prompt))
        reply, request_id = MessageReply(body.model, body), request.scope[REQUEST]
        headers = {"request-id": request_id}
        async with AsyncExitStack() as stack:
            turn = await stack.enter_async_context(transcripts.turn(client, ask, reply.id))
            if body.stream:
                kept = stack.pop_all()
                events = _streamed(kept, turn, reply, request_id, self._limits.ping_seconds)
                ended = partial(self._service.spawn_end, kept)
                return EventStream(events, headers, ended)
            await while_connected(request, turn.whole(reply.add))
            await turn.durable()
            return json_answer(reply.whole(), headers=headers)
        raise AssertionError("the block above returns")

    async def count(self, request: Request) -> Response:
        """Serve ``POST /v1/messages/count_tokens``: answer with the number of tokens of a conversation's
        prompt."""
        body, size = await self._read(request, frames.COUNT)
        transcripts = await self._service.transcripts(body.model)
        ids = await self._begun_prompt(transcripts, caller_of(request.scope), body, size)
        headers = {"request-id": request.scope[REQUEST]}
        return json_answer(frames.TokenCount(input_tokens=len(ids)), headers=headers)

    async def _begun_prompt(
        self,
        transcripts: Transcripts,
        client: TurnCaller,
        body: frames.MessagesRequest | frames.CountRequest,
        size: int,
    ) -> list[int]:
        """The token ids of the prompt. ``size``: of the body, in bytes. If the last message is the assistant's,
        its text is put behind the opening of the reply, so that the reply continues it. Raises
        ``FieldUnsupported`` if there is such a text and the model's replies do not begin with their text."""
        text = begun(body)
        if text and not transcripts.opens_plainly:
            told = (
                "This model reasons before it answers: a reply cannot continue the assistant's last message"
            )
            raise FieldUnsupported(told, f"messages[{len(body.messages) - 1}].role")
        transcript = await self._service.aside(client.salt, size, lambda _: transcript_of(body))
        return await transcripts.prompt_tokens(client, transcript, text)

    async def _read(self, request: Request, decoder: msgspec.json.Decoder[_T]) -> tuple[_T, int]:
        try:
            return await self._service.read(
                request, lambda data: decode_body(data, decoder, frames.is_unserved)
            )
        except FieldUnsupported as error:
            if error.param == "thread":
                raise ThreadsNotServed("`thread` is not served: send the whole conversation") from None
            raise


async def _streamed(
    stack: AsyncExitStack, turn: AskedTurn, reply: MessageReply, request_id: str, quiet: float
) -> AsyncIterator[bytes]:
    """The server-sent events of a streamed answer, encoded, some at a time. ``stack``: closing it, at the end,
    ends the turn. ``quiet``: seconds between pings while the prompt is computed. An error ends the stream with
    an ``error`` event, which has the ``request_id``."""
    async with stack:
        try:
            async for batch in turn.events(quiet):
                told = [] if batch else [PING]
                for _, event in batch:
                    if isinstance(event, ReplyDone):
                        await turn.durable()
                    told += [sent_event(one, one.name) for one in reply.events(event)]
                if told:
                    yield b"".join(told)
        except Exception as error:
            log_refusal(turn.live.id, error)
            body, _, _ = messages_answer(error, request_id)
            yield sent_event(body, "error")
