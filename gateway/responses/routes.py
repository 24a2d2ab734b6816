"""The HTTP routes of Responses and of Conversations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from ...kvstore.slices import sliced
from ...sdk.errors import FieldInvalid
from ...sessions.errors import TurnFailed
from ..access.auth import TurnCaller, caller_of, identity_of, refusal
from ..clients import Asked
from ..documents.rows import RouteRow, SocketRow
from ..live.requests import query_of
from ..net.bodies import DONE, EventStream, json_answer, while_connected
from ..net.channel import SERVE, SocketChannel
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
_ITEMS = f"{_KEPT}/items"


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


async def create(face: ResponsesFace, request: Request) -> Response:
    """Begin a response, and answer with it when it has ended, with its stream, or, if it runs in the
    background, before it has ended."""
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
        left = partial(_left, face, running, background=bool(body.background))
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


def _left(face: ResponsesFace, running: RunningResponse, *, background: bool) -> None:
    """Called when the client that asked for the response reads no more: cancels the response, unless it has
    ended or runs in the ``background``."""
    running.forsake()
    if not running.over and not background:
        face.service.spawn(running.cancel())


async def retrieve(face: ResponsesFace, request: Request) -> Response:
    """Answer with a response, or with its events from a number on."""
    await face.service.loaded()  # what is stored is known from then on
    client, response_id = caller_of(request.scope), request.path_params["response_id"]
    query = query_of(request.query_params, ReadParameters)
    if not query.stream:
        return json_answer(await face.retrieve(client, response_id))
    begin = 1 + query.starting_after
    if (running := face.running(client, response_id)) is not None:
        events = _sent(running.events(begin))
    else:
        events = _sent(_slices(await face.retold(client, response_id, begin)))
    return EventStream(events, face.limits.quiet_seconds)


async def connect(face: ResponsesFace, socket: WebSocket) -> None:
    """The same over a WebSocket, which is served behind the app's layers (`SERVE`). A client that is refused
    gets an HTTP answer."""
    try:
        face.service.admit(None)
    except Exception as error:
        await socket.send_denial_response(refusal(error, socket.scope))
        return
    client = identity_of(socket)  # before the headers are gone
    await socket.accept()
    channel = SocketChannel(socket)
    socket.scope[SERVE] = partial(face.service.serve, ResponsesSocket(channel, face, client), channel)


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


# --- routes that answer with one object ---------------------------------------------------------------------


async def _cancel(face: ResponsesFace, client: TurnCaller, response_id: str) -> ResponseObject:
    """End a running response, and answer when it has ended. One that had ended before stays as it is."""
    if (running := face.running(client, response_id)) is not None:
        await running.cancel()
    return await face.retrieve(client, response_id)


async def _input_items(
    face: ResponsesFace, client: TurnCaller, response_id: str, query: PageParameters
) -> ItemPage:
    return page_of(await face.input_items(client, response_id), query)


async def _conversation(
    face: ResponsesFace, client: TurnCaller, conversation_id: str
) -> ToldConversation | None:
    return notes.conversation_in(await face.conversation(client, conversation_id))


async def _listed(face: ResponsesFace, client: TurnCaller, conversation_id: str) -> list[KeptItem]:
    kept = await face.conversation(client, conversation_id)
    return await face.items(client, kept.notes)


async def _items(
    face: ResponsesFace, client: TurnCaller, conversation_id: str, query: PageParameters
) -> ItemPage:
    return page_of(await _listed(face, client, conversation_id), query)


async def _add(
    face: ResponsesFace, client: TurnCaller, conversation_id: str, body: frames.ConversationItems
) -> ItemPage:
    added = await face.add_items(client, conversation_id, body.items)
    return ItemPage(data=added, first_id=added[0].id, last_id=added[-1].id, has_more=False)


async def _item(face: ResponsesFace, client: TurnCaller, conversation_id: str, item_id: str) -> KeptItem:
    return item_in(await _listed(face, client, conversation_id), item_id)


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


def _row(
    method: str,
    path: str,
    summary: str,
    answer: Callable[..., Awaitable[object]],
    response: Any,
    form: Any = None,
    query: type | None = None,
) -> RouteRow:
    """A route that answers with one object. ``answer`` gets the face, the client, the ids in the path, then the
    body if there is a ``form`` (the body's type), then the URL's parameters if there is a ``query`` (their
    type)."""

    async def serve(face: ResponsesFace, request: Request) -> Response:
        given, headers = list[Any](request.path_params.values()), None
        if form is not None:
            asked = await _asked(face, request, form)
            given.append(asked.body)
            headers = asked.headers
        if query is not None:
            given.append(query_of(request.query_params, query))
        await face.service.loaded()  # what is stored is known from then on
        return json_answer(await answer(face, caller_of(request.scope), *given), headers=headers)

    group = "Conversations" if path.startswith(CONVERSATIONS) else "Responses"
    return RouteRow(method, path, summary, serve, form, response, query, group=group)


ROWS = (
    RouteRow(
        "POST",
        RESPONSES,
        "Reply to an input, or continue a stored response or a conversation.",
        create,
        frames.CREATE,
        ResponseObject,
        streamed=ResponseStreamEvent,
        group="Responses",
    ),
    _row(
        "POST",
        f"{RESPONSES}/compact",
        "Shorten a context by a summary.",
        ResponsesFace.compact,
        CompactionResult,
        frames.COMPACT,
    ),
    _row(
        "POST",
        f"{RESPONSES}/input_tokens",
        "Count a prompt's tokens.",
        ResponsesFace.count,
        CountedInput,
        frames.COUNT,
    ),
    RouteRow(
        "GET",
        _ONE,
        "A stored response; also as a stream.",
        retrieve,
        response=ResponseObject,
        query=ReadParameters,
        streamed=ResponseStreamEvent,
        group="Responses",
    ),
    _row("DELETE", _ONE, "Forget a stored response.", ResponsesFace.delete, DeletionResult),
    _row("POST", f"{_ONE}/cancel", "End a response that runs.", _cancel, ResponseObject),
    _row(
        "GET",
        f"{_ONE}/input_items",
        "The items that a response was written from.",
        _input_items,
        ItemPage,
        query=PageParameters,
    ),
    _row(
        "POST",
        CONVERSATIONS,
        "Begin a conversation.",
        ResponsesFace.make_conversation,
        ToldConversation,
        frames.ConversationBody,
    ),
    _row("GET", _KEPT, "A conversation.", _conversation, ToldConversation),
    _row(
        "POST",
        _KEPT,
        "Change a conversation's metadata.",
        ResponsesFace.change_conversation,
        ToldConversation,
        frames.ConversationChange,
    ),
    _row("DELETE", _KEPT, "Forget a conversation.", ResponsesFace.delete_conversation, DeletionResult),
    _row("GET", _ITEMS, "A conversation's items.", _items, ItemPage, query=PageParameters),
    _row("POST", _ITEMS, "Add items to a conversation.", _add, ItemPage, frames.ConversationItems),
    _row("GET", f"{_ITEMS}/{{item_id}}", "One item of a conversation.", _item, KeptItem),
    _row(
        "DELETE",
        f"{_ITEMS}/{{item_id}}",
        "Take an item out of a conversation.",
        ResponsesFace.remove_item,
        ToldConversation,
    ),
)
"""The HTTP routes."""
SOCKET = SocketRow(
    RESPONSES,
    "Responses in lanes",
    connect,
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
"""The WebSocket."""
