"""The HTTP routes of Anthropic's Messages."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...sdk.errors import FieldUnsupported
from ...sdk.frames.codec import decode_body
from ..access.auth import MESSAGES, REQUEST, TurnCaller, caller_of
from ..answers import answered
from ..clients import Asked, asked
from ..documents.rows import RouteRow
from ..errors import ThreadsNotServed
from ..live.transcripts import Transcripts
from ..net.bodies import json_answer
from ..service import Service
from . import frames
from .reply import MessageReply
from .translate import ask_of, begun, transcript_of

_T = TypeVar("_T", bound=frames.MessagesConversation)


async def create(service: Service, request: Request) -> Response:
    """Serve ``POST /v1/messages``: run the turn and answer with the reply, or with a stream."""
    client = caller_of(request.scope)
    given, size = await _read(service, request, frames.REQUEST)
    body = given.body
    transcripts = await service.transcripts(body.model)
    prompt = None
    if begun(body):
        prompt = tuple(await _begun_prompt(service, transcripts, client, body, size))
    bounds, sampling = transcripts.bounds, transcripts.sampling
    ask = await service.aside(client.salt, size, lambda _: ask_of(body, bounds, sampling, prompt))
    answer = MessageReply(given, request.scope[REQUEST])
    return await answered(service, request, client, transcripts, ask, answer)


async def count(service: Service, request: Request) -> Response:
    """Serve ``POST /v1/messages/count_tokens``: answer with the number of tokens of a conversation's
    prompt."""
    given, size = await _read(service, request, frames.COUNT)
    body = given.body
    transcripts = await service.transcripts(body.model)
    ids = await _begun_prompt(service, transcripts, caller_of(request.scope), body, size)
    headers = {"request-id": request.scope[REQUEST], **given.headers}
    return json_answer(frames.TokenCount(input_tokens=len(ids)), headers=headers)


async def _begun_prompt(
    service: Service,
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
        told = "This model reasons before it answers: a reply cannot continue the assistant's last message"
        raise FieldUnsupported(told, f"messages[{len(body.messages) - 1}].role")
    transcript = await service.aside(client.salt, size, lambda _: transcript_of(body))
    return await transcripts.prompt_tokens(client, transcript, text)


async def _read(
    service: Service, request: Request, decoder: msgspec.json.Decoder[_T]
) -> tuple[Asked[_T], int]:
    decode = partial(decode_body, decoder=decoder, unserved=frames.is_unserved)
    try:
        return await service.read(request, lambda data: asked(data, decode, frames.UNSERVED_TOOLS))
    except FieldUnsupported as error:
        if error.param == "thread":
            raise ThreadsNotServed("`thread` is not served: send the whole conversation") from None
        raise


ROWS = (
    RouteRow(
        "POST",
        MESSAGES,
        "Reply to a conversation.",
        create,
        request=frames.ACCEPTED,
        response=frames.MessageAnswer,
        streamed=frames.MessageEvent,
        refused=frames.MessagesError,
        group="Anthropic Messages",
    ),
    RouteRow(
        "POST",
        f"{MESSAGES}/count_tokens",
        "Count the tokens of a conversation's prompt.",
        count,
        request=frames.COUNTED,
        response=frames.TokenCount,
        refused=frames.MessagesError,
        group="Anthropic Messages",
    ),
)
"""The routes of this module."""
