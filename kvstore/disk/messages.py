"""What crosses between the engine and the shelf: one MessagePack object per packet of a SEQPACKET socket.

Bytes of blocks never cross: both ends map the slots. A slot named in a request is the shelf's until its
``Done``, ``Failed`` or ``Fetched``.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PACKET_BYTES = 128 << 10
KEYS_PER_PACKET = 4096


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The first packet: which records, where, and how many bytes of them; ``caps``: of which tenants fewer.

    ``floor``: bytes of the disk that stay free, whoever fills it.
    """

    folder: str
    space: bytes
    block_bytes: int
    budget: int
    caps: dict[int, int] = {}
    floor: int = 0


class Store(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Keep what is in ``slot``; ``superseded``: forget these in the same transaction.

    ``touched``: records that are there already, and would have been stored now if they were not; ``yielding``:
    records that are above, and the first to go here; ``leased``, ``released``: keys that go last from now on,
    and those that do no longer.
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
    """A piece of what is wanted: copy the record of each of ``keys`` into the slot beside it.

    Without any slots: only have them in memory, where the engine reads and checks them.
    """

    ticket: int
    slots: list[int]
    keys: list[bytes]


class Known(msgspec.Struct, frozen=True, array_like=True, tag="known"):
    """Keys on disk, one behind the other, after ``Begin``; ``last``: there are no more."""

    keys: bytes
    last: bool
    ignored: int = 0


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """It is stored; ``offset``: where its payload lies in the file, 0 where nobody knows."""

    ticket: int
    offset: int = 0


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """The piece is in its slots, or in memory: tokens and xxh3 of each record; 0 tokens where it is not.

    ``gone``: which of its records are there no more. ``offsets``: where each lies in the file, 0 where nobody
    knows.
    """

    ticket: int
    tokens: list[int]
    digests: list[int]
    gone: list[int]
    offsets: list[int]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """It is not."""

    ticket: int
    reason: str


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Keys given up for room, one behind the other."""

    keys: bytes


class Room(msgspec.Struct, frozen=True, array_like=True, tag="room"):
    """Bytes that records may take now: the budget, or less where the disk is short of space."""

    bytes: int


Down: TypeAlias = Begin | Store | Fetch
Up: TypeAlias = Known | Done | Fetched | Failed | Gone | Room

encode = msgspec.msgpack.Encoder().encode
down_decoder = msgspec.msgpack.Decoder(Down)
up_decoder = msgspec.msgpack.Decoder(Up)
