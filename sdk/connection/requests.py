"""One HTTP request to a server: for what is no conversation, such as a session that is imported."""

from __future__ import annotations

import http.client
from ssl import SSLContext
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

import anyio.to_thread

from ..errors import ConnectionFailed, ServerError
from ..frames.exported import JSON_LINES
from .transport import LOOPBACK, PATH, realtime_url, shown, words_of

SECONDS = 60.0
"""How long one piece of the answer may take."""
HTTP = {"ws": "http", "wss": "https"}


async def requested(
    url: str,
    method: str,
    path: str,
    api_key: str | None = None,
    body: bytes | None = None,
    *,
    ssl: SSLContext | None = None,
) -> bytes:
    """Send one request to the server at `url`, an address as for `connect`, and return the body of the answer.
    `path`: of the route, with its query. `ssl`: as in `connect`. Raises `ConnectionFailed`, and `ServerError`
    with the server's words if it refuses."""
    return await anyio.to_thread.run_sync(
        _requested, url, method, path, api_key, body, ssl, abandon_on_cancel=True
    )


def _requested(
    url: str, method: str, path: str, api_key: str | None, body: bytes | None, ssl: SSLContext | None
) -> bytes:
    parts = urlsplit(realtime_url(url))
    address = f"{HTTP[parts.scheme]}://{parts.netloc}{parts.path.removesuffix(PATH)}{path}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if body is not None:
        headers["Content-Type"] = JSON_LINES
    try:
        with _opener(parts.hostname, ssl).open(
            Request(address, body, headers, method=method), timeout=SECONDS
        ) as answer:
            found: bytes = answer.read()
            return found
    except HTTPError as error:
        with error:
            words, code = words_of(error.code, error.reason, error.read())
        raise ServerError(words, code=code) from None
    except (URLError, OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error or type(error).__name__
        raise ConnectionFailed(str(why), address=shown(address)) from None


def _opener(host: str | None, ssl: SSLContext | None) -> OpenerDirector:
    direct = [ProxyHandler({})] if host in LOOPBACK else []
    return build_opener(*direct, *([] if ssl is None else [HTTPSHandler(context=ssl)]))
