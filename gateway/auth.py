"""Keys, and the guard before every route, for HTTP and WebSocket alike.

With keys, every route except the probes asks for ``Authorization: Bearer``. A key stands for a tenant; other
tenants never find its cached KV. Without keys the server trusts its machine, except web pages that the
machine's user opens: a foreign ``Origin`` that was not allowed is refused, and so is a ``Host`` that is no name
of this server. (Otherwise a page could point its own name at this machine and read the answers: DNS rebinding.)
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import GatewayError, HostRefused, KeyInvalid, KeysUnusable, OriginRefused, http_answer
from .settings import GatewaySettings

PROBES = frozenset({"/health", "/ready"})
OPERATORS_ROUTES = frozenset({"/metrics", "/version"})
"""The routes that an operator's key opens without being a tenant's."""
TENANT = "holdfast.tenant"
"""The key of a request's scope for the salt of its tenant."""
KEY_PROTOCOL = "openai-insecure-api-key."
"""Begins a WebSocket subprotocol that is the client's key."""
OPERATOR = "holdfast.operator"
"""The key of the scope for whether all tenants' numbers may be shown."""
KEY = "holdfast.key"
"""The key of the scope for the digest of the API key, if keys are asked for."""
MOST_FILE_BYTES = 1 << 20
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""A tenant's name."""
HOST = re.compile(r"(\[(?P<address>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:\d*)?", re.ASCII)
"""A Host header's value."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The valid keys: the tenant of each key, by the key's digest, and the digests of operators' keys."""

    tenants: Mapping[bytes, str]
    operators: frozenset[bytes] = frozenset()

    @classmethod
    def one(cls, key: str) -> Keys:
        """A single key, of a tenant without a name. It is the operator's key, too.

        Raises ``KeysUnusable`` for an empty key, which a client without a key would match.
        """
        if not key or key != key.strip():
            raise KeysUnusable("--api-key is empty, or begins or ends with a blank")
        return cls({_digest(key): ""}, frozenset({_digest(key)}))

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a file with a key and the name of its tenant on each line; ``#`` begins a comment.

        Raises ``KeysUnusable``, which names file and line, never a key.
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
        """The tenant of a key; None where the key is not valid."""
        return self.tenants.get(_digest(key))

    def is_operator(self, key: str) -> bool:
        """Whether all tenants' numbers may be shown for this key."""
        return _digest(key) in self.operators

    def with_operators(self, keys: Iterable[str], place: str) -> Keys:
        """The same keys with these operators' keys. Raises ``KeysUnusable``, naming their place."""
        operators = set[bytes]()
        for key in keys:
            if len(key.split()) != 1 or key != key.strip():
                raise KeysUnusable(f"{place} is empty, or has blanks in it")
            operators.add(_digest(key))
        return Keys(self.tenants, frozenset(operators))

    def opens(self, key: bytes, salt: bytes) -> bool:
        """Whether the key of this digest is still one of the tenant with this salt."""
        tenant = self.tenants.get(key)
        return tenant is not None and salt_of(tenant) == salt


def add_key(tenants: dict[bytes, str], key: str, tenant: str, place: str) -> None:
    """Add a tenant's key. Raises ``KeysUnusable``, naming its place: it is no key, or another tenant's."""
    if len(key.split()) != 1 or key != key.strip():
        raise KeysUnusable(f"{place} is empty, or has blanks in it")
    if tenants.setdefault(_digest(key), tenant) != tenant:
        raise KeysUnusable(f"{place} is another tenant's already")


def read_text(path: Path) -> str:
    """A keys file's text. Raises ``KeysUnusable``."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise KeysUnusable(f"{path} has more than {MOST_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise KeysUnusable(f"{path}: {error}") from None


def salt_of(tenant: str) -> bytes:
    """The salt that separates a tenant's cached KV from others'; empty for a tenant without a name."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest() if tenant else b""


def _digest(key: str) -> bytes:
    """The digest that is looked up instead of the key, so that the time of a look-up tells nothing of it."""
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


class Hosts:
    """The names by which the server may be addressed; ports do not count.

    Addresses and localhost always count, because no page can point these elsewhere. ``names``: the others;
    None: any name.
    """

    def __init__(self, names: Iterable[str] | None) -> None:
        self._any = names is None or "*" in (names := frozenset(name.lower() for name in names))
        self._names = frozenset() if names is None else names

    @classmethod
    def of(cls, settings: GatewaySettings, *, keys: bool) -> Hosts:
        """The names that the settings give. Where they give none: with ``keys`` any name, because no page has a
        key; else the name that the server listens on, and the machine's own if it listens beyond loopback.
        """
        if settings.network.allowed_hosts:
            return cls(settings.network.allowed_hosts)
        if keys:
            return cls(None)
        return cls([settings.host, *([] if _is_loopback(settings.host) else [socket.gethostname()])])

    def __contains__(self, header: object) -> bool:
        """Whether a Host header's value is one of them."""
        if self._any:
            return True
        name = _name(str(header))
        if name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return True
        parents = name.split(".")[1:]
        return any("*." + ".".join(parents[at:]) in self._names for at in range(len(parents)))


class Guard:
    """ASGI middleware. ``keys`` returns those that count at the moment; None: every client on this machine is
    admitted. ``hosts``: by default a loopback server's. ``origins``: of other servers' pages that may connect
    without a key; ``*``: of any.

    Puts the key's tenant into the request's scope (`TENANT`), and whether it may see all tenants' numbers
    (`OPERATOR`).
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Callable[[], Keys | None],
        hosts: Hosts | None = None,
        origins: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = frozenset(origin.lower() for origin in origins)
        self._hosts = hosts or Hosts.of(GatewaySettings(), keys=keys() is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 (no valid key) or 403 (host or origin not allowed)."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope, Headers(scope=scope))
        except GatewayError as error:
            await JSONResponse(*http_answer(error))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Check a request and put its tenant into its scope.

        Raises ``HostRefused``, ``OriginRefused`` or ``KeyInvalid``.
        """
        host = headers.get("host")
        if host is not None and host not in self._hosts:
            raise HostRefused(f"this server does not answer to the host {host[:256]!r}: see --allowed-host")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in PROBES:
            return
        keys = self._keys()
        if keys is None:
            if not (_same_origin(headers) or self._allows(headers["origin"])):
                raise OriginRefused("this origin may not connect: see --allow-origin")
            scope[TENANT], scope[OPERATOR] = b"", True
            return
        bearer = key_of(headers)
        tenant, operator = keys.tenant(bearer), keys.is_operator(bearer)
        if tenant is None and not (operator and path in OPERATORS_ROUTES):
            raise KeyInvalid("a valid API key is needed: Authorization: Bearer KEY")
        scope[TENANT], scope[OPERATOR] = salt_of(tenant or ""), operator
        scope[KEY] = _digest(bearer)

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins


def key_of(headers: Headers) -> str:
    """The key of a request: from ``Authorization``, or from the WebSocket's subprotocols, because a browser
    cannot set that header."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme:
        return given.strip() if scheme.lower() == "bearer" else ""
    offered = headers.get("sec-websocket-protocol", "").split(",")
    keys = (one.strip().removeprefix(KEY_PROTOCOL) for one in offered if one.strip().startswith(KEY_PROTOCOL))
    return next(keys, "")


def _same_origin(headers: Headers) -> bool:
    """Whether no web page asks, or a page of this server. The host was checked before."""
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
    except ValueError:  # not a URL
        return False


def _name(host: str) -> str:
    """A Host header's value in lower case, without the port and the dot of an absolute DNS name; empty if it is
    not valid.
    """
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
