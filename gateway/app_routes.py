"""The bodies of the routes that the app serves itself, as types, and its rows in the documents."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..runtime.link.messages import Phase
from ..sdk.frames.client import ClientEvent
from ..sdk.frames.exported import JSON_LINES, SESSIONS, ExportEntry, ExportHeader, ImportedSession
from ..sdk.frames.server import OwnFrame, ServerEvent
from .documents.rows import ErrorAnswer, RouteRow, SocketRow
from .messages.frames import MessagesError
from .messages.models import ModelInfo, ModelPage, ModelsQuery

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


class ServerState(msgspec.Struct, kw_only=True, frozen=True):
    """The answer of the probes: what the engine does. `fraction`: how much of its loading is done, from 0 to 1.
    `detail`: more about the phase. `journal`: how the journal differs from that of the last start, if it
    does."""

    status: Literal["ready", "not ready", "hung"]
    phase: Phase
    detail: str
    fraction: float
    journal: list[str] = []


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


ROUTES = (
    RouteRow(
        "GET",
        "/v1/models",
        "The names of the served model.",
        response=(ModelList, ModelPage),
        query=ModelsQuery,
        refused=(ErrorAnswer, MessagesError),
        headers=FORMS,
        group="Models",
    ),
    RouteRow(
        "GET",
        "/v1/models/{model}",
        "The served model by one of its names.",
        response=(Model, ModelInfo),
        refused=(ErrorAnswer, MessagesError),
        headers=FORMS,
        group="Models",
    ),
    RouteRow(
        "POST",
        SESSIONS,
        "Begin a session with an exported one, as JSON lines; a Realtime client resumes it.",
        request=(ExportHeader, ExportEntry),
        request_type=JSON_LINES,
        response=ImportedSession,
        group="Sessions",
    ),
    RouteRow(
        "GET",
        "/health",
        "Liveness: 503 only where restarting the server would help.",
        response=ServerState,
        also={503: "The engine hangs."},
        needs_key=False,
    ),
    RouteRow(
        "GET",
        "/ready",
        "Readiness: 503 where no turn could run now.",
        response=ServerState,
        also={503: "The engine loads or restarts, or the server goes away."},
        needs_key=False,
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
