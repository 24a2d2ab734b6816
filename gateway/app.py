"""The Starlette app: routes to what a ``Service`` offers, behind one guard.

Knows HTTP; nothing of conversations or engines beyond what the service says of them.
"""

from __future__ import annotations

import hashlib

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from .. import __version__
from .auth import KEY, OPERATOR, TENANT, Guard, Hosts
from .errors import http_answer
from .metrics import CONTENT_TYPE, exposition
from .net.channel import SocketChannel
from .net.proxy import BehindProxy
from .realtime.socket import ClientIdentity
from .service import Service


def build_app(service: Service) -> ASGIApp:
    """All routes of one service."""
    routes = _Routes(service)
    app = Starlette(
        routes=[
            WebSocketRoute("/v1/realtime", routes.realtime),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/health", routes.health),
            Route("/ready", routes.ready),
            Route("/metrics", routes.metrics),
            Route("/version", routes.version),
        ]
    )
    settings, keys = service.settings, service.tenants.keys
    guard = Guard(app, lambda: service.tenants.keys, Hosts.of(settings, keys=keys is not None))
    return BehindProxy(guard, settings.network)


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def realtime(self, socket: WebSocket) -> None:
        """One session on one socket; refused with an HTTP answer before it is accepted, where it must be.

        Two parameters are ours. ``resumable=true``: this client can come back with the handle it is given, so
        its replies go on while it is away; its events are deduplicated by ``event_id``. ``resume=true``: it
        comes back, so no session is made for it and its first event is ``session.resume``.
        """
        try:
            self._service.admit(socket.query_params.get("model"))
        except Exception as error:
            await socket.send_denial_response(_refusal(error))
            return
        await socket.accept()
        await self._service.converse(SocketChannel(socket), _identity(socket))

    async def models(self, request: Request) -> Response:
        """What is served, in OpenAI's list form."""
        return JSONResponse({"object": "list", "data": [self._listed()]})

    async def model(self, request: Request) -> Response:
        """One model, or 404."""
        try:
            self._service.check_model(request.path_params["name"])
        except Exception as error:
            return _refusal(error)
        return JSONResponse(self._listed())

    async def health(self, request: Request) -> Response:
        """503 only for what restarting the server would mend: an engine that hangs."""
        state = self._service.state()
        return JSONResponse(state.told(), 200 if state.alive else 503)

    async def ready(self, request: Request) -> Response:
        """Whether a turn could run now."""
        state = self._service.state()
        return JSONResponse(state.told(), 200 if state.ready else 503)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus; a tenant that is not an operator finds its own numbers alone."""
        scope = request.scope
        snapshot = await self._service.snapshot(scope[TENANT], all_tenants=scope[OPERATOR])
        return Response(exposition(snapshot), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        """Of this package."""
        return JSONResponse({"name": "holdfast", "version": __version__})

    def _listed(self) -> dict[str, object]:
        service = self._service
        return {"id": service.model, "object": "model", "created": service.started, "owned_by": "holdfast"}


def _identity(socket: WebSocket) -> ClientIdentity:
    asked, key = socket.query_params, socket.headers.get("authorization", "")
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
