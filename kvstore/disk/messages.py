"""Messages between the engine and the disk process: one MessagePack object per packet of a SEQPACKET socket.

The bytes of blocks never cross the socket: both ends map the host tier's slots. A slot named in a request
belongs to the disk process until its ``Done`` or ``Fetched``.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

from ..tier import Record

PACKET_BYTES = 128 << 10
KEYS_PER_PACKET, RECORDS_PER_PACKET = 4096, 2048


class RecordAt(NamedTuple):
    """Where a record lies: the ``slot`` of its payload in the file, the xxh3 ``digest`` of the payload, and its
    number of ``tokens``."""

    slot: int
    digest: int
    tokens: int


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """The first packet to a disk process: what to serve. ``folder``, ``space``: the store's folder and
    record space. ``block_bytes``: the length of a record's payload. ``budget``: the most bytes of all records;
    ``caps``: the most bytes of one tenant's records, by its number. ``floor``: bytes of the disk that stay
    free, however full it is; None: the disk is not looked at. ``reserve``: a file of which the bytes count as
    free, "" for none."""

    folder: str
    space: bytes
    block_bytes: int
    budget: int
    caps: dict[int, int] = {}
    floor: int | None = None
    reserve: str = ""


class Store(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Ask to write the record in ``slot`` to disk; answered by ``Done``. ``ticket``: the number
    of the request, which its answer repeats.

    ``touched``: keys of records that count as used now. ``yielding``: records that are on a tier above, to be
    evicted first. ``leased``, ``released``: keys that leases cover from now on, and no longer.
    """

    ticket: int
    slot: int
    record: Record
    touched: list[bytes] = []
    yielding: list[bytes] = []
    leased: list[bytes] = []
    released: list[bytes] = []


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Ask to remove records, by their keys; not answered. Their bytes leave the file within minutes."""

    keys: list[bytes]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Ask to copy the record of each of ``keys`` into the slot of ``slots`` at the same position; answered by
    one ``Fetched`` with the same ``ticket``.

    Without slots: bring the records into the page cache only, from where the engine reads and checks them.
    """

    ticket: int
    slots: list[int]
    keys: list[bytes]


class Known(msgspec.Struct, frozen=True, array_like=True, tag="known"):
    """Records on disk, by their keys, in answer to ``Begin``; ``last``: there are no more."""

    records: dict[bytes, RecordAt]
    last: bool


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The answer to a ``Store`` with the same ``ticket``: the record is stored. ``at``: its slot in the file;
    None: it was left out, and a ``Gone`` says so, or could not be written."""

    ticket: int
    at: int | None = None


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """The answer to the ``Fetch`` with the same ``ticket``. ``failed``: positions of the keys whose records did
    not come into their slots or the page cache. ``gone``: those of them that are no longer on disk."""

    ticket: int
    failed: list[int]
    gone: list[int]


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The engine is told of records that are no longer on disk: their keys."""

    keys: list[bytes]


class Room(msgspec.Struct, frozen=True, array_like=True, tag="room"):
    """The engine is told how many bytes records may take now: the budget, or less if the disk is short of
    space."""

    bytes: int


Down: TypeAlias = Begin | Store | Drop | Fetch
Up: TypeAlias = Known | Done | Fetched | Gone | Room


encode = msgspec.msgpack.Encoder().encode
down_decoder = msgspec.msgpack.Decoder(Down)
up_decoder = msgspec.msgpack.Decoder(Up)
