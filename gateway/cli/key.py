"""``holdfast key``: makes API keys, and the digests of keys for the keys file."""

from __future__ import annotations

import secrets
import sys
from typing import Literal

from ..access.auth import NAME, written_digest
from .options import refused

PREFIX = "sk-hf-"
RANDOM_BYTES = 32


def run(act: Literal["new", "digest"], tenant: str) -> int:
    """Print for each key of the tenant the line for the keys file, which has its digest. ``new``: a fresh key,
    which is printed before its line and kept nowhere. ``digest``: the keys on stdin, one on each line. Returns
    the exit code: 0, or 2 if ``tenant`` is no name of a tenant."""
    if not NAME.fullmatch(tenant):
        return refused(f"{tenant!r} is no name of a tenant: letters, digits, . _ -")
    fresh = PREFIX + secrets.token_urlsafe(RANDOM_BYTES) if act == "new" else ""
    if fresh:
        print(fresh)
    for key in filter(None, [fresh] if fresh else map(str.strip, sys.stdin)):
        hashed = written_digest(key)
        print(f"{hashed} {tenant}")
        print(f'In a TOML file: keys = ["{hashed}"] below [tenants.{tenant}]', file=sys.stderr)
    if fresh:
        print("The first line is the key, which is shown only now.", file=sys.stderr)
    return 0
