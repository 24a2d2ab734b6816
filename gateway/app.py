"""The Starlette app: all routes of a ``Service``, those of every protocol among them, behind one guard that
checks keys, hosts and origins."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
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
from .chat.routes import chat_routes
from .documents.rows import ErrorAnswer, RouteRow, SocketRow
from .errors import GatewayError, MethodRefused, RouteUnknown, UpgradeNeeded
from .messages.frames import MessagesError
from .messages.models import ModelInfo, ModelPage, ModelsQuery, model_info, models_page
from .messages.routes import ROWS as MESSAGES_ROWS
from .messages.routes import messages_routes
from .metrics.prometheus import CONTENT_TYPE, exposition
from .net.bodies import EXPORT, json_answer
from .net.channel import SERVE, PackedChannel, SocketChannel
from .net.proxy import BehindProxy
from .operator.routes import ROWS as OPERATOR_ROWS
from .operator.routes import operator_routes
from .pages import document_routes, page_routes
from .responses.routes import ROWS as RESPONSES_ROWS
from .responses.routes import SOCKET as RESPONSES_SOCKET
from .responses.routes import responses_routes
from .service import ServerState, Service

REALTIME = "/v1/realtime"
FORMS = {"anthropic-version": "With any value the answer has Anthropic's form, errors too."}


class Model(msgspec.Struct, kw_only=True, frozen=True):
    """One entry in the list of models: a name of the served model. `created`: when the server began to serve
    it, in Unix seconds."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "holdfast"


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    """The names under which the model is served."""

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


def _models(path: str, summary: str, response: Any, query: type | None = None) -> RouteRow:
    refused = (ErrorAnswer, MessagesError)
    return RouteRow("GET", path, summary, None, response, query, None, refused, FORMS, group="Models")


def _probe(path: str, summary: str, unwell: str) -> RouteRow:
    return RouteRow("GET", path, summary, response=ServerState, also={503: unwell}, needs_key=False)


ROUTES = (
    _models("/v1/models", "The names of the served model.", (ModelList, ModelPage), ModelsQuery),
    _models("/v1/models/{model}", "The served model by one of its names.", (Model, ModelInfo)),
    RouteRow(
        "POST",
        SESSIONS,
        "Begin a session with an exported one, as JSON lines; a Realtime client resumes it.",
        request=(ExportHeader, ExportEntry),
        request_type=JSON_LINES,
        response=ImportedSession,
        group="Sessions",
    ),
    _probe("/health", "Liveness: 503 only where restarting the server would help.", "The engine hangs."),
    _probe(
        "/ready",
        "Readiness: 503 where no turn could run now.",
        "The engine loads or restarts, or the server goes away.",
    ),
    RouteRow("GET", "/metrics", "Metrics for Prometheus.", media_type="text/plain"),
    RouteRow("GET", "/version", "The version of this package.", response=PackageVersion),
    RouteRow("GET", "/openapi.json", "This document.", response=dict, needs_key=False),
    RouteRow("GET", "/asyncapi.json", "The document of the WebSockets.", response=dict, needs_key=False),
)

REALTIME_SOCKET = SocketRow(
    REALTIME,
    "OpenAI's Realtime protocol for text, and what only sessions can do.",
    ClientEvent,
    ServerEvent,
    RealtimeParameters,
    OwnFrame,
    "One JSON object with a `type` in each text frame, both ways; with the subprotocol `holdfast.msgpack` the "
    "same object as MessagePack in each binary frame. With keys: `Authorization: Bearer KEY`, or, "
    "from a browser, the subprotocols `realtime` and `openai-insecure-api-key.KEY`. The order of events and "
    "the errors are in `gateway/PROTOCOL.md`.",
)

ROWS = (*ROUTES, *CHAT_ROWS, *MESSAGES_ROWS, *RESPONSES_ROWS, *OPERATOR_ROWS)
"""All HTTP routes, for the OpenAPI document."""
SOCKETS = (REALTIME_SOCKET, RESPONSES_SOCKET)
"""All WebSockets, for the AsyncAPI document."""
ELSEWHERE = "/{path:path}"
"""The path pattern that catches every WebSocket that is not served."""
NEAREST = 3
"""How many routes the answer to an unknown path names."""
MOST_COMPARED = 256
"""How many characters of an unknown path are compared with the routes, and quoted in the answer."""


