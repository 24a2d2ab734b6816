"""Messages between the engine and the disk process: one MessagePack object per packet of a SEQPACKET socket.

Bytes of blocks never cross: both ends map the slots. A slot named in a request belongs to the disk process
until its ``Done``, ``Failed`` or ``Fetched``.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PACKET_BYTES = 128 << 10
KEYS_PER_PACKET = 4096


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The first packet to a disk process: what to serve. ``folder``, ``space``: the store's folder and
    namespace. ``block_bytes``: the length of a payload. ``budget``: the most bytes of all records; ``caps``:
    the most bytes of a tenant's, by its number. ``floor``: bytes of the disk that stay free."""

    folder: str
    space: bytes
    block_bytes: int
    budget: int
    caps: dict[int, int] = {}
    floor: int = 0


class Store(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Write the record in ``slot`` to disk; answered by ``Done`` or ``Failed``. ``superseded``: keys of
    records to forget in the same transaction.

    ``touched``: keys of records that count as used now. ``yielding``: records that are on a tier above, to be
    evicted first. ``leased``, ``released``: keys that leases cover from now on, and no longer.
    """

    ticket: int
    slot: int
    key: bytes
    tokens: int
    digest: int
    tenant: int = 0
    superseded: list[bytes] = []
    touched: list[bytes] = []
    yielding: list[bytes] = []
    leased: list[bytes] = []
    released: list[bytes] = []


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Copy the record of each of ``keys`` into the slot of ``slots`` at the same position; answered by one
    ``Fetched``.

    Without slots: bring the records into the page cache only, from where the engine reads and checks them.
    """

    ticket: int
    slots: list[int]
    keys: list[bytes]


class Known(msgspec.Struct, frozen=True, array_like=True, tag="known"):
    """Keys on disk, one behind the other, in answer to ``Begin``; ``last``: there are no more.

    ``ignored``: records of another model or layout.
    """

    keys: bytes
    last: bool
    ignored: int = 0


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The record is stored; ``offset``: of its payload in the file, 0 if unknown."""

    ticket: int
    offset: int = 0


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """The answer to a ``Fetch``, with one entry for each of its keys: ``tokens`` and the xxh3 ``digests`` of
    the records that are now in their slots, or in the page cache.

    0 tokens: the record did not come. ``gone``: positions of those that are no longer on disk. ``offsets``:
    of the payloads in the file, 0 if unknown.
    """

    ticket: int
    tokens: list[int]
    digests: list[int]
    gone: list[int]
    offsets: list[int]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The record of a ``Store`` was not written, because of ``reason``."""

    ticket: int
    reason: str


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Keys of records that were evicted from disk, one behind the other."""

    keys: bytes


class Room(msgspec.Struct, frozen=True, array_like=True, tag="room"):
    """The bytes that records may take now: the budget, or less if the disk is short of space."""

    bytes: int


Down: TypeAlias = Begin | Store | Fetch
Up: TypeAlias = Known | Done | Fetched | Failed | Gone | Room

encode = msgspec.msgpack.Encoder().encode
down_decoder = msgspec.msgpack.Decoder(Down)
up_decoder = msgspec.msgpack.Decoder(Up)
