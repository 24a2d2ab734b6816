"""Who may come in: one guard before every route, for HTTP and WebSocket alike.

With a key set, every route but the probes asks for ``Authorization: Bearer``. Without one the server trusts
its machine, but not web pages that the machine's user looks at: a foreign ``Origin`` is refused.
"""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

PROBES = frozenset({"/health", "/ready"})


class Guard:
    """ASGI middleware; ``key`` None leaves only the check of the origin."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope))
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        if self._key is None:
            return (
                None
                if _same_origin(headers)
                else _refused(403, "origin_not_allowed", "this origin may not connect")
            )
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key.encode()):
            return None
        return _refused(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY")


def _same_origin(headers: Headers) -> bool:
    """Whether no web page asks, or one of this server's own.

    A page may point a name of its own at this machine, so a name other than localhost proves nothing.
    """
    origin = headers.get("origin")
    if origin is None:
        return True
    parts = urlsplit(origin)
    return parts.netloc == headers.get("host") and _is_address(parts.hostname or "")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def _refused(status: int, code: str, message: str) -> JSONResponse:
    body = {"error": {"type": "authentication_error", "code": code, "message": message, "param": None}}
    extra = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(body, status, extra)
