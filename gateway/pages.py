"""The pages that a browser gets: the playground at ``/``, the documents at ``/docs``, and the files of both.

The files are package data in ``gateway/page/``; ``vendor/`` in it has libraries of others. They are the same
for all clients, hold nothing secret and load nothing from elsewhere; the playground opens the Realtime
WebSocket, with a key if the server asks for one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from html import escape
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .access.auth import PAGE_FILES

FOLDER = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked again with its tag, so that another version of the server is seen
}
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as browsers get it. ``body``: its content. ``kind``: its media type. ``tag``: its ETag, with the
    quotes."""

    body: bytes
    kind: str
    tag: str

    @classmethod
    def of(cls, body: bytes, ending: str) -> PageFile:
        """Make a file with this content. ``ending``: its suffix, such as ``.html``, which gives its media
        type."""
        return cls(body, KINDS[ending], f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')

    async def answer(self, request: Request) -> Response:
        """The answer to a request for the file: its content, or 304 without content if the browser has this
        version."""
        headers = {**HEADERS, "etag": self.tag}
        known = {
            tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")
        }
        if self.tag in known:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.kind, headers=headers)


def page_routes(root_path: str) -> list[BaseRoute]:
    """The routes of the playground (``/``), of the documents' page (``/docs``) and of the files that both load.
    ``root_path``: the URL prefix under which a proxy serves this server; the pages' links begin there. Empty
    without a prefix."""
    files = {
        path.relative_to(FOLDER).as_posix(): PageFile.of(path.read_bytes(), path.suffix)
        for path in FOLDER.rglob("*")
        if path.suffix in KINDS and path.suffix != ".html"
    }
    playground, documents = (_based(FOLDER / name, root_path) for name in ("index.html", "docs.html"))
    return [
        Route("/", playground.answer),
        Route("/docs", documents.answer),
        *(Route(f"{PAGE_FILES}{name}", file.answer) for name, file in sorted(files.items())),
    ]


def _based(path: Path, root_path: str) -> PageFile:
    """The HTML file at ``path``, ready to be sent. With a ``root_path``, the page's base URL is set to that
    prefix, so that its links work also where the page's URL ends without a slash."""
    text = path.read_text()
    if root_path:
        text = text.replace('<base href="./" />', f'<base href="{escape(root_path)}/" />', 1)
    return PageFile.of(text.encode(), ".html")