def build_app(service: Service) -> ASGIApp:
    """Make the ASGI app: all routes of ``service``, behind the guard that checks keys, hosts and origins."""
    routes = _Routes(service)
    pages = page_routes(service.settings.network.root_path) if service.settings.page else []
    app = Starlette(
        routes=[
            WebSocketRoute(REALTIME, routes.realtime),
            Route(REALTIME, refusing(routes.not_upgraded)),
            *chat_routes(service),
            *messages_routes(service),
            *responses_routes(service),
            *operator_routes(service),
            Route(SESSIONS, refusing(routes.import_session), methods=["POST"]),
            Route("/v1/models", refusing(routes.models)),
            Route("/v1/models/{name:path}", refusing(routes.model)),
            Route("/health", routes.health),
            Route("/ready", routes.ready),
            Route("/metrics", routes.metrics),
            Route("/version", routes.version),
            *document_routes(ROWS, SOCKETS, __version__),
            *pages,
            WebSocketRoute(ELSEWHERE, routes.elsewhere),
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


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def realtime(self, socket: WebSocket) -> None:
        """The WebSocket route of Realtime: let one client be served to its end (`_SocketsLast`). A client that
        is refused gets an HTTP answer in place of the WebSocket. One that comes while the engine loads waits,
        ``handshake_seconds`` at most.

        Two query parameters are our own. ``resumable=true``: the client can come back with the handle that it
        is given. So its replies continue while it is away, and an event that is sent twice (same ``event_id``)
        is served once. ``resume=true``: the client comes back. So it gets no new session, and its first event
        is ``session.resume``.
        """
        try:
            seconds = self._service.settings.handshake_seconds
            await self._service.admitted(socket.query_params.get("model"), seconds)
        except Exception as error:
            await socket.send_denial_response(refusal(error, socket.scope))
            return
        client = identity_of(socket)  # before the headers are gone
        chosen = _subprotocol(socket.scope.get("subprotocols", ()))
        await socket.accept(chosen)
        most = self._service.settings.limits.frame_bytes
        channel = PackedChannel(socket, most) if chosen == PACKED else SocketChannel(socket)
        socket.scope[SERVE] = partial(self._service.converse, channel, client)

    async def elsewhere(self, socket: WebSocket) -> None:
        """Answer the handshake of a WebSocket on a path that has none with 404."""
        there = " and ".join(row.path for row in SOCKETS)
        error = RouteUnknown(f"{socket.url.path[:256]} is no WebSocket here; {there} are")
        await socket.send_denial_response(refusal(error, socket.scope))

    async def not_upgraded(self, request: Request) -> Response:
        """Answer a plain HTTP request to the path of the Realtime WebSocket with 426."""
        raise UpgradeNeeded(f"{REALTIME} is a WebSocket: connect to it with ws:// or wss://")

    async def import_session(self, request: Request) -> Response:
        """Begin a session with an exported one."""
        await self._service.loaded()
        client = caller_of(request.scope)
        data, _ = await self._service.read(request, bytes, EXPORT)
        return json_answer(await self._service.import_session(data, client.owner, client.salt))

    async def models(self, request: Request) -> Response:
        """List the names of the served model, in OpenAI's list form, or in Anthropic's for its clients."""
        if speaks_messages(request.scope):
            return models_page(self._service, request.query_params)
        return json_answer(ModelList(data=[self._listed(name) for name in self._service.names]))

    async def model(self, request: Request) -> Response:
        """Show the served model, if the path has one of its names; else answer 404."""
        name = request.path_params["name"]
        self._service.check_model(name)
        if speaks_messages(request.scope):
            return model_info(self._service, name or self._service.model)
        return json_answer(self._listed(name or self._service.model))

    async def health(self, request: Request) -> Response:
        """Liveness: 503 if the engine hangs, so that a restart of the server would help; else 200."""
        state = self._service.state()
        return json_answer(state, 200 if state.alive else 503)

    async def ready(self, request: Request) -> Response:
        """Readiness: 200 if a turn could run now; else 503."""
        state = self._service.state()
        return json_answer(state, 200 if state.ready else 503)

    async def metrics(self, request: Request) -> Response:
        """The statistics in Prometheus' text format. A tenant that is not an operator gets only its own
        numbers."""
        scope = request.scope
        snapshot = await self._service.snapshot(scope[TENANT], all_tenants=scope[OPERATOR])
        return Response(exposition(snapshot), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """The version of this package."""
        return json_answer(PackageVersion(name="holdfast", version=__version__))

    def _listed(self, name: str) -> Model:
        return Model(id=name, created=self._service.started)


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
