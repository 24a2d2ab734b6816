"""The Starlette app: all routes of a ``Service``, those of every protocol among them, behind one guard that
checks keys, hosts and origins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from .. import __version__
from ..sdk.frames.client import ClientEvent
from ..sdk.frames.exported import JSON_LINES, SESSIONS, ExportEntry, ExportHeader, ImportedSession
from ..sdk.frames.packed import PACKED
from ..sdk.frames.server import OwnFrame, ServerEvent
from .access.admission import TURN_ROUTES, limit_headers
from .access.attribution import OTHER
from .access.auth import (
    KEY_PROTOCOL,
    OPERATOR,
    PAGE_FILES,
    TENANT,
    Guard,
    Hosts,
    caller_of,
    identity_of,
    path_of,
    refusal,
    refusing,
    speaks_messages,
)
from .chat.routes import ROWS as CHAT_ROWS
from .documents.api import asyncapi, openapi
from .documents.rows import ErrorAnswer, RouteRow, SocketRow
from .errors import GatewayError, MethodRefused, RouteUnknown, UpgradeNeeded
from .messages.frames import MessagesError
from .messages.models import ModelInfo, ModelPage, ModelsQuery, model_info, models_page
from .messages.routes import ROWS as MESSAGES_ROWS
from .metrics.prometheus import CONTENT_TYPE, exposition
from .net.bodies import EXPORT, json_answer
from .net.channel import SERVE, PackedChannel, SocketChannel
from .net.proxy import BehindProxy
from .operator.adapters import ROWS as ADAPTER_ROWS
from .operator.directory import SessionDirectory
from .operator.routes import ROWS as OPERATOR_ROWS
from .pages import PageFile, page_routes
from .responses.face import ResponsesFace
from .responses.routes import ROWS as RESPONSES_ROWS
from .responses.routes import SOCKET as RESPONSES_SOCKET
from .service import ServerState, Service

REALTIME = "/v1/realtime"
FORMS = {"anthropic-version": "With any value the answer has Anthropic's form, errors too."}


class Model(msgspec.Struct, kw_only=True, frozen=True):
    """One entry in the list of models: a name of the served model, or of an adapter (LoRA). `created`: when the
    server began to serve it, in Unix seconds. `parent`: of an adapter, the model that it changes. `root`: what
    is served by that name: the model's first name; for an adapter its folder, for an operator with the whole
    path."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "holdfast"
    root: str = ""
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    """The names under which the model is served, then those of the adapters that are loaded."""

    data: list[Model]
    object: Literal["list"] = "list"


