"""Who may come in: one guard before every route, for HTTP and WebSocket alike.

With keys, every route but the probes asks for ``Authorization: Bearer``; a key stands for a tenant, whose
cached KV no other tenant finds. Without keys the server trusts its machine, but not web pages that the
machine's user looks at: a foreign ``Origin`` is refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import KeysUnusable

PROBES = frozenset({"/health", "/ready"})
TENANT = "holdfast.tenant"
"""Where a request's scope has the salt of its tenant."""
MOST_FILE_BYTES = 1 << 20
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""Of a tenant."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may come in: the tenant of each key, by the key's digest."""

    tenants: Mapping[bytes, str]

    @classmethod
    def one(cls, key: str) -> Keys:
        """A single key, of a tenant without a name.

        Raises ``KeysUnusable``: whoever gives none would be let in by an empty one.
        """
        if not key or key != key.strip():
            raise KeysUnusable("--api-key is empty, or begins or ends with a blank")
        return cls({_digest(key): ""})

    @classmethod
    def read(cls, path: Path) -> Keys:
        """A file with a key and the name of its tenant on each line; ``#`` begins a remark.

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
        """Whose key it is; None: nobody's."""
        return self.tenants.get(_digest(key))


def add_key(tenants: dict[bytes, str], key: str, tenant: str, place: str) -> None:
    """Make it the tenant's. Raises ``KeysUnusable``, naming its place: it is none, or another tenant's."""
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
    """What separates a tenant's cached KV from others'; empty for one without a name."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest() if tenant else b""


def _digest(key: str) -> bytes:
    """Compared in place of the key: how long a look-up takes tells nothing of any key."""
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


class Guard:
    """ASGI middleware; without ``keys`` there is only the check of the origin."""

    def __init__(self, app: ASGIApp, keys: Keys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        tenant = "" if self._keys is None else self._keys.tenant(_bearer(headers))
        refusal = None
        if tenant is None:
            refusal = _refused(401, "invalid_api_key", "a valid API key is needed: Authorization: Bearer KEY")
        elif self._keys is None and not _same_origin(headers):
            refusal = _refused(403, "origin_not_allowed", "this origin may not connect")
        else:
            scope[TENANT] = salt_of(tenant)
        await (self._app if refusal is None else refusal)(scope, receive, send)


def _bearer(headers: Headers) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


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
