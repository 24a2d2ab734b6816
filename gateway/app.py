"""The Starlette app: the routes of a ``Service``, behind one guard. A face adds its routes here."""

from __future__ import annotations

import hashlib

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from .. import __version__
from .auth import KEY, OPERATOR, TENANT, Guard, Hosts, key_of
from .errors import MethodRefused, RouteUnknown, UpgradeNeeded, http_answer
from .metrics import CONTENT_TYPE, exposition
from .net.channel import SocketChannel
from .net.proxy import BehindProxy
from .realtime.socket import ClientIdentity
from .service import Service

REALTIME = "/v1/realtime"


def build_app(service: Service) -> ASGIApp:
    """All routes of one service."""
    routes = _Routes(service)
    app = Starlette(
        routes=[
            WebSocketRoute(REALTIME, routes.realtime),
            Route(REALTIME, routes.not_upgraded),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/health", routes.health),
            Route("/ready", routes.ready),
            Route("/metrics", routes.metrics),
            Route("/version", routes.version),
        ],
        exception_handlers={HTTPException: _not_served},
    )
    settings, keys = service.settings, service.tenants.keys
    hosts, origins = Hosts.of(settings, keys=keys is not None), settings.network.allowed_origins
    guard = Guard(app, lambda: service.tenants.keys, hosts, origins)
    return BehindProxy(guard, settings.network)


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def realtime(self, socket: WebSocket) -> None:
        """Serve one Realtime socket. A client that is not admitted gets an HTTP answer.

        Two parameters are ours. ``resumable=true``: the client can come back with the handle that it is given,
        so its replies go on while it is away, and its events are deduplicated by ``event_id``. ``resume=true``:
        it comes back, so it gets no new session and its first event is ``session.resume``.
        """
        try:
            self._service.admit(socket.query_params.get("model"))
        except Exception as error:
            await socket.send_denial_response(_refusal(error))
            return
        offered = socket.scope.get("subprotocols", ())
        await socket.accept("realtime" if "realtime" in offered else None)
        await self._service.converse(SocketChannel(socket), _identity(socket))

    async def not_upgraded(self, request: Request) -> Response:
        """426: this path is a WebSocket's."""
        return _refusal(UpgradeNeeded(f"{REALTIME} is a WebSocket: connect to it with ws:// or wss://"))

    async def models(self, request: Request) -> Response:
        """The served model, in OpenAI's list form."""
        return JSONResponse({"object": "list", "data": [self._listed()]})

    async def model(self, request: Request) -> Response:
        """The served model by its name, or 404."""
        try:
            self._service.check_model(request.path_params["name"])
        except Exception as error:
            return _refusal(error)
        return JSONResponse(self._listed())

    async def health(self, request: Request) -> Response:
        """Liveness: 503 only where restarting the server would help, because the engine hangs."""
        state = self._service.state()
        return JSONResponse(state.told(), 200 if state.alive else 503)

    async def ready(self, request: Request) -> Response:
        """Readiness: 503 where no turn could run now."""
        state = self._service.state()
        return JSONResponse(state.told(), 200 if state.ready else 503)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus. A tenant that is not an operator gets only its own numbers."""
        scope = request.scope
        snapshot = await self._service.snapshot(scope[TENANT], all_tenants=scope[OPERATOR])
        return Response(exposition(snapshot), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """The version of this package."""
        return JSONResponse({"name": "holdfast", "version": __version__})

    def _listed(self) -> dict[str, object]:
        service = self._service
        return {"id": service.model, "object": "model", "created": service.started, "owned_by": "holdfast"}


def _not_served(request: Request, error: Exception) -> Response:
    """The answer for a path or a method that is not served; it names what is served."""
    app: Starlette = request.app
    served = [
        f"GET {route.path}" for route in app.routes if isinstance(route, Route) and route.path != REALTIME
    ]
    told = f"{request.method} {request.url.path} is not served here; there are {', '.join(served)}, "
    told += f"and the WebSocket {REALTIME}"
    return _refusal(MethodRefused(told) if getattr(error, "status_code", 404) == 405 else RouteUnknown(told))


def _identity(socket: WebSocket) -> ClientIdentity:
    asked, key = socket.query_params, socket.headers.get("authorization", "")
    if not key and (offered := key_of(socket.headers)):
        key = f"Bearer {offered}"
    return ClientIdentity(
        owner=hashlib.blake2b(key.encode(), digest_size=16).digest(),
        salt=socket.scope.get(TENANT, b""),
        key=socket.scope.get(KEY, b""),
        address="" if socket.client is None else socket.client.host,
        resumable=asked.get("resumable") == "true",
        resume=asked.get("resume") == "true",
    )


def _refusal(error: Exception) -> Response:
    return JSONResponse(*http_answer(error))
