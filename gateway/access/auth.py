"""API keys, and the guard that checks every request before its route, for HTTP and WebSocket alike.

With keys, every route except the probes and the pages asks for ``Authorization: Bearer`` or ``x-api-key``. A
key stands for a tenant; other tenants never find its cached KV. Without keys the server trusts its machine,
except web pages that the machine's user opens: a foreign ``Origin`` that was not allowed is refused, and so is
a ``Host`` that is no name of this server. (Otherwise a page could point its own name at this machine and read
the answers: DNS rebinding.)

A keys file may hold a key's digest instead of the key, so that a thief of the file gets no key:
``blake2b:HEX``, the BLAKE2b of the key in 32 bytes, or ``sha256:HEX``.
"""

from __future__ import annotations

import hashlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from ...kvstore.log_lines import about, logging_with
from ...sessions.conversation.items import new_id
from ..errors import (
    INTERNAL,
    GatewayError,
    HostRefused,
    KeyInvalid,
    KeysUnusable,
    OperatorWanted,
    OriginRefused,
    http_answer,
    messages_answer,
    wire_error,
)
from ..net.channel import SERVE
from ..settings import GatewaySettings
from .attribution import ATTRIBUTION, OTHER, Attribution
from .turn_queue import PLACE, Place

log = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]

LEFT = 499
"""The status, nginx's, of the answer to a client that has left. No client gets it."""
PROBES = frozenset({"/health", "/ready"})
MESSAGES = "/v1/messages"
"""The path of Anthropic's Messages API. Errors of this path and of those below it have Anthropic's form."""
PAGES = frozenset({"/", "/docs", "/openapi.json", "/asyncapi.json"})
PAGE_FILES = "/page/"
"""The path prefix of the pages' files. Like the pages themselves (`PAGES`), they are the same for all clients
and need no key."""
OPERATORS_ROUTES = frozenset({"/metrics", "/version"})
"""The routes that an operator's key opens even if it is not a tenant's key."""
OPERATOR_PATH = "/operator/"
"""The paths that begin with it are open to operators alone."""
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""So are these, which vLLM has."""
TENANT = "holdfast.tenant"
"""The key of a request's ASGI scope under which the guard puts the salt of the client's tenant (`salt_of`)."""
REQUEST = "holdfast.request"
"""The key of a request's ASGI scope under which the guard puts the request's id, for an answer's header and
for log lines; a WebSocket has none."""
KEY_WANTED = (
    "{}: send `Authorization: Bearer KEY` or `x-api-key: KEY`, with the key of the server's --api-key or "
    "HOLDFAST_API_KEY, or one of its --keys file"
)
KEY_PROTOCOL = "openai-insecure-api-key."
"""A WebSocket subprotocol that begins with this carries the client's key."""
OPERATOR = "holdfast.operator"
"""The key of a request's ASGI scope under which the guard puts whether the client may see the numbers and
the sessions of all tenants."""
KEY = "holdfast.key"
"""The key of a request's ASGI scope under which the guard puts the digests of the client's API key, if the
server has keys: first its BLAKE2b, by which the server knows a key, then its SHA-256, by which the keys file
may name it instead."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers by which a client names the span that its request is part of. https://www.w3.org/TR/trace-context/"""
MOST_FILE_BYTES = 1 << 20
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""The form of a tenant's name."""
DIGEST = re.compile(r"(blake2b|sha256):([0-9a-f]{64})", re.IGNORECASE)
"""The form of a key's digest, as a keys file may hold it instead of the key."""
HOST = re.compile(r"(\[(?P<address>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:\d*)?", re.ASCII)
"""The form of a Host header's value."""


@dataclass(frozen=True, slots=True)
class TurnCaller:
    """The client for which turns run. ``key``: the BLAKE2b of its API key, ``salt``: that of its tenant; both
    are empty without keys. ``trace``: its `TRACE_HEADERS`. ``place``: in the queue, for the turn of its
    request; None if the turn gets one when it begins. ``attribution``: for log lines and metrics. ``owner``:
    the digest of its key by which it owns sessions (`owners_of`)."""

    key: bytes = b""
    salt: bytes = b""
    trace: Mapping[str, str] = field(default_factory=dict)
    place: Place | None = None
    attribution: Attribution = Attribution()
    owner: bytes = b""


