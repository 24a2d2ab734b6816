"""Undoes what a reverse proxy changes in a request: the client's address, the scheme, the host and the prefix.

Only the headers of trusted proxies count.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ..settings import Network


class BehindProxy:
    """ASGI middleware.

    ``X-Forwarded-For`` becomes the client, ``X-Forwarded-Proto`` the scheme, ``X-Forwarded-Host`` the ``Host``:
    the last of several hosts, which the nearest proxy has added. The root path is added to ``path`` where the
    proxy has removed it, and set as ``root_path``, as ASGI asks.
    """

    def __init__(self, app: ASGIApp, network: Network) -> None:
        self._root = network.root_path
        self._trusted = [ip_network(proxy, strict=False) for proxy in network.trusted_proxies]
        # Uvicorn's knows how to read these headers; it is typed for its own scopes.
        self._app: ASGIApp = cast(Any, ProxyHeadersMiddleware)(app, [str(one) for one in self._trusted])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] in ("http", "websocket"):
            if self._trusts(scope):
                _take_host(scope)
            if self._root:
                _place_below(scope, self._root)
        await self._app(scope, receive, send)

    def _trusts(self, scope: Scope) -> bool:
        peer = scope.get("client")
        if not self._trusted or peer is None:
            return False
        try:
            address = ip_address(peer[0])
        except ValueError:  # a name, as a test client has
            return False
        return any(address in network for network in self._trusted)


def _take_host(scope: Scope) -> None:
    """Replace the proxy's ``Host`` by the forwarded one."""
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
