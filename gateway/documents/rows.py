"""What a face declares of itself for the documents: a row for each HTTP route, and one for each WebSocket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True, frozen=True):
    """An error. `code` is stable, `message` is for people, `param` names the field at fault."""

    type: str
    code: str
    message: str
    param: str | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """The body of an answer that refuses a request."""

    error: ErrorBody


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One HTTP route.

    ``path``: as OpenAPI writes it, ``/v1/models/{model}``. ``request``, ``response``: types of the JSON bodies,
    such as msgspec structs; None: no body, or with ``media_type`` a body that is not JSON. ``query``: a struct
    with a field for each parameter of the URL. ``streamed``: the type of the events, where the answer may come
    as server-sent events. ``refused``: the type of the body that refuses a request. A tuple of types: any of
    them. ``headers``: those that choose among these, each with what it does. ``also``: answers with another
    status. ``group``: the heading in the documents.
    """

    method: str
    path: str
    summary: str
    request: Any = None
    response: Any = None
    query: type | None = None
    streamed: Any = None
    refused: Any = ErrorAnswer
    headers: dict[str, str] = field(default_factory=dict)
    media_type: str = "application/json"
    also: dict[int, str] = field(default_factory=dict)
    needs_key: bool = True
    group: str = "Server"


@dataclass(frozen=True, slots=True)
class SocketRow:
    """One WebSocket.

    ``query``: a struct with a field for each parameter of the URL. ``receives``, ``sends``: the unions of the
    events that the server receives and sends, tagged by their field ``type``. ``own``: the base of those that
    no standard has. ``description``: what a client has to know beyond the events.
    """

    path: str
    summary: str
    receives: Any
    sends: Any
    query: type | None = None
    own: type | None = None
    description: str = ""
