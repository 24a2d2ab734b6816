"""What the code of a protocol declares of itself: a row for each HTTP route, and one for each WebSocket. The
app makes its routes of them, and the API's documents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket


class ErrorBody(msgspec.Struct, kw_only=True, frozen=True):
    """An error. `code` is stable, `message` is for people, `param` names the field at fault."""

    type: str
    code: str
    message: str
    param: str | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """The body of an HTTP answer that refuses a request."""

    error: ErrorBody


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One HTTP route, and what the OpenAPI document shows of it.

    ``path``: as OpenAPI writes it, ``/v1/responses/{response_id}``; ``pattern``: as Starlette does, if that
    differs. ``serve``: answers a request; its first argument is what the protocol's routes share, such as the
    `Service`. ``request``, ``response``: types of the JSON bodies, such as msgspec structs; None: no body, or
    with ``media_type`` a body that is not JSON. ``request_type``: the media type of the request's body.
    ``query``: a struct with a field for each parameter of the URL. ``streamed``: the type of the events if the
    answer may come as server-sent events. ``refused``: the type of the body that refuses a request. Instead of
    a type there may be a tuple of types: any of them. ``headers``: request headers that choose among these
    types, each with what it does. ``also``: other statuses with which the same answer may come, each with its
    meaning. ``needs_key``: a server with keys asks for one. ``group``: the heading in the document.
    """

    method: str
    path: str
    summary: str
    serve: Callable[[Any, Request], Awaitable[Response]]
    request: Any = None
    response: Any = None
    query: type | None = None
    streamed: Any = None
    refused: Any = ErrorAnswer
    headers: dict[str, str] = field(default_factory=dict)
    media_type: str = "application/json"
    request_type: str = "application/json"
    also: dict[int, str] = field(default_factory=dict)
    needs_key: bool = True
    group: str = "Server"
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class SocketRow:
    """One WebSocket, and what the AsyncAPI document shows of it.

    ``serve``: answers its handshake, and lets it be served; its first argument is as in `RouteRow`.
    ``query``: a struct with a field for each parameter of the URL. ``receives``, ``sends``: the unions of the
    events that the server receives and sends, tagged by their field ``type``. ``own``: the base class of those
    events that no standard has. ``description``: what a client must know beyond the events.
    """

    path: str
    summary: str
    serve: Callable[[Any, WebSocket], Awaitable[None]]
    receives: Any
    sends: Any
    query: type | None = None
    own: type | None = None
    description: str = ""