def caller_of(scope: Scope) -> TurnCaller:
    """The client of the request with this ASGI ``scope``, which the guard has let in."""
    headers = Headers(scope=scope)
    trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    key, salt = scope.get(KEY, (b"",))[0], scope.get(TENANT, b"")
    attribution, owner = scope.get(ATTRIBUTION, Attribution()), owners_of(headers)[0]
    return TurnCaller(key, salt, trace, scope.get(PLACE), attribution, owner)


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Which client a connection belongs to, and what it asked for when it connected.

    ``caller``: the client; only one with the same ``owner`` can resume its sessions. ``former_owner``: the
    digest that earlier versions made of its key, which serves as well. ``aliases``: other digests of that key.
    ``address``: its IP address. ``resumable``: it can come back with a handle, so its replies continue without
    it. ``resume``: it comes back now, so the socket opens no new session. ``model``: the model name that it
    asked for.
    """

    caller: TurnCaller = TurnCaller(attribution=Attribution(protocol="realtime"))
    former_owner: bytes | None = None
    aliases: tuple[bytes, ...] = ()
    address: str = ""
    resumable: bool = False
    resume: bool = False
    model: str | None = None


def identity_of(socket: WebSocket) -> ClientIdentity:
    """The client of a WebSocket that the guard has let in. Call it before the socket is accepted: then its
    headers are gone."""
    asked = socket.query_params
    return ClientIdentity(
        caller_of(socket.scope),
        owners_of(socket.headers)[1],
        aliases=socket.scope.get(KEY, ())[1:],
        address="" if socket.client is None else socket.client.host,
        resumable=asked.get("resumable") == "true",
        resume=asked.get("resume") == "true",
        model=asked.get("model"),
    )


def owners_of(headers: Headers) -> tuple[bytes, ...]:
    """Two digests, of 16 bytes each, that stand for a client as the owner of sessions: only a client with the
    same digest can resume them. New sessions get the first. The second is the one that an earlier version gave
    its sessions over Realtime, so that they can still be resumed. Both are made from the API key, wherever the
    headers have it; without a key all clients have the same ones."""
    key = key_of(headers)
    sent = headers.get("authorization", "") or (f"Bearer {key}" if key else "")
    former = hashlib.blake2b(sent.encode(), digest_size=16).digest()
    return hashlib.blake2b(_blake2b(key) if key else b"", digest_size=16).digest(), former


@dataclass(frozen=True, slots=True)
class Keys:
    """The valid API keys, as digests: the keys themselves are not kept. ``tenants``: the name of its tenant by
    each key's digest. ``operators``: the digests of the keys that may see all tenants' numbers. A digest is the
    one that the keys file has, or the BLAKE2b of a key in the file."""

    tenants: Mapping[bytes, str]
    operators: frozenset[bytes] = frozenset()

    @classmethod
    def one(cls, key: str) -> Keys:
        """The keys of a server with a single key, which belongs to a tenant without a name and is the
        operator's key, too.

        Raises ``KeysUnusable`` if the key is empty, because a client without a key would match it, or begins or
        ends with a blank.
        """
        if not key or key != key.strip():
            raise KeysUnusable("--api-key is empty, or begins or ends with a blank")
        digest = _stored(key, "--api-key")
        return cls({digest: ""}, frozenset({digest}))

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a keys file of plain text: on each line a key, or its digest, and the name of its tenant. ``#``
        begins a comment.

        Raises ``KeysUnusable``. The error names the file and the line, never a key.
        """
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) != 2 or not NAME.fullmatch(words[1]):
                raise KeysUnusable(f"{path}, line {number}: not a key and the name of its tenant")
            add_key(tenants, words[0], words[1], f"{path}, line {number}: this key")
        if not tenants:
            raise KeysUnusable(f"{path} has no keys")
        return cls(tenants)

    def tenant(self, key: str) -> str | None:
        """The name of the tenant that ``key`` belongs to; None if the key is not valid for any."""
        return next((self.tenants[digest] for digest in _digests(key) if digest in self.tenants), None)

    def is_operator(self, key: str) -> bool:
        """Whether a client with this key may see the numbers and the sessions of all tenants."""
        return not self.operators.isdisjoint(_digests(key))

    def digests_of(self, key: str) -> tuple[bytes, ...]:
        """The BLAKE2b and the SHA-256 of a valid key; empty for a key that is not valid."""
        return () if self.tenant(key) is None else _digests(key)

    def with_operators(self, keys: Iterable[str], source: str) -> Keys:
        """A copy of these keys in which ``keys`` are operators' keys, too. ``source``: where they come from,
        for the error. Raises ``KeysUnusable`` if one is empty or has blanks."""
        operators = set[bytes]()
        for key in keys:
            if len(key.split()) != 1 or key != key.strip():
                raise KeysUnusable(f"{source} is empty, or has blanks in it")
            operators.add(_stored(key, source))
        return Keys(self.tenants, self.operators | operators)

    def opens(self, digests: Iterable[bytes], salt: bytes) -> bool:
        """Whether one key, of which these are the digests, is still valid and still belongs to the tenant with
        this salt."""
        tenant = next((self.tenants[digest] for digest in digests if digest in self.tenants), None)
        return tenant is not None and salt_of(tenant) == salt


