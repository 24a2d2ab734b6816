"""The HTTP routes of Responses and of Conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from ...kvstore.slices import sliced
from ...sdk.errors import FieldInvalid
from ...sessions.errors import TurnFailed
from ..access.auth import Endpoint, caller_of, identity_of, refusal, refusing
from ..clients import Asked
from ..documents.rows import RouteRow, SocketRow
from ..net.bodies import DONE, EventStream, json_answer, while_connected
from ..net.channel import SERVE, SocketChannel
from ..service import Service
from . import frames, notes
from .events import (
    CallArgumentsDelta,
    CallArgumentsDone,
    CompactionResult,
    ContentPartEvent,
    CountedInput,
    DeletionResult,
    FailureEvent,
    ItemPage,
    OutputItemEvent,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseChanged,
    ResponseObject,
    ResponseStreamEvent,
    ToldConversation,
)
from .face import ResponsesFace, item_in
from .items import KeptItem
from .running import LoggedEvent, RunningResponse
from .socket import ResponsesSocket

RESPONSES = "/v1/responses"
CONVERSATIONS = "/v1/conversations"
T = TypeVar("T")
PAGE, MOST = 20, 100
"""``PAGE``: the items of a page if the client asks for no number. ``MOST``: the most that it may ask for."""
LATEST = 2**31
"""The greatest ``sequence_number`` of an event that a client may name."""


_ONE, _KEPT = f"{RESPONSES}/{{response_id}}", f"{CONVERSATIONS}/{{conversation_id}}"


class PageParameters(msgspec.Struct, kw_only=True, frozen=True):
    """The URL parameters of a list of items: which page is answered."""

    limit: Annotated[int, Meta(ge=1, le=MOST)] = PAGE
    order: Annotated[
        Literal["asc", "desc"], Meta(description="By the items' age: `desc` begins with the latest.")
    ] = "desc"
    after: Annotated[str | None, Meta(description="The id of the last item of the page before.")] = None


class ReadParameters(msgspec.Struct, kw_only=True, frozen=True):
    """The URL parameters of ``GET /v1/responses/{id}``: whole or as a stream."""

    stream: Annotated[bool, Meta(description="As events, also while the response runs.")] = False
    starting_after: Annotated[
        int, Meta(ge=-1, le=LATEST, description="The number of the last event that is known.")
    ] = -1


def _row(
    method: str,
    path: str,
    summary: str,
    request: Any = None,
    response: Any = None,
    query: type | None = None,
    streamed: Any = None,
) -> RouteRow:
    group = "Conversations" if path.startswith(CONVERSATIONS) else "Responses"
    return RouteRow(method, path, summary, request, response, query, streamed, group=group)


ROWS = (
    _row(
        "POST",
        RESPONSES,
        "Reply to an input, or continue a stored response or a conversation.",
        frames.CREATE,
        ResponseObject,
        streamed=ResponseStreamEvent,
    ),
    _row(
        "POST",
        f"{RESPONSES}/compact",
        "Shorten a context by a summary.",
        frames.COMPACT,
        CompactionResult,
    ),
    _row("POST", f"{RESPONSES}/input_tokens", "Count a prompt's tokens.", frames.COUNT, CountedInput),
    _row(
        "GET",
        _ONE,
        "A stored response; also as a stream.",
        response=ResponseObject,
        query=ReadParameters,
        streamed=ResponseStreamEvent,
    ),
    _row("DELETE", _ONE, "Forget a stored response.", response=DeletionResult),
    _row("POST", f"{_ONE}/cancel", "End a response that runs.", response=ResponseObject),
    _row(
        "GET",
        f"{_ONE}/input_items",
        "The items that a response was written from.",
        response=ItemPage,
        query=PageParameters,
    ),
    _row("POST", CONVERSATIONS, "Begin a conversation.", frames.ConversationBody, ToldConversation),
    _row("GET", _KEPT, "A conversation.", response=ToldConversation),
    _row("POST", _KEPT, "Change a conversation's metadata.", frames.ConversationChange, ToldConversation),
    _row("DELETE", _KEPT, "Forget a conversation.", response=DeletionResult),
    _row("GET", f"{_KEPT}/items", "A conversation's items.", response=ItemPage, query=PageParameters),
    _row("POST", f"{_KEPT}/items", "Add items to a conversation.", frames.ConversationItems, ItemPage),
    _row("GET", f"{_KEPT}/items/{{item_id}}", "One item of a conversation.", response=KeptItem),
    _row(
        "DELETE", f"{_KEPT}/items/{{item_id}}", "Take an item out of a conversation.", None, ToldConversation
    ),
)
"""The HTTP routes, for the OpenAPI document; `responses_routes` serves them in this order."""
SOCKET = SocketRow(
    RESPONSES,
    "Responses in lanes",
    receives=frames.LANE,
    sends=ResponseChanged
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
    | FailureEvent,
    description="The events are those of a stream, each with the `stream_id` of its lane, if that has a name.",
)
"""The WebSocket, for the AsyncAPI document."""


def responses_routes(service: Service) -> list[BaseRoute]:
    """Make the routes of `ROWS`, and the WebSocket route ``/v1/responses``."""
    face = ResponsesFace(service)
    responses, conversations = _Responses(face), _Conversations(face)
    served: Sequence[Endpoint] = (
        responses.create,
        responses.compact,
        responses.count,
        responses.retrieve,
        responses.delete,
        responses.cancel,
        responses.input_items,
        conversations.create,
        conversations.retrieve,
        conversations.change,
        conversations.delete,
        conversations.items,
        conversations.add,
        conversations.item,
        conversations.remove,
    )

    def loaded(serve: Endpoint) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            await service.loaded()  # what is stored is known from then on
            return await serve(request)

        return endpoint

    asks = {responses.create, responses.compact, responses.count}  # they check the body before they wait
    routes = [
        Route(row.path, refusing(serve if serve in asks else loaded(serve)), methods=[row.method])
        for row, serve in zip(ROWS, served, strict=True)
    ]
    return [WebSocketRoute(RESPONSES, responses.socket), *routes]


class _Responses:
    def __init__(self, face: ResponsesFace) -> None:
        self._face = face

    async def create(self, request: Request) -> Response:
        """Serve ``POST /v1/responses``: begin the response, and answer with it when it has ended, with its
        stream, or, if it runs in the background, before it has ended."""
        face = self._face
        asked = await _asked(face, request, frames.CREATE)
        body = asked.body
        streamed = bool(body.stream)
        caching = body.prompt_cache_options
        generate = not (caching is not None and caching.prewarm)
        running = await face.begin(
            caller_of(request.scope), asked, streamed=streamed or bool(body.background), generate=generate
        )
        headers = {"x-request-id": running.response.id, **asked.headers}
        if streamed:
            events = _sent(running.events(asker=True))
            left = partial(self._left, running, background=bool(body.background))
            return EventStream(events, face.limits.quiet_seconds, headers, left)
        if body.background:
            return json_answer(running.response, headers=headers)
        try:
            await while_connected(request, running.ended())
        except BaseException:  # the client has left, or the server ends
            face.service.spawn(running.cancel())
            raise
        if running.response.status == "failed":
            raise running.error or TurnFailed("The turn failed")
        return json_answer(running.response, headers=headers)

    async def socket(self, socket: WebSocket) -> None:
        """The same over a WebSocket, which is served behind the app's layers (`SERVE`). A client that is
        refused gets an HTTP answer."""
        face, scope = self._face, socket.scope
        try:
            face.service.admit(None)
        except Exception as error:
            await socket.send_denial_response(refusal(error, scope))
            return
        client = identity_of(socket)  # before the headers are gone
        await socket.accept()
        channel = SocketChannel(socket)
        served = ResponsesSocket(channel, face, client)
        scope[SERVE] = partial(face.service.serve, served, channel)

    def _left(self, running: RunningResponse, *, background: bool) -> None:
        """Called when the client that asked for the response reads no more: cancels the response, unless it has
        ended or runs in the ``background``."""
        running.forsake()
        if not running.over and not background:
            self._face.service.spawn(running.cancel())

    async def retrieve(self, request: Request) -> Response:
        """Serve ``GET /v1/responses/{id}``: answer with the response, or with its events from a number on."""
        face, client = self._face, caller_of(request.scope)
        response_id = request.path_params["response_id"]
        if not _flag(request.query_params, "stream"):
            _number(request.query_params, "starting_after", -1, -1, LATEST)
            return json_answer(await face.retrieve(client, response_id))
        begin = 1 + _number(request.query_params, "starting_after", -1, -1, LATEST)
        running = face.running(client, response_id)
        if running is not None and running.response.store:
            events = _sent(running.events(begin))
        else:
            events = _sent(_slices(await face.retold(client, response_id, begin)))
        return EventStream(events, face.limits.quiet_seconds)

    async def delete(self, request: Request) -> Response:
        """Serve ``DELETE /v1/responses/{id}``: forget the response."""
        response_id = request.path_params["response_id"]
        await self._face.delete(caller_of(request.scope), response_id)
        return json_answer(DeletionResult(id=response_id, object="response"))

    async def cancel(self, request: Request) -> Response:
        """Serve ``POST /v1/responses/{id}/cancel``: end a running response and answer when it has ended. A
        response that had ended before stays as it is."""
        face, client = self._face, caller_of(request.scope)
        response_id = request.path_params["response_id"]
        running = face.running(client, response_id)
        if running is not None and running.response.store:
            await running.cancel()
        return json_answer(await face.retrieve(client, response_id))

    async def input_items(self, request: Request) -> Response:
        """Serve ``GET /v1/responses/{id}/input_items``: answer with a page of the items from which the response
        was written."""
        items = await self._face.input_items(caller_of(request.scope), request.path_params["response_id"])
        return json_answer(page_of(items, request.query_params))

    async def compact(self, request: Request) -> Response:
        """Serve ``POST /v1/responses/compact``: answer with a summary in place of a conversation."""
        asked = await _asked(self._face, request, frames.COMPACT)
        return json_answer(await self._face.compact(caller_of(request.scope), asked.body))

    async def count(self, request: Request) -> Response:
        """Serve ``POST /v1/responses/input_tokens``: answer with the number of a prompt's tokens."""
        asked = await _asked(self._face, request, frames.COUNT)
        counted = await self._face.count(caller_of(request.scope), asked.body)
        return json_answer(counted, headers=asked.headers)


