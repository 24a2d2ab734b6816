"""The operator's HTTP routes. The guard lets only an operator's key in; without keys, every client on this
machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...kvstore.log_lines import logging_with
from ...sdk.frames.exported import JSON_LINES, ExportEntry, ExportHeader
from ..access.auth import OPERATOR_PATH, Endpoint, key_of, refusing, written_digest
from ..documents.rows import RouteRow
from ..live.requests import query_of
from ..net.bodies import json_answer
from ..service import Service
from .directory import SessionDirectory
from .frames import DeletedSession, ListedSession, SessionPage, SessionsQuery, ShownQuery, ShownSession

SESSIONS = f"{OPERATOR_PATH}sessions"
SHOWN = len("blake2b:") + 8
"""So many characters of the digest of an operator's key name it in log lines."""
_ONE = f"{SESSIONS}/{{session_id}}"


def _row(method: str, path: str, summary: str, response: Any = None, **more: Any) -> RouteRow:
    return RouteRow(method, path, summary, response=response, group="Operator", **more)


ROWS = (
    _row("GET", SESSIONS, "The sessions of the server.", SessionPage, query=SessionsQuery),
    _row("GET", _ONE, "One session, with its latest items.", ShownSession, query=ShownQuery),
    _row(
        "GET",
        f"{_ONE}/export",
        "A session as JSON lines: a header, then its entries.",
        (ExportHeader, ExportEntry),
        media_type=JSON_LINES,
    ),
    _row("POST", f"{_ONE}/close", "End a session's connection; it is kept.", ListedSession),
    _row("DELETE", _ONE, "Delete a session.", DeletedSession),
)
"""The HTTP routes, for the OpenAPI document; `operator_routes` serves them in this order."""


def operator_routes(service: Service) -> list[Route]:
    """Make the routes of `ROWS`."""
    directory = SessionDirectory(service)

    async def page(request: Request) -> Response:
        query = query_of(request.query_params, SessionsQuery)
        return json_answer(await directory.page(query.limit, query.after, query.tenant))

    async def shown(request: Request) -> Response:
        query = query_of(request.query_params, ShownQuery)
        return json_answer(await directory.shown(request.path_params["session_id"], query.items))

    async def exported(request: Request) -> Response:
        data = await directory.exported(request.path_params["session_id"])
        return Response(data, media_type=JSON_LINES)

    def done(act: Callable[[str], Awaitable[object]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return json_answer(await act(request.path_params["session_id"]))

        return endpoint

    served = (page, shown, exported, done(directory.close), done(directory.delete))

    def loaded(serve: Endpoint) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            await service.loaded()  # what the journal has is known from then on
            key, client = key_of(request.headers), request.client
            operator = written_digest(key)[:SHOWN] if key else None
            with logging_with(operator=operator, client=client.host if client else None):
                return await serve(request)

        return endpoint

    return [
        Route(row.path, refusing(loaded(serve)), methods=[row.method])
        for row, serve in zip(ROWS, served, strict=True)
    ]
