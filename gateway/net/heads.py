"""The head of a request, before a parser gets it: where it ends, whether it can be read in one way only, and
the whole answer to a request that no route gets."""

from __future__ import annotations

import re
from email.utils import formatdate

from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES

from ..errors import HeadInvalid, HeadTooLarge

HEAD_END = re.compile(rb"\n\r?\n")
"""The end of a request's head, as h11 finds it."""
MOST_LINES = 256
"""The most lines of a head: each header is searched for among all others."""
_UNCLEAR = re.compile(rb"\r(?!\n)|\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""What ends a line for some programs and not for others, and control characters, which no head may have."""
_FRAMING = re.compile(rb"\n(content-length|transfer-encoding)[ \t]*:([^\n]*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[ \t]*[0-9]+[ \t\r]*")


def check_head(head: bytes) -> None:
    """Check the whole head of a request, with its last line's end. A program between the client and this one,
    which reads it in another way, would see another request behind it (request smuggling, RFC 9112, 11.2).

    Raises ``HeadTooLarge`` for too many lines, ``HeadInvalid`` for one that can be read in two ways.
    """
    lines = head.count(b"\n")
    if lines > MOST_LINES:
        raise HeadTooLarge(f"The request's head has more than {MOST_LINES} lines: send fewer headers")
    if head.count(b"\r\n") not in (0, lines) or _UNCLEAR.search(head):
        raise HeadInvalid("The request's head has a control character, or a line that CR LF does not end")
    framing = _FRAMING.findall(head)
    if len(framing) > 1:
        told = "more than one Content-Length or Transfer-Encoding header: send one of them, once"
        raise HeadInvalid(f"The request has {told}")
    for name, value in framing:
        if name.lower() == b"content-length" and not _LENGTH.fullmatch(value):
            raise HeadInvalid("The request's Content-Length is not one number: send the body's bytes")
        if name.lower() != b"content-length" and b"HTTP/1.0" in head[: head.find(b"\n")]:
            raise HeadInvalid(
                "The request has a Transfer-Encoding, which HTTP/1.0 does not have: use HTTP/1.1"
            )


def whole_answer(response: Response, more: dict[str, str] | None = None, *, close: bool) -> bytes:
    """A whole HTTP answer as bytes. ``more``: headers besides its own. ``close``: the connection ends with
    it."""
    ending = {"connection": "close"} if close else {}
    response.headers.update({"date": formatdate(usegmt=True), **(more or {}), **ending})
    head = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
    status = response.status_code
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (status, STATUS_PHRASES[status], head, response.body)