def add_key(tenants: dict[bytes, str], key: str, tenant: str, source: str) -> None:
    """Add ``key``, a key or its digest, to ``tenants``, a mapping from digests of keys to tenants' names, as a
    key of ``tenant``. ``source``: where the key comes from, for the error. Raises ``KeysUnusable`` if it is
    empty, has blanks, is not a valid digest, or belongs to another tenant."""
    if len(key.split()) != 1 or key != key.strip():
        raise KeysUnusable(f"{source} is empty, or has blanks in it")
    if tenants.setdefault(_stored(key, source), tenant) != tenant:
        raise KeysUnusable(f"{source} is another tenant's already")


def read_text(path: Path) -> str:
    """Read a keys file and return its text. Raises ``KeysUnusable`` if it cannot be read or is too long."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise KeysUnusable(f"{path} has more than {MOST_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise KeysUnusable(f"{path}: {error}") from None


def salt_of(tenant: str) -> bytes:
    """The salt that keeps a tenant's cached KV apart from that of others: 16 bytes, a BLAKE2b hash of the name.
    Empty for a tenant without a name."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest() if tenant else b""


def written_digest(key: str) -> str:
    """A key's digest in the form in which a keys file may hold it instead of the key: ``blake2b:HEX``."""
    return f"blake2b:{_blake2b(key).hex()}"


def _stored(key: str, source: str) -> bytes:
    """The digest for an entry of a keys file, which is a digest as text or a key; of a key it is the BLAKE2b.
    ``source``: where the entry comes from, for the error. Raises ``KeysUnusable`` for a malformed digest."""
    found = DIGEST.fullmatch(key)
    if found is not None:
        return bytes.fromhex(found[2])
    if key.lower().startswith(("blake2b:", "sha256:")):
        raise KeysUnusable(f"{source} is no digest of a key: it has not 64 digits from 0 to f")
    return _blake2b(key)


def _digests(key: str) -> tuple[bytes, ...]:
    """The digests by which a client's key may be known: its BLAKE2b and its SHA-256; empty for an empty key.
    Keys are looked up by them, so that the time of a look-up reveals nothing of a key."""
    return (_blake2b(key), hashlib.sha256(key.encode()).digest()) if key else ()


