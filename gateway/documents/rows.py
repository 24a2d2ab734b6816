"""What a face declares of itself for the documents: a row for each HTTP route, and one for each WebSocket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One HTTP route.

    ``path``: as OpenAPI writes it, ``/v1/models/{model}``. ``request``, ``response``: types of the JSON bodies,
    such as msgspec structs; None: no body, or with ``media_type`` a body that is not JSON. ``query``: a struct
    with a field for each parameter of the URL. ``streamed``: the type of the events, where the answer may come
    as server-sent events. ``refusal``: the type of the body that refuses a request; None: OpenAI's. ``also``:
    answers with another status. ``group``: the heading in the documents.
    """

    method: str
    path: str
    summary: str
    request: Any = None
    response: Any = None
    query: type | None = None
    streamed: Any = None
    refusal: Any = None
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