class PackageVersion(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of `/version`: the version of this package."""

    name: Literal["holdfast"]
    version: str


class RealtimeParameters(msgspec.Struct, kw_only=True, frozen=True):
    """The parameters of the Realtime URL."""

    model: Annotated[
        str | None,
        Meta(description="A name of the served model; another one is refused with 404. Default: the first."),
    ] = None
    resumable: Annotated[
        bool, Meta(description="The client can come back with `handle`: its replies go on while it is away.")
    ] = False
    resume: Annotated[
        bool, Meta(description="The client comes back: its first event is `session.resume`.")
    ] = False


async def realtime(service: Service, socket: WebSocket) -> None:
    """The WebSocket route of Realtime: let one client be served to its end (`_SocketsLast`). A client that is
    refused gets an HTTP answer instead of the WebSocket. One that comes while the engine loads waits,
    ``handshake_seconds`` at most.

    Two query parameters are our own. ``resumable=true``: the client can come back with the handle that it is
    given. So its replies continue while it is away, and an event that is sent twice (same ``event_id``) is
    served once. ``resume=true``: the client comes back. So it gets no new session, and its first event is
    ``session.resume``.
    """
    query = socket.query_params
    asked = None if query.get("resume") == "true" else query.get("model")  # that session has its model
    try:
        await service.admitted(asked, service.settings.handshake_seconds)
    except Exception as error:
        await socket.send_denial_response(refusal(error, socket.scope))
        return
    client = identity_of(socket)  # before the headers are gone
    chosen = _subprotocol(socket.scope.get("subprotocols", ()))
    await socket.accept(chosen)
    most = service.settings.limits.frame_bytes
    channel = PackedChannel(socket, most) if chosen == PACKED else SocketChannel(socket)
    socket.scope[SERVE] = partial(service.converse, channel, client)


async def elsewhere(socket: WebSocket) -> None:
    """Answer the handshake of a WebSocket on a path that has none with 404."""
    there = " and ".join(row.path for row in SOCKETS)
    error = RouteUnknown(f"{socket.url.path[:256]} is no WebSocket here; {there} are")
    await socket.send_denial_response(refusal(error, socket.scope))


async def not_upgraded(request: Request) -> Response:
    """Answer a plain HTTP request to the path of the Realtime WebSocket with 426."""
    raise UpgradeNeeded(f"{REALTIME} is a WebSocket: connect to it with ws:// or wss://")


async def import_session(service: Service, request: Request) -> Response:
    """Begin a session with an exported one."""
    await service.loaded()
    client = caller_of(request.scope)
    data, _ = await service.read(request, bytes, EXPORT)
    return json_answer(await service.import_session(data, client.owner, client.salt))


async def models(service: Service, request: Request) -> Response:
    """List the names of the served model, in OpenAI's list form, or in Anthropic's for its clients."""
    if speaks_messages(request.scope):
        return models_page(service, request.query_params)
    return json_answer(ModelList(data=[_model(service, name, request) for name in service.listed]))


def _model(service: Service, name: str, request: Request) -> Model:
    adapter = next((one for one in service.adapters if one.name == name and name not in service.names), None)
    if adapter is None:
        return Model(id=name, created=service.started, root=service.model)
    root = adapter.path if request.scope[OPERATOR] else Path(adapter.path).name
    return Model(id=name, created=service.started, root=root, parent=service.model)


async def model(service: Service, request: Request) -> Response:
    """Show the served model, if the path has one of its names; else answer 404."""
    asked = request.path_params["name"]
    service.check_model(asked)
    name = asked or service.model
    if speaks_messages(request.scope):
        return model_info(service, name)
    return json_answer(_model(service, name, request))


async def health(service: Service, request: Request) -> Response:
    """Liveness: 503 if the engine hangs, so that a restart of the server would help; else 200."""
    state = service.state()
    return json_answer(state, 200 if state.alive else 503)


async def ready(service: Service, request: Request) -> Response:
    """Readiness: 200 if a turn could run now; else 503."""
    state = service.state()
    return json_answer(state, 200 if state.ready else 503)


async def metrics(service: Service, request: Request) -> Response:
    """The statistics in Prometheus' text format. A tenant that is not an operator gets only its own numbers."""
    scope = request.scope
    snapshot = await service.snapshot(scope[TENANT], all_tenants=scope[OPERATOR])
    return Response(exposition(snapshot), media_type=CONTENT_TYPE)


async def version(service: Service, request: Request) -> Response:
    """The version of this package."""
    return json_answer(PackageVersion(name="holdfast", version=__version__))


async def document(service: Service, request: Request) -> Response:
    """The API's document that the path names."""
    return await (await asyncio.to_thread(_documents))[path_of(request.scope)].answer(request)


@cache
def _documents() -> dict[str, PageFile]:
    """The API's documents by their paths. They are made when the first of them is asked for."""
    made = {"/openapi.json": openapi(ROWS, __version__), "/asyncapi.json": asyncapi(SOCKETS, __version__)}
    return {
        path: PageFile.of(msgspec.json.format(msgspec.json.encode(one)), ".json")
        for path, one in made.items()
    }


def _models(path: str, summary: str, serve: Callable[..., Awaitable[Response]], **more: Any) -> RouteRow:
    refused = (ErrorAnswer, MessagesError)
    return RouteRow("GET", path, summary, serve, refused=refused, headers=FORMS, group="Models", **more)


ROUTES = (
    _models(
        "/v1/models",
        "The names of the served model.",
        models,
        response=(ModelList, ModelPage),
        query=ModelsQuery,
    ),
    _models(
        "/v1/models/{model}",
        "The served model by one of its names.",
        model,
        response=(Model, ModelInfo),
        pattern="/v1/models/{name:path}",
    ),
    RouteRow(
        "POST",
        SESSIONS,
        "Begin a session with an exported one, as JSON lines; a Realtime client resumes it.",
        import_session,
        request=(ExportHeader, ExportEntry),
        request_type=JSON_LINES,
        response=ImportedSession,
        group="Sessions",
    ),
    RouteRow(
        "GET",
        "/health",
        "Liveness: 503 only where restarting the server would help.",
        health,
        response=ServerState,
        also={503: "The engine hangs."},
        needs_key=False,
    ),
    RouteRow(
        "GET",
        "/ready",
        "Readiness: 503 where no turn could run now.",
        ready,
        response=ServerState,
        also={503: "The engine loads or restarts, or the server goes away."},
        needs_key=False,
    ),
    RouteRow("GET", "/metrics", "Metrics for Prometheus.", metrics, media_type="text/plain"),
    RouteRow("GET", "/version", "The version of this package.", version, response=PackageVersion),
    RouteRow("GET", "/openapi.json", "This document.", document, response=dict, needs_key=False),
    RouteRow(
        "GET", "/asyncapi.json", "The document of the WebSockets.", document, response=dict, needs_key=False
    ),
)

REALTIME_SOCKET = SocketRow(
    REALTIME,
    "OpenAI's Realtime protocol for text, and what only sessions can do.",
    realtime,
    ClientEvent,
    ServerEvent,
    RealtimeParameters,
    OwnFrame,
    "One JSON object with a `type` in each text frame, both ways; with the subprotocol `holdfast.msgpack` the "
    "same object as MessagePack in each binary frame. With keys: `Authorization: Bearer KEY`, or, "
    "from a browser, the subprotocols `realtime` and `openai-insecure-api-key.KEY`. The order of events and "
    "the errors are in `gateway/PROTOCOL.md`.",
)

ROWS = (*ROUTES, *CHAT_ROWS, *MESSAGES_ROWS, *RESPONSES_ROWS, *ADAPTER_ROWS, *OPERATOR_ROWS)
"""All HTTP routes."""
SOCKETS = (REALTIME_SOCKET, RESPONSES_SOCKET)
"""All WebSockets."""
ELSEWHERE = "/{path:path}"
"""The path pattern that catches every WebSocket that is not served."""
NEAREST = 3
"""How many routes the answer to an unknown path names."""
MOST_COMPARED = 256
"""How many characters of an unknown path are compared with the routes, and quoted in the answer."""


def build_app(service: Service) -> ASGIApp:
    """Make the ASGI app: all routes of ``service``, behind the guard that checks keys, hosts and origins."""
    responses, directory = ResponsesFace(service), SessionDirectory(service)
    pages = page_routes(service.settings.network.root_path) if service.settings.page else []
    app = Starlette(
        routes=[
            WebSocketRoute(REALTIME, partial(REALTIME_SOCKET.serve, service)),
            WebSocketRoute(RESPONSES_SOCKET.path, partial(RESPONSES_SOCKET.serve, responses)),
            Route(REALTIME, refusing(not_upgraded)),
            *_routes((*ROUTES, *CHAT_ROWS, *MESSAGES_ROWS, *ADAPTER_ROWS), service),
            *_routes(RESPONSES_ROWS, responses),
            *_routes(OPERATOR_ROWS, directory),
            *pages,
            WebSocketRoute(ELSEWHERE, elsewhere),
        ],
        exception_handlers={HTTPException: _not_served},
    )
    settings, keys = service.settings, service.tenants.keys
    hosts, origins = Hosts.of(settings, keys=keys is not None), settings.network.allowed_origins
    limited = _TurnRoutes(app, service)
    served = [route for route in app.routes if isinstance(route, Route | WebSocketRoute)]
    served = [route for route in served if route.path != ELSEWHERE]

    def route_of(path: str) -> str:
        return next((route.path_format for route in served if route.path_regex.match(path)), OTHER)

    count = service.turns.metrics.request
    guard: ASGIApp = Guard(limited, lambda: service.tenants.keys, hosts, origins, route_of, count)
    readers = ("*",) if keys is not None else tuple(origin.lower() for origin in origins)
    if readers:  # pages of these origins can read answers; the guard's keys are not asked for in a preflight
        methods = ("GET", "HEAD", "POST", "DELETE")  # https://fetch.spec.whatwg.org/#http-cors-protocol
        guard = CORSMiddleware(guard, readers, methods, ("*",), allow_private_network=True)
    return _SocketsLast(BehindProxy(guard, settings.network))


def _routes(rows: Sequence[RouteRow], face: object) -> list[Route]:
    """The routes of these rows. ``face``: what they share."""
    return [
        Route(row.pattern or row.path, refusing(partial(row.serve, face)), methods=[row.method])
        for row in rows
    ]


class _SocketsLast:
    """The outermost ASGI layer: it serves accepted WebSockets (`SERVE`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; then run what its route has put into the scope as `SERVE`, if anything. At the
        end the scope lets go of the server's own functions, through which it refers to itself."""
        await self._app(scope, receive, send)
        serve = scope.pop(SERVE, None)
        if serve is not None:
            try:
                await serve()
            finally:
                scope.get("extensions", {}).clear()


class _TurnRoutes:
    """ASGI middleware behind the guard, for `TURN_ROUTES`: what may not begin a turn now is refused before its
    body is read, and answers tell what is left to the client's key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or path_of(scope) not in TURN_ROUTES:
            await self._app(scope, receive, send)
            return

        caller, turns = caller_of(scope), self._service.turns

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(limit_headers(turns.rates, caller, path_of(scope)))
            await send(message)

        try:
            turns.foresee(caller)
        except GatewayError as error:
            await refusal(error, scope)(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)


def _not_served(request: Request, error: Exception) -> Response:
    """The answer to a request that no route serves. For an unknown path it is a 404 that names the most similar
    routes; for a known path with another method, a 405 that names the methods."""
    app: Starlette = request.app
    path = path_of(request.scope)[:MOST_COMPARED]
    told = f"{request.method} {path} is not served here"
    routes = [route for route in app.routes if isinstance(route, Route)]
    if getattr(error, "status_code", 404) == 405:
        fitting = (route for route in routes if route.matches(request.scope)[0] is Match.PARTIAL)
        allowed = {method for route in fitting for method in route.methods or ()}
        served = " and ".join(sorted(allowed - {"HEAD"}))
        return refusal(MethodRefused(f"{told}; {path} has {served}", allowed), request.scope)
    methods: dict[str, list[str]] = {}
    for route in routes:
        if not route.path.startswith(PAGE_FILES):
            methods.setdefault(route.path_format, []).extend(sorted((route.methods or set()) - {"HEAD"}))
    for socket in SOCKETS:
        methods.setdefault(socket.path, []).append("the WebSocket")
    near = get_close_matches(path, methods, NEAREST, cutoff=0.0)
    named = ", ".join(f"{' or '.join(methods[one])} {one}" for one in near)
    return refusal(RouteUnknown(f"{told}; the nearest are {named}; /openapi.json has all"), request.scope)


def _subprotocol(offered: Sequence[str]) -> str | None:
    """The WebSocket subprotocol to accept, out of those that the client ``offered``: that of MessagePack, or
    else ``realtime``, or else the one that carries the client's key. (A browser closes a connection that
    accepts none of its offers.) None if it offered none of them."""
    keys = (one for one in offered if one.startswith(KEY_PROTOCOL))
    named = (one for one in (PACKED, "realtime") if one in offered)
    return next(named, None) or next(keys, None)
