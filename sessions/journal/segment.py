"""How a log and its index are laid out in bytes. Pure: knows no files and not what a record means.

A log is a header, twice, and then records, each at a multiple of 8 bytes. A group of records that belong
together lies in one log; the last of them says so. All numbers are little-endian.

    header    magic 8 | length 4 | 0 4 | checksum 8 | SegmentHeader (MessagePack)      4,096 bytes, two copies
    record    checksum 8 | sync 4 | length 4 | sequence 8 | session 8 | word 8 | time 8 | payload | padding
    word      index << 16 | kind << 8 | flags

The checksum is xxh3-64 over all behind it, seeded with the store's secret, the log's number and the record's
offset: a record counts at its own place only, and text that a client sends can never be taken for one. The
sync word is random, too; a reader that has met damage looks for the next one with a right checksum behind it.

The index beside a log tells the same without the payloads, a chunk for each commit. It can be thrown away;
it tells a reader which sessions a damaged log has lost records of, and lets it start without reading the log.

    header    as above, one copy
    chunk     checksum 8 | sync 4 | entries 4 | extra bytes 4 | flags 4 | end of the log 8 | entries | extras
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

FORMAT = 3
LOG_MAGIC, INDEX_MAGIC = b"hfastlog", b"hfastidx"
HEADER_BYTES = 4096
LOG_START = 2 * HEADER_BYTES
RECORD_BYTES = 48
CHUNK_BYTES = 32
GROUP_END, LOST = 1, 2
"""Flags of a record: it is the last of its group; its content was found damaged, and only this is known."""
SEALED, DIRTY = 1, 2
"""Flags of a chunk: the log is complete and whole; the log must be read, as damage was found in it."""
WRAP = (1 << 64) - 1
_HEADER = struct.Struct("<8sIIQ")
_RECORD = struct.Struct("<4sIQQQQ")
_CHUNK = struct.Struct("<4sIIIQ")
_CHECK = struct.Struct("<Q")
ENTRY = np.dtype(
    [
        ("sequence", "<u8"),
        ("session", "<u8"),
        ("word", "<u8"),
        ("time", "<u8"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("extra", "<u4"),
    ]
)
"""A record in the index: ``length`` of its payload, ``extra`` bytes about it in the chunk's extras."""


class Kind(IntEnum):
    """What a record is."""

    OPERATION = 1
    SNAPSHOT = 2
    SESSION = 3
    KEYRING = 4
    DROP = 5
    START = 6


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a log belongs to. ``replaces``: numbers of the logs whose records it took over."""

    format: int
    store: bytes
    seed: int
    sync: bytes
    model: bytes
    number: int
    replaces: tuple[int, ...] = ()
    generation: int = 0
    next_session: int = 1
    next_sequence: int = 1

    def file_seed(self) -> int:
        """Of this log's checksums."""
        return xxh3_64_intdigest(self.store + self.number.to_bytes(8, "little"), self.seed)


@dataclass(frozen=True, slots=True)
class Fresh:
    """A record to be written. ``extra`` is what the index says of it besides."""

    session: int
    index: int
    kind: Kind
    payload: bytes
    extra: bytes = b""
    flags: int = 0

    def word(self, last: bool = False) -> int:
        """Index, kind and flags in one."""
        return self.index << 16 | self.kind << 8 | self.flags | (GROUP_END if last else 0)


def padded(length: int) -> int:
    """Bytes that a record with so long a payload takes."""
    return RECORD_BYTES + (length + 7 & ~7)


def encoded_header(header: SegmentHeader, magic: bytes) -> bytes:
    """One copy. Raises ``ValueError`` where it does not fit."""
    payload = msgspec.msgpack.encode(header)
    fixed = _HEADER.pack(magic, len(payload), 0, xxh3_64_intdigest(payload, len(payload)))
    if len(fixed) + len(payload) > HEADER_BYTES:
        raise ValueError("too many logs in one header")
    return (fixed + payload).ljust(HEADER_BYTES, b"\0")


