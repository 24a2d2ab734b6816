"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

MOST = 1 << 63
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<prefix>[kmgt]?)(i?b)?", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """``8GiB``, ``512 MiB``, ``4096``: a size in bytes. Raises ``ValueError``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 8GiB")
    size = float(found["number"]) * 1024 ** " kmgt".index(found["prefix"].lower() or " ")
    if size >= MOST:
        raise ValueError(f"{text!r} is more bytes than any machine has")
    return int(size)
