"""``holdfast key``: makes API keys, and the digests of keys for the keys file."""

from __future__ import annotations

import secrets
import sys

from ..access.auth import NAME, written_digest
from .options import refused

PREFIX = "sk-hf-"
RANDOM_BYTES = 32


def new(tenant: str) -> int:
    """Make a fresh key of the tenant. Prints the key, and then the line for the keys file, which has its
    digest. The key is kept nowhere. Returns the exit code: 0, or 2 if ``tenant`` is no name of a tenant."""
    if not NAME.fullmatch(tenant):
        return _no_name(tenant)
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    print(key)
    _print_line(key, tenant)
    print("The first line is the key, which is shown only now.", file=sys.stderr)
    return 0


def digest(tenant: str) -> int:
    """Read keys of the tenant from stdin, one on each line, and print for each the line for the keys file,
    which has its digest. Returns the exit code: 0, or 2 if ``tenant`` is no name of a tenant."""
    if not NAME.fullmatch(tenant):
        return _no_name(tenant)
    for line in sys.stdin:
        if key := line.strip():
            _print_line(key, tenant)
    return 0


def _no_name(tenant: str) -> int:
    return refused(f"{tenant!r} is no name of a tenant: letters, digits, . _ -")


def _print_line(key: str, tenant: str) -> None:
    hashed = written_digest(key)
    print(f"{hashed} {tenant}")
    print(f'In a TOML file: keys = ["{hashed}"] below [tenants.{tenant}]', file=sys.stderr)