class _Conversations:
    def __init__(self, face: ResponsesFace) -> None:
        self._face = face

    async def create(self, request: Request) -> Response:
        """Serve ``POST /v1/conversations``: begin a conversation."""
        body = (await _asked(self._face, request, frames.ConversationBody)).body
        return json_answer(await self._face.make_conversation(caller_of(request.scope), body))

    async def retrieve(self, request: Request) -> Response:
        """Serve ``GET /v1/conversations/{id}``: answer with the conversation's time and metadata."""
        kept = await self._face.conversation(caller_of(request.scope), request.path_params["conversation_id"])
        return json_answer(notes.conversation_in(kept))

    async def change(self, request: Request) -> Response:
        """Serve ``POST /v1/conversations/{id}``: replace the metadata."""
        body = (await _asked(self._face, request, frames.ConversationChange)).body
        name = request.path_params["conversation_id"]
        return json_answer(await self._face.change_conversation(caller_of(request.scope), name, body))

    async def delete(self, request: Request) -> Response:
        """Serve ``DELETE /v1/conversations/{id}``: forget the conversation."""
        name = request.path_params["conversation_id"]
        await self._face.delete_conversation(caller_of(request.scope), name)
        return json_answer(DeletionResult(id=name, object="conversation.deleted"))

    async def items(self, request: Request) -> Response:
        """Serve ``GET /v1/conversations/{id}/items``: answer with a page of the items."""
        client = caller_of(request.scope)
        kept = await self._face.conversation(client, request.path_params["conversation_id"])
        return json_answer(page_of(await self._face.items(client, kept.notes), request.query_params))

    async def add(self, request: Request) -> Response:
        """Serve ``POST /v1/conversations/{id}/items``: add items and answer with them."""
        body = (await _asked(self._face, request, frames.ConversationItems)).body
        name = request.path_params["conversation_id"]
        added = await self._face.add_items(caller_of(request.scope), name, body.items)
        return json_answer(ItemPage(data=added, first_id=added[0].id, last_id=added[-1].id, has_more=False))

    async def item(self, request: Request) -> Response:
        """Serve ``GET /v1/conversations/{id}/items/{item_id}``: answer with one item."""
        client = caller_of(request.scope)
        kept = await self._face.conversation(client, request.path_params["conversation_id"])
        items = await self._face.items(client, kept.notes)
        return json_answer(item_in(items, request.path_params["item_id"]))

    async def remove(self, request: Request) -> Response:
        """Serve ``DELETE /v1/conversations/{id}/items/{item_id}``: remove the item and answer with the
        conversation."""
        path = request.path_params
        client = caller_of(request.scope)
        return json_answer(await self._face.remove_item(client, path["conversation_id"], path["item_id"]))


