"""The operator's HTTP routes. The guard lets only an operator's key in; without keys, every client on this
machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...kvstore.log_lines import logging_with
from ...sdk.frames.exported import JSON_LINES, ExportEntry, ExportHeader
from ..access.auth import OPERATOR_PATH, key_of, written_digest
from ..documents.rows import RouteRow
from ..live.requests import query_of
from ..net.bodies import json_answer
from .directory import SessionDirectory
from .frames import DeletedSession, ListedSession, SessionPage, SessionsQuery, ShownQuery, ShownSession

SESSIONS = f"{OPERATOR_PATH}sessions"
SHOWN = len("blake2b:") + 8
"""So many characters of the digest of an operator's key name it in log lines."""
_ONE = f"{SESSIONS}/{{session_id}}"


def _row(
    method: str,
    path: str,
    summary: str,
    answer: Callable[..., Awaitable[object]],
    response: Any,
    query: type | None = None,
    media_type: str = "application/json",
) -> RouteRow:
    """A route. ``answer`` gets the directory, then the session's id if the path has one, then the URL's
    parameters if there is a ``query`` (their type). It returns an object, or bytes that are not JSON."""

    async def serve(directory: SessionDirectory, request: Request) -> Response:
        await directory.service.loaded()  # what the journal has is known from then on
        key, client = key_of(request.headers), request.client
        operator = written_digest(key)[:SHOWN] if key else None
        with logging_with(operator=operator, client=client.host if client else None):
            asked = () if query is None else (query_of(request.query_params, query),)
            told = await answer(directory, *request.path_params.values(), *asked)
        return Response(told, media_type=media_type) if isinstance(told, bytes) else json_answer(told)

    return RouteRow(
        method, path, summary, serve, None, response, query, media_type=media_type, group="Operator"
    )


ROWS = (
    _row("GET", SESSIONS, "The sessions of the server.", SessionDirectory.page, SessionPage, SessionsQuery),
    _row(
        "GET", _ONE, "One session, with its latest items.", SessionDirectory.shown, ShownSession, ShownQuery
    ),
    _row(
        "GET",
        f"{_ONE}/export",
        "A session as JSON lines: a header, then its entries.",
        SessionDirectory.exported,
        (ExportHeader, ExportEntry),
        media_type=JSON_LINES,
    ),
    _row(
        "POST",
        f"{_ONE}/close",
        "End a session's connection; it is kept.",
        SessionDirectory.close,
        ListedSession,
    ),
    _row("DELETE", _ONE, "Delete a session.", SessionDirectory.delete, DeletedSession),
)
"""The operator's routes."""