def decoded_header(data: bytes, magic: bytes) -> SegmentHeader | None:
    """The header in one copy; None where it is damaged, or none."""
    if len(data) < _HEADER.size:
        return None
    found, length, _, check = _HEADER.unpack_from(data)
    payload = data[_HEADER.size : _HEADER.size + length]
    if found != magic or length > HEADER_BYTES or xxh3_64_intdigest(payload, length) != check:
        return None
    try:
        return msgspec.msgpack.decode(payload, type=SegmentHeader)
    except (msgspec.MsgspecError, RecursionError):
        return None


def encoded_record(
    sync: bytes, seed: int, offset: int, sequence: int, session: int, word: int, time: int, payload: bytes
) -> bytes:
    """A record for ``offset`` of the log with that seed."""
    fixed = _RECORD.pack(sync, len(payload), sequence, session, word, time)
    check = xxh3_64_intdigest(fixed + payload, seed + offset & WRAP)
    return b"".join((_CHECK.pack(check), fixed, payload, bytes(-len(payload) & 7)))


@dataclass(frozen=True, slots=True)
class Found:
    """A record that is whole."""

    offset: int
    sequence: int
    session: int
    word: int
    time: int
    payload: bytes

    @property
    def kind(self) -> int:
        """One of `Kind`, or of a later version."""
        return self.word >> 8 & 0xFF

    @property
    def index(self) -> int:
        """Of an operation."""
        return self.word >> 16


def record_at(data: Any, offset: int, sync: bytes, seed: int, base: int = 0) -> Found | None:
    """The record at ``offset`` of ``data``, which lies at ``base`` of its log; None where none is whole."""
    if offset + RECORD_BYTES > len(data):
        return None
    (check,) = _CHECK.unpack_from(data, offset)
    found, length, sequence, session, word, time = _RECORD.unpack_from(data, offset + 8)
    end = offset + RECORD_BYTES + length
    if found != sync or end > len(data):
        return None
    if xxh3_64_intdigest(memoryview(data)[offset + 8 : end], seed + base + offset & WRAP) != check:
        return None
    payload = bytes(memoryview(data)[offset + RECORD_BYTES : end])
    return Found(base + offset, sequence, session, word, time, payload)


@dataclass(slots=True)
class Scan:
    """What a log holds: its whole records, the places between them that hold none, where the last one ends."""

    records: list[Found] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    end: int = LOG_START


def scan(data: bytes, sync: bytes, seed: int) -> Scan:
    """Read a whole log; what is damaged is passed over."""
    found, at, size = Scan(), LOG_START, len(data)
    while at + RECORD_BYTES <= size:
        record = record_at(data, at, sync, seed)
        if record is None:
            beyond = _next_record(data, at + 8, sync, seed)
            if beyond is None:
                break
            found.gaps.append((at, beyond))
            at = beyond
            continue
        found.records.append(record)
        at += padded(len(record.payload))
        found.end = at
    return found


def _next_record(data: bytes, at: int, sync: bytes, seed: int) -> int | None:
    while (place := data.find(sync, at + 8)) >= 0:
        if place % 8 == 0 and record_at(data, place - 8, sync, seed) is not None:
            return place - 8
        at = place + 1 - 8
    return None