async def _asked(face: ResponsesFace, request: Request, form: type[T]) -> Asked[T]:
    asked, _ = await face.service.read(request, lambda data: frames.decoded(data or b"{}", form))
    return asked


async def _sent(batches: AsyncIterator[list[LoggedEvent]]) -> AsyncIterator[bytes]:
    """Batches of events as encoded server-sent events, and then the line that ends the stream."""
    async for batch in batches:
        yield b"".join(b"event: %s\ndata: %s\n\n" % (one.kind.encode(), one.data) for one in batch)
    yield DONE


async def _slices(events: list[LoggedEvent]) -> AsyncIterator[list[LoggedEvent]]:
    for part in sliced(events):
        yield part
        await asyncio.sleep(0)  # others have their turn


def page_of(items: Sequence[KeptItem], query: Mapping[str, str]) -> ItemPage:
    """The page of ``items`` that the URL's parameters ask for: ``limit``, ``order`` (``desc`` unless it is
    ``asc``), and ``after``, the id of the item before the page. Raises ``FieldInvalid``."""
    limit = _number(query, "limit", PAGE, 1, MOST)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise FieldInvalid("`order` must be asc or desc", "order")
    listed = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        at = next((at for at, item in enumerate(listed) if item.id == after), None)
        if at is None:
            raise FieldInvalid(f"`after`: no item has the id {after[:128]!r}", "after")
        listed = listed[at + 1 :]
    shown = listed[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else ("", "")
    return ItemPage(data=shown, first_id=first, last_id=last, has_more=len(listed) > limit)


def _number(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        number = int(text) if len(text) < 20 else most + 1
    except ValueError:
        raise FieldInvalid(f"`{name}` must be an integer", name) from None
    if not least <= number <= most:
        raise FieldInvalid(f"`{name}` must be from {least} to {most}", name)
    return number


def _flag(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise FieldInvalid(f"`{name}` must be true or false", name)
    return text in ("true", "1")