def _blake2b(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


class Hosts:
    """The host names that the server accepts in a request's Host header; ports are ignored.

    IP addresses and localhost are always accepted, because a web page cannot make them point to this server.
    ``names``: the other names; ``*.NAME`` stands for all names below NAME, ``*`` for any name. None: any name.
    """

    def __init__(self, names: Iterable[str] | None) -> None:
        self._any = names is None or "*" in (names := frozenset(name.lower() for name in names))
        self._names = frozenset() if names is None else names

    @classmethod
    def of(cls, settings: GatewaySettings, *, keys: bool) -> Hosts:
        """The host names that these settings allow. If they name none: any name if the server has ``keys``,
        because a web page has no key; else the name that the server listens on, and the machine's own name if
        it listens beyond loopback."""
        if settings.network.allowed_hosts:
            return cls(settings.network.allowed_hosts)
        if keys:
            return cls(None)
        return cls([settings.host, *([] if _is_loopback(settings.host) else [socket.gethostname()])])

    def __contains__(self, header: object) -> bool:
        """Whether ``header``, a Host header's value, names an allowed host."""
        if self._any:
            return True
        name = _name(str(header))
        if name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return True
        parents = name.split(".")[1:]
        return any("*." + ".".join(parents[at:]) in self._names for at in range(len(parents)))


class Guard:
    """ASGI middleware that checks every request before ``app`` gets it. ``keys`` returns the keys that are
    valid now; None: the server has no keys, and every client on this machine is admitted. ``hosts``: allowed
    host names; None: those of a loopback server. ``origins``: without keys, the origins of other servers' web
    pages that may connect; ``*``: all. ``route_of``: the route of a path. ``count`` is called with each request
    and the status of its answer: 101 for a WebSocket that is let in.

    It puts into the request's scope the tenant's salt (`TENANT`), whether the client may see all tenants'
    numbers (`OPERATOR`), its `Attribution`, and the digests of the client's key (`KEY`), if the server has
    keys. All log lines of the request have its attribution.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Callable[[], Keys | None],
        hosts: Hosts | None = None,
        origins: Iterable[str] = (),
        route_of: Callable[[str], str] = lambda path: OTHER,
        count: Callable[[Attribution, str], None] = lambda attribution, status: None,
    ) -> None:
        self._app = app
        self._route_of = route_of
        self._count = count
        self._keys = keys
        self._origins = frozenset(origin.lower() for origin in origins)
        self._hosts = hosts or Hosts.of(GatewaySettings(), keys=keys() is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 (no valid key) or 403 (host or origin not allowed)."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        route = self._route_of(path_of(scope))
        scope[ATTRIBUTION] = Attribution.of("", route)
        if scope["type"] == "http":
            scope[REQUEST] = new_id("req")
        refused = None
        try:
            self._admit(scope, Headers(scope=scope))
        except GatewayError as error:
            refused = error
        attribution: Attribution = scope[ATTRIBUTION]

        async def counting(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                self._count(attribution, str(message["status"]))
            await send(message)

        with logging_with(request=scope.get(REQUEST), **attribution.facts()):
            app = self._app if refused is None else refusal(refused, scope)
            await app(scope, receive, counting)
        if SERVE in scope:
            self._count(attribution, "101")

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Check a request's host, origin and key, and put the tenant's salt, the operator's right and the key's
        digests into its scope. For a probe, a page or a page's file only the host is checked, and the scope
        gets nothing.

        Raises ``HostRefused``, ``OriginRefused``, ``KeyInvalid`` or ``OperatorWanted``.
        """
        host = headers.get("host")
        if host is not None and host not in self._hosts:
            raise HostRefused(f"this server does not answer to the host {host[:256]!r}: see --allowed-host")
        path = path_of(scope)
        operators = path.startswith(OPERATOR_PATH) or path in (LOAD_ADAPTER, UNLOAD_ADAPTER)
        if path in PROBES or path in PAGES or path.startswith(PAGE_FILES):
            return
        keys = self._keys()
        if keys is None:
            if not (_same_origin(headers) or {"*", headers["origin"].lower()} & self._origins):
                raise OriginRefused("this origin may not connect: see --allow-origin")
            scope[TENANT], scope[OPERATOR] = b"", True
            return
        bearer = key_of(headers)
        tenant, operator = keys.tenant(bearer), keys.is_operator(bearer)
        if tenant is None and not (operator and (operators or path in OPERATORS_ROUTES)):
            wrong = "An operator's key opens no sessions" if operator else "This API key is not valid here"
            raise KeyInvalid(KEY_WANTED.format(wrong if bearer else "No API key"))
        if operators and not operator:
            what = OPERATOR_PATH if path.startswith(OPERATOR_PATH) else path
            raise OperatorWanted(f"{what} is for operators: send the key of --operator-key or [operators]")
        scope[TENANT], scope[OPERATOR] = salt_of(tenant or ""), operator
        scope[ATTRIBUTION] = replace(scope[ATTRIBUTION], tenant=tenant or "")
        if tenant is not None:
            scope[KEY] = keys.digests_of(bearer)


def refusal(error: Exception, scope: Scope) -> Response:
    """Make the HTTP answer that refuses the request of ``scope`` because of ``error``, and log the refusal.
    Answer and log lines have the request's id, which the client finds in the header ``x-request-id``. A client
    of Anthropic's Messages gets Anthropic's form of the error, and the header ``request-id`` besides."""
    request_id = scope.get(REQUEST) or new_id("req")
    if speaks_messages(scope):
        body, status, headers = messages_answer(error, request_id)
        headers = {**(headers or {}), "request-id": request_id}
    else:
        body, status, headers = http_answer(error)
    client = scope.get("client")
    facts = about(request_id, client=client[0] if client else None, code=wire_error(error).code)
    if wire_error(error) is INTERNAL:
        log.error("request failed", exc_info=error, extra=facts)
    else:
        log.log(
            logging.INFO if status in (404, 405, 426) else logging.WARNING, "request refused", extra=facts
        )
    return JSONResponse(body, status, {**(headers or {}), "x-request-id": request_id})


def speaks_messages(scope: Scope) -> bool:
    """Whether a request comes from a client of Anthropic's Messages: its path is of that API, or it has the
    header ``anthropic-version``."""
    path = path_of(scope)
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or "anthropic-version" in Headers(scope=scope)


def refusing(serve: Endpoint) -> Endpoint:
    """Wrap an endpoint: an error that ``serve`` raises is answered as `refusal` makes it. A client that has
    left gets no answer."""

    async def endpoint(request: Request) -> Response:
        try:
            return await serve(request)
        except ClientDisconnect:
            client = request.client
            log.info("the client left", extra=about("", client=client.host if client else None))
            return Response(status_code=LEFT)
        except Exception as error:
            return refusal(error, request.scope)

    return endpoint


def key_of(headers: Headers) -> str:
    """The API key in a request's headers; empty if there is none. It comes from ``Authorization: Bearer``, else
    from ``x-api-key``, else from the WebSocket's subprotocols, because a browser cannot set those headers. An
    ``Authorization`` of another scheme counts as no key, whatever else is sent."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme:
        return given.strip() if scheme.lower() == "bearer" else ""
    if named := headers.get("x-api-key", "").strip():
        return named
    offered = headers.get("sec-websocket-protocol", "").split(",")
    keys = (one.strip().removeprefix(KEY_PROTOCOL) for one in offered if one.strip().startswith(KEY_PROTOCOL))
    return next(keys, "")


def path_of(scope: Scope) -> str:
    """The path of a request, without the prefix under which a proxy serves this server."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _same_origin(headers: Headers) -> bool:
    """Whether no web page of another server asks: the ``Origin`` header is missing, or names this server. It is
    compared with the ``Host`` header, which was checked before."""
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:  # the origin is not a URL
        return False


def _name(host: str) -> str:
    """The name or address in a Host header's value: in lower case, without the port and the last dot of an
    absolute DNS name. Empty if the value is not valid."""
    found = HOST.fullmatch(host.strip().lower())
    return "" if found is None else found["address"] or found["name"].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
