"""Transports: each carries whole frames both ways. A frame is the JSON text of one event.

`WebSocketTransport` is for servers; `gateway.embedded` has one in memory. `requested` sends one HTTP request,
for what is no conversation, such as a session that is imported.
"""

from __future__ import annotations

import asyncio
import http.client
from contextlib import suppress
from ssl import SSLContext
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

import anyio.to_thread
import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as websocket_connect
from websockets.exceptions import (
    ConcurrencyError,
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)
from websockets.http11 import Response
from websockets.typing import Subprotocol

from ..errors import (
    ConnectionFailed,
    ConnectionLost,
    KeyRejected,
    ModelUnknown,
    ServerError,
    ServerUnavailable,
)
from ..frames.exported import JSON_LINES
from ..frames.packed import PACKED, packed, unpacked

MAX_FRAME_BYTES = 16 << 20
OPEN_SECONDS = 10.0
PATH = "/v1/realtime"
SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
DEFAULT_URL = "ws://127.0.0.1:8040"
"""The address of a server that was started without options."""
REFUSALS = {
    401: KeyRejected,
    403: KeyRejected,
    404: ModelUnknown,
    429: ServerUnavailable,
    503: ServerUnavailable,
}
ANSWER_SECONDS = 60.0
"""How long one piece of the answer to an HTTP request may take."""
HTTP = {"ws": "http", "wss": "https"}
MOST_WORDS = 500  # characters of an answer that is not the server's JSON, such as a proxy's page


class Transport(Protocol):
    """One connection to a server. `receive` can be cancelled without losing a frame, and `send` can run beside
    it. After one of the two has raised `ConnectionLost`, the other raises it too."""

    async def send(self, frame: bytes) -> None:
        """Send one frame: JSON text in UTF-8. Raises `ConnectionLost`."""

    async def receive(self) -> bytes:
        """Wait for the next frame from the server and return it. Raises `ConnectionLost` when no more come."""

    async def aclose(self) -> None:
        """End the connection. Does nothing if it has ended."""


class WebSocketTransport:
    """A `Transport` over a WebSocket: each frame is a text message, or, if the two sides have agreed on
    `PACKED`, a binary one with the same object as MessagePack."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._packed = connection.subprotocol == PACKED

    async def send(self, frame: bytes) -> None:
        try:
            if self._packed:
                await self._connection.send(packed(frame), text=False)
            else:
                await self._connection.send(frame, text=True)
        except ConnectionClosed as error:
            raise _lost(error) from error

    async def receive(self) -> bytes:
        """Raises `ConnectionLost`; for MessagePack that is none, `FrameMalformed`."""
        try:
            frame = await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise _lost(error) from error
        return unpacked(frame, MAX_FRAME_BYTES) if self._packed else frame

    async def aclose(self) -> None:
        """Close with the code 1000, and wait for the server's close. Frames that come before that are read and
        dropped: unread ones would hold it up."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connection.close())
            with suppress(ConnectionClosed, ConcurrencyError):  # another task may still read
                while True:
                    await self._connection.recv(decode=False)


async def dial(
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    *,
    ssl: SSLContext | None = None,
    msgpack: bool = False,
    **parameters: str,
) -> WebSocketTransport:
    """Connect a WebSocket to the server at `url`: `ws[s]://`, `http[s]://` or without a scheme. `api_key` is
    sent as a bearer token; `model` and `parameters` are put into the query.

    `ssl`: checks the server's certificate if the address asks for TLS; None: by the system's authorities.
    `msgpack`: ask for frames in MessagePack; a server that has only JSON answers in JSON. Raises
    `ConnectionFailed`, or the subclass that fits, with the server's words.
    """
    address = realtime_url(url, model, **parameters)
    secured: dict[str, Any] = {"ssl": ssl} if ssl is not None and address.startswith("wss:") else {}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection = await websocket_connect(
            address,
            additional_headers=headers,
            subprotocols=[Subprotocol(PACKED)] if msgpack else None,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            open_timeout=OPEN_SECONDS,
            **secured,
            proxy=None if urlsplit(address).hostname in LOOPBACK else True,
        )
    except InvalidStatus as error:
        raise _refused(address, error.response) from error
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as error:
        raise ConnectionFailed(_reason(error), address=shown(address)) from error
    return WebSocketTransport(connection)


def realtime_url(url: str, model: str | None = None, **parameters: str) -> str:
    """The WebSocket address of the server at `url`: `ws[s]://`, `http[s]://` or without a scheme, with or
    without `/v1/realtime`. `model` (None: leave it as it is in `url`) and `parameters` are put into its query.
    Raises `ConnectionFailed` if `url` is no address."""
    try:
        parts = urlsplit(url if "://" in url else f"ws://{url}")
        scheme = SCHEMES.get(parts.scheme)
        valid = scheme is not None and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConnectionFailed(f"Not an address: {url!r}: {error}") from None
    if not valid or scheme is None:
        raise ConnectionFailed(
            f"Not the address of a server: {url!r}; its scheme must be ws, wss, http or https"
        )
    path = parts.path.rstrip("/")
    if not path.endswith("/realtime"):  # the server's root, or a prefix below which it is served
        path = path.removesuffix("/v1") + PATH
    query = [
        pair for pair in parse_qsl(parts.query, keep_blank_values=True) if not model or pair[0] != "model"
    ]
    if model:
        query.append(("model", model))
    query += parameters.items()
    return SplitResult(scheme, parts.netloc, path, urlencode(query), "").geturl()


def shown(address: str) -> str:
    """The address as people read it in an error: without the query, and without what may be a password."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


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
            Request(address, body, headers, method=method), timeout=ANSWER_SECONDS
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


def _refused(address: str, answer: Response) -> ConnectionFailed:
    """The error for an HTTP `answer` that the server, or a proxy before it, gave instead of opening the
    connection."""
    words, code = words_of(answer.status_code, answer.reason_phrase, bytes(answer.body or b""))
    kind = REFUSALS.get(answer.status_code, ConnectionFailed)
    return kind(f"{answer.status_code}: {words}", answer.status_code, code, address=shown(address))


def words_of(status: int, reason: str, answer: bytes) -> tuple[str, str | None]:
    """Why the server, or a proxy before it, refuses a request, and its code if it gave one. `status`, `reason`,
    `answer`: of its HTTP answer."""
    body, code = answer.decode(errors="replace").strip(), None
    try:
        told = msgspec.json.decode(body, type=_Answer).error
        words, code = told.message, told.code
    except msgspec.MsgspecError:
        words = body if len(body) <= MOST_WORDS and "<" not in body else ""
    words = words or reason or "no reason given"
    if status == 401:
        words += "; here the key is api_key=… or HOLDFAST_API_KEY"
    return words, code


def _reason(error: Exception) -> str:
    """Why no connection was made, in one line."""
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


class _Refusal(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Answer(msgspec.Struct):
    error: _Refusal


def _lost(error: ConnectionClosed) -> ConnectionLost:
    close = error.rcvd
    if close is None:
        return ConnectionLost("The connection broke")
    told = f"The server closed the connection: {close.code} {close.reason}".rstrip()
    return ConnectionLost.closed(told, close.code)
