"""What crosses between the engine and the shelf: one MessagePack object per packet of a SEQPACKET socket.

Bytes of blocks never cross: both ends map the slots. A slot named in a request is the shelf's until its
``Done`` or ``Failed``.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PACKET_BYTES = 128 << 10
KEYS_PER_PACKET = 4096


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The first packet: which records, where, and how many bytes of them."""

    folder: str
    space: bytes
    block_bytes: int
    budget: int


class Store(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Keep what is in ``slot``; ``superseded``: forget these in the same transaction.

    ``touched``: records that are there already, and would have been stored now if they were not.
    """

    ticket: int
    slot: int
    key: bytes
    tokens: int
    digest: int
    superseded: list[bytes] = []
    touched: list[bytes] = []


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Copy a record into ``slot``."""

    ticket: int
    slot: int
    key: bytes


class Known(msgspec.Struct, frozen=True, array_like=True, tag="known"):
    """Keys on disk, one behind the other, after ``Begin``; ``last``: there are no more."""

    keys: bytes
    last: bool
    ignored: int = 0


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The request took effect; what was fetched has so many tokens and this xxh3."""

    ticket: int
    tokens: int = 0
    digest: int = 0


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """It did not. ``gone``: there is no such record any more."""

    ticket: int
    reason: str
    gone: bool = False


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Keys given up for room, one behind the other."""

    keys: bytes


Down: TypeAlias = Begin | Store | Fetch
Up: TypeAlias = Known | Done | Failed | Gone

encode = msgspec.msgpack.Encoder().encode
down_decoder = msgspec.msgpack.Decoder(Down)
up_decoder = msgspec.msgpack.Decoder(Up)
