"""What a session asks the store to write, plain data of which a group is one commit; and what came of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .lineage import Table
from .records import AnyOperation, Tail
from .shares import Born


@dataclass(frozen=True, slots=True)
class Put:
    """Write one record; None takes it out."""

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


@dataclass(frozen=True, slots=True)
class Applied:
    """What a transaction has done: tails of the sessions it was about, and what each one it forgot erased."""

    tails: dict[int, Tail]
    born: list[Born]
    forgotten: dict[int, list[int]]
