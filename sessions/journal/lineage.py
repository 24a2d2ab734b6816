"""The store's tables and keys, and which sessions follow on others' operations.

A fork's own operations follow on the first ones of the session it came from, which stay as long as anybody
needs them. Works inside a transaction of the store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeAlias

import lmdb

from ..errors import RecordDamaged
from .records import FORMAT, READERS, AnyOperation, Origin, SessionRecord, Snapshot, unseal
from .shares import Born


class Table(StrEnum):
    """The store's named databases."""

    META = "meta"
    SESSIONS = "sessions"
    TAILS = "tails"
    LOG = "log"
    KEYRINGS = "keyrings"
    HANDLES = "handles"
    FORKS = "forks"


def key_of(number: int, index: int | None = None) -> bytes:
    """Big-endian, so that the order of keys is the order of operations."""
    return struct.pack(">Q", number) if index is None else struct.pack(">QQ", number, index)


Tables: TypeAlias = Mapping[Table, Any]


def enter(transaction: lmdb.Transaction, tables: Tables, number: int, origin: Origin | None) -> None:
    """A session is born, with or without an origin."""
    if origin is not None:
        transaction.put(key_of(origin.session, number), b"", db=tables[Table.FORKS])


def forked(transaction: lmdb.Transaction, tables: Tables, number: int) -> bool:
    """Whether operations of other sessions follow on this one's."""
    forks = transaction.cursor(tables[Table.FORKS])
    return bool(forks.set_range(key_of(number)) and bytes(forks.key())[:8] == key_of(number))


def children(transaction: lmdb.Transaction, tables: Tables, number: int) -> list[int]:
    """Sessions that were forked from this one."""
    cursor = transaction.cursor(tables[Table.FORKS])
    found: list[int] = []
    there = cursor.set_range(key_of(number))
    while there and bytes(cursor.key())[:8] == key_of(number):
        found.append(struct.unpack(">QQ", cursor.key())[1])
        there = cursor.next()
    return found


def family(transaction: lmdb.Transaction, tables: Tables, number: int) -> list[tuple[int, SessionRecord]]:
    """All that were forked from one another with this session among them, by number; forgotten ones not.

    Raises ``RecordDamaged``.
    """
    while (origin := _record(transaction, tables, number).origin) is not None:
        number = origin.session
    found: list[tuple[int, SessionRecord]] = []
    waiting = [number]
    while waiting:
        number = waiting.pop()
        if transaction.get(key_of(number), db=tables[Table.TAILS]) is not None:
            found.append((number, _record(transaction, tables, number)))
        waiting += children(transaction, tables, number)
    return sorted(found, key=lambda pair: pair[0])


def born(transaction: lmdb.Transaction, tables: Tables) -> Iterator[Born]:
    """All sessions of which there is a record; damaged ones, which are counted when they are read, not."""
    for key, value in transaction.cursor(tables[Table.SESSIONS]):
        with suppress(RecordDamaged):
            record: SessionRecord = unseal(bytes(key), bytes(value), SessionRecord)
            yield Born(struct.unpack(">Q", bytes(key))[0], record.salt, len(value))


def size(transaction: lmdb.Transaction, tables: Tables, number: int) -> int:
    """Bytes of a session's own operations."""
    cursor = transaction.cursor(tables[Table.LOG])
    found = cursor.set_range(key_of(number))
    total = 0
    while found and bytes(cursor.key())[:8] == key_of(number):
        total += len(cursor.value())
        found = cursor.next()
    return total


def inherited(
    transaction: lmdb.Transaction, tables: Tables, origin: Origin | None, own: tuple[AnyOperation, ...]
) -> tuple[AnyOperation, ...]:
    """What a session's ``own`` operations follow on, from its first ancestor on; a snapshot has it in it.

    Raises ``RecordDamaged``.
    """
    pieces = [own]
    while origin is not None and not (pieces[-1] and isinstance(pieces[-1][0], Snapshot)):
        pieces.append(_until(transaction, tables, origin))
        origin = _record(transaction, tables, origin.session).origin
    return tuple(operation for piece in reversed(pieces[1:]) for operation in piece)


def erase(transaction: lmdb.Transaction, tables: Tables, number: int) -> list[int]:
    """The operations of a session that was forgotten, and of those it came from, if nobody needs them.

    Returns the sessions of which nothing is left.
    """
    erased: list[int] = []
    # No recursion: a line of forks may be longer than a stack is deep.
    while not forked(transaction, tables, number):
        try:
            origin = _record(transaction, tables, number).origin
        except RecordDamaged:  # counted when it was read
            origin = None
        key = key_of(number)
        transaction.delete(key, db=tables[Table.SESSIONS])
        cursor = transaction.cursor(tables[Table.LOG])
        found = cursor.set_range(key)
        while found and bytes(cursor.key())[:8] == key:
            found = cursor.delete()
        erased.append(number)
        if origin is None:
            break
        transaction.delete(key_of(origin.session, number), db=tables[Table.FORKS])
        if transaction.get(key_of(origin.session), db=tables[Table.TAILS]) is not None:
            break
        number = origin.session
    return erased


def _record(transaction: lmdb.Transaction, tables: Tables, number: int) -> SessionRecord:
    value = transaction.get(key_of(number), db=tables[Table.SESSIONS])
    if value is None:
        raise RecordDamaged(f"the record of session {number} is missing")
    record: SessionRecord = unseal(key_of(number), bytes(value), SessionRecord)
    return record


def _until(transaction: lmdb.Transaction, tables: Tables, origin: Origin) -> tuple[AnyOperation, ...]:
    """A session's operations as they were when another was forked off; those before a snapshot are in it."""
    read, end = READERS[FORMAT], key_of(origin.session, origin.operations)
    found: list[AnyOperation] = []
    index = -1
    cursor = transaction.cursor(tables[Table.LOG])
    there = cursor.set_range(key_of(origin.session))
    while there and bytes(cursor.key()) < end:
        index = struct.unpack(">QQ", cursor.key())[1]
        found.append(read(bytes(cursor.key()), bytes(cursor.value())))
        there = cursor.next()
    whole = len(found) == origin.operations or (found and isinstance(found[0], Snapshot))
    if not whole or index != origin.operations - 1:
        raise RecordDamaged(f"session {origin.session} has not its first {origin.operations} operations")
    return tuple(found)
