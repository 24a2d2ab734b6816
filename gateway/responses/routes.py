"""The HTTP routes of Responses and of Conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
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
from ..access.auth import Endpoint, TurnCaller, caller_of, identity_of, refusal, refusing
from ..clients import Asked
from ..documents.rows import RouteRow, SocketRow
from ..live.requests import query_of
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


@dataclass(frozen=True, slots=True)
class _Call:
    """A request to a route that answers with one object. ``ids``: those in the path; ``query``: the URL's
    parameters; ``body``: decoded, with the tools that were left out; each None if the route has none."""

    client: TurnCaller
    ids: Mapping[str, str]
    query: Any
    body: Any

    @property
    def id(self) -> str:
        """The id of the response or conversation that the path names."""
        return next(iter(self.ids.values()))


class _Objects:
    """The routes that answer with one object."""

    def __init__(self, face: ResponsesFace) -> None:
        self._face = face
        self.served: dict[tuple[str, str], Callable[[_Call], Awaitable[object]]] = {
            ("POST", f"{RESPONSES}/compact"): lambda call: face.compact(call.client, call.body),
            ("POST", f"{RESPONSES}/input_tokens"): lambda call: face.count(call.client, call.body),
            ("DELETE", _ONE): self._delete,
            ("POST", f"{_ONE}/cancel"): self._cancel,
            ("GET", f"{_ONE}/input_items"): self._input_items,
            ("POST", CONVERSATIONS): lambda call: face.make_conversation(call.client, call.body),
            ("GET", _KEPT): self._conversation,
            ("POST", _KEPT): lambda call: face.change_conversation(call.client, call.id, call.body),
            ("DELETE", _KEPT): self._delete_conversation,
            ("GET", f"{_KEPT}/items"): self._items,
            ("POST", f"{_KEPT}/items"): self._add,
            ("GET", f"{_KEPT}/items/{{item_id}}"): self._item,
            ("DELETE", f"{_KEPT}/items/{{item_id}}"): lambda call: face.remove_item(
                call.client, call.id, call.ids["item_id"]
            ),
        }

    def endpoint(self, row: RouteRow) -> Endpoint:
        """What serves the route of a row."""
        serve, form = self.served[row.method, row.path], row.request

        async def endpoint(request: Request) -> Response:
            asked = None if form is None else await _asked(self._face, request, form)
            query = None if row.query is None else query_of(request.query_params, row.query)
            body = None if asked is None else asked.body
            told = await serve(_Call(caller_of(request.scope), request.path_params, query, body))
            return json_answer(told, headers=None if asked is None else asked.headers)

        return endpoint

    async def _delete(self, call: _Call) -> object:
        await self._face.delete(call.client, call.id)
        return DeletionResult(id=call.id, object="response")

    async def _cancel(self, call: _Call) -> object:
        """End a running response, and answer when it has ended. One that had ended before stays as it is."""
        running = self._face.running(call.client, call.id)
        if running is not None and running.response.store:
            await running.cancel()
        return await self._face.retrieve(call.client, call.id)

    async def _input_items(self, call: _Call) -> object:
        return page_of(await self._face.input_items(call.client, call.id), call.query)

    async def _conversation(self, call: _Call) -> object:
        return notes.conversation_in(await self._face.conversation(call.client, call.id))

    async def _delete_conversation(self, call: _Call) -> object:
        await self._face.delete_conversation(call.client, call.id)
        return DeletionResult(id=call.id, object="conversation.deleted")

    async def _listed(self, call: _Call) -> list[KeptItem]:
        kept = await self._face.conversation(call.client, call.id)
        return await self._face.items(call.client, kept.notes)

    async def _items(self, call: _Call) -> object:
        return page_of(await self._listed(call), call.query)

    async def _add(self, call: _Call) -> object:
        added = await self._face.add_items(call.client, call.id, call.body.items)
        return ItemPage(data=added, first_id=added[0].id, last_id=added[-1].id, has_more=False)

    async def _item(self, call: _Call) -> object:
        return item_in(await self._listed(call), call.ids["item_id"])


def responses_routes(service: Service) -> list[BaseRoute]:
    """Make the routes of `ROWS`, and the WebSocket route ``/v1/responses``."""
    face = ResponsesFace(service)
    responses, objects = _Responses(face), _Objects(face)
    own: dict[tuple[str, str], Endpoint] = {
        ("POST", RESPONSES): responses.create,
        ("GET", _ONE): responses.retrieve,
    }

    def endpoint(row: RouteRow) -> Endpoint:
        serve = own.get((row.method, row.path)) or objects.endpoint(row)

        async def loaded(request: Request) -> Response:
            await service.loaded()  # what is stored is known from then on
            return await serve(request)

        waits = row.request not in (
            frames.CREATE,
            frames.COMPACT,
            frames.COUNT,
        )  # these check the body before
        return loaded if waits else serve

    routes = [Route(row.path, refusing(endpoint(row)), methods=[row.method]) for row in ROWS]
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
        query = query_of(request.query_params, ReadParameters)
        if not query.stream:
            return json_answer(await face.retrieve(client, response_id))
        begin = 1 + query.starting_after
        running = face.running(client, response_id)
        if running is not None and running.response.store:
            events = _sent(running.events(begin))
        else:
            events = _sent(_slices(await face.retold(client, response_id, begin)))
        return EventStream(events, face.limits.quiet_seconds)


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


def page_of(items: Sequence[KeptItem], query: PageParameters) -> ItemPage:
    """The page of ``items`` that the URL's parameters ask for. Raises ``FieldInvalid``."""
    listed = list(items) if query.order == "asc" else list(reversed(items))
    if query.after is not None:
        at = next((at for at, item in enumerate(listed) if item.id == query.after), None)
        if at is None:
            raise FieldInvalid(f"`after`: no item has the id {query.after[:128]!r}", "after")
        listed = listed[at + 1 :]
    shown = listed[: query.limit]
    first, last = (shown[0].id, shown[-1].id) if shown else ("", "")
    return ItemPage(data=shown, first_id=first, last_id=last, has_more=len(listed) > query.limit)
