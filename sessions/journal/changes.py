"""What a session asks the store to write: plain data, a group of which is one commit."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from .records import AnyOperation


class Table(StrEnum):
    """What a `Put` may write: a session's record, its keyring, or a handle, which the keyring names
    already."""

    SESSIONS = "sessions"
    KEYRINGS = "keyrings"
    HANDLES = "handles"


def key_of(number: int) -> bytes:
    """A session's, in a table."""
    return struct.pack(">Q", number)


@dataclass(frozen=True, slots=True)
class Put:
    """Write one record. A handle's is in its session's keyring: to put or take out one writes nothing."""

    table: Table
    key: bytes
    record: object | None


@dataclass(frozen=True, slots=True)
class Append:
    """Write a session's next operation."""

    number: int
    index: int
    operation: AnyOperation


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a session: its operations, its handles, everything.

    Operations that forks of it follow on stay until the last of these is forgotten.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Condensed:
    """A session's operations up to ``index`` are in ``snapshot``, which stands there."""

    number: int
    index: int
    snapshot: AnyOperation


Change: TypeAlias = Put | Append | Drop | Condensed