def encoded_chunk(
    sync: bytes,
    seed: int,
    offset: int,
    entries: Iterable[tuple[int, int, int, int, int, int, int]],
    extras: bytes,
    end: int,
    flags: int = 0,
) -> bytes:
    """A chunk for ``offset`` of the index of the log with that seed; the log reaches to ``end``."""
    packed = np.array(list(entries), dtype=ENTRY)
    body = packed.tobytes() + extras
    fixed = _CHUNK.pack(sync, len(packed), len(extras), flags, end)
    check = xxh3_64_intdigest(fixed + body, ~seed + offset & WRAP)
    return b"".join((_CHECK.pack(check), fixed, body))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk that is whole."""

    entries: Any
    extras: bytes
    end: int
    flags: int


@dataclass(slots=True)
class Index:
    """What an index says of its log. ``whole``: nothing of it is damaged."""

    chunks: list[Chunk] = field(default_factory=list)
    whole: bool = True

    @property
    def sealed(self) -> int | None:
        """The log's length, where the index says all of it and no damage is known."""
        if not self.whole or not self.chunks or any(chunk.flags & DIRTY for chunk in self.chunks):
            return None
        last = self.chunks[-1]
        return last.end if last.flags & SEALED else None

    def entries(self) -> Any:
        """All of them, in one array."""
        return np.concatenate([np.empty(0, ENTRY), *(chunk.entries for chunk in self.chunks)])

    def extras(self) -> Iterator[tuple[int, bytes]]:
        """Offsets in the log, and what is said of the records there."""
        for chunk in self.chunks:
            at = 0
            for place in np.flatnonzero(chunk.entries["extra"]).tolist():
                length = int(chunk.entries["extra"][place])
                yield int(chunk.entries["offset"][place]), chunk.extras[at : at + length]
                at += length


def read_index(data: bytes, sync: bytes, seed: int) -> Index:
    """The chunks of an index that are whole."""
    found, at = Index(), HEADER_BYTES
    while at < len(data):
        chunk, length = _chunk_at(data, at, sync, seed)
        if chunk is not None:
            found.chunks.append(chunk)
            at += length
            continue
        found.whole = False
        place = data.find(sync, at + 9)
        if place < 0:
            break
        at = place - 8
    return found


def _chunk_at(data: bytes, at: int, sync: bytes, seed: int) -> tuple[Chunk | None, int]:
    if at + CHUNK_BYTES > len(data):
        return None, 0
    (check,) = _CHECK.unpack_from(data, at)
    word, count, extra, flags, end = _CHUNK.unpack_from(data, at + 8)
    length = CHUNK_BYTES + count * ENTRY.itemsize + extra
    if word != sync or at + length > len(data):
        return None, 0
    if xxh3_64_intdigest(memoryview(data)[at + 8 : at + length], ~seed + at & WRAP) != check:
        return None, 0
    entries = np.frombuffer(data, ENTRY, count, at + CHUNK_BYTES)
    extras = data[at + length - extra : at + length]
    if int(entries["extra"].sum()) != extra:
        return None, 0
    return Chunk(entries, extras, end, flags), length


@dataclass(slots=True)
class LoadedLog:
    """The records of one log: entries, their places, and what the index says of some, by offset."""

    entries: Any
    places: Any
    extras: dict[int, bytes]


# --- places ---

MISSING, HIT = 0, 1
"""Places of records that were never found, and of those that damage has hit."""
LENGTH_BITS, OFFSET_BITS = 21, 27
SLOT_SHIFT = LENGTH_BITS + OFFSET_BITS
GIANT = (1 << LENGTH_BITS) - 1
MOST_SLOTS = 1 << 64 - SLOT_SHIFT
_PLAIN, _EIGHT = np.uint64(GIANT), np.uint64(3)


def place_of(slot: int, offset: int, length: int) -> int:
    """Of a record."""
    return slot << SLOT_SHIFT | offset >> 3 << LENGTH_BITS | min(length >> 3, GIANT)


def places_of(slot: int, offsets: Any, lengths: Any) -> Any:
    """Of many in one log; in arrays of ``<u8``."""
    places = (offsets >> _EIGHT) << np.uint64(LENGTH_BITS) | np.minimum(lengths >> _EIGHT, _PLAIN)
    return places | np.uint64(slot << SLOT_SHIFT)


def bytes_at(place: int) -> int:
    """How many bytes the record there takes; of giants, as many as can be told."""
    return (place & GIANT) << 3


def all_bytes_at(places: Any) -> Any:
    """The same of many, in an array."""
    return (places & _PLAIN) << _EIGHT


def slot_of(place: int) -> int:
    """The slot of the log that it lies in."""
    return place >> SLOT_SHIFT


def offset_of(place: int) -> int:
    """Where in the log it lies."""
    return (place >> LENGTH_BITS & (1 << OFFSET_BITS) - 1) << 3
