"""Undoes what a reverse proxy changes in a request: the client's address, the scheme, the host and the path's
prefix.

The ``X-Forwarded-…`` headers count only if a trusted proxy has sent the request.
"""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ..settings import Network


class BehindProxy:
    """ASGI middleware that corrects the scope of a request and passes it to ``app``. ``network``: the trusted
    proxies and the root path.

    From a trusted proxy, ``X-Forwarded-For`` sets the client's address, ``X-Forwarded-Proto`` the scheme, and
    ``X-Forwarded-Host`` the ``Host``: of several hosts the last one, which the nearest proxy has added. The
    root path, if there is one, is set as ``root_path``, and put before ``path`` if the proxy has removed it, as
    ASGI asks.
    """

    def __init__(self, app: ASGIApp, network: Network) -> None:
        self._root = network.root_path
        trusted = [str(ip_network(proxy, strict=False)) for proxy in network.trusted_proxies]
        # Uvicorn's knows how to read these headers; it is typed for its own scopes.
        self._app: Any = ProxyHeadersMiddleware(cast(Any, app), trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Correct the scope and pass the request to the app."""
        if scope["type"] in ("http", "websocket"):
            if (peer := scope.get("client")) is not None and peer[0] in self._app.trusted_hosts:
                _take_host(scope)
            if self._root:
                _place_below(scope, self._root)
        await self._app(scope, receive, send)


def _take_host(scope: Scope) -> None:
    """Replace the ``Host`` header in the scope by the last host of ``X-Forwarded-Host``. Without that header
    nothing changes."""
    told = Headers(scope=scope).getlist("x-forwarded-host")
    host = told[-1].rpartition(",")[2].strip() if told else ""
    if host:
        rest = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope["headers"] = [(b"host", host.encode("latin-1")), *rest]


def _place_below(scope: Scope, root: str) -> None:
    path, raw = scope["path"], scope.get("raw_path", scope["path"].encode())
    if path == root or path.startswith(f"{root}/"):
        path, raw = path[len(root) :] or "/", raw[len(root) :] or b"/"
    scope["root_path"] = root
    scope["path"], scope["raw_path"] = root + path, root.encode() + raw
