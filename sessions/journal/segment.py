"""The bytes of a log and of its index, and the location of a record in 64 bits. Pure: knows no files.

A log is a header, twice, and then records, each at a multiple of 8 bytes. Records that are committed together
are a group: it lies in one log, and its last record has a flag. All numbers are little-endian.

    header    magic 8 | length 4 | 0 4 | checksum 8 | SegmentHeader (MessagePack)      4,096 bytes, two copies
    record    checksum 8 | sync 4 | length 4 | sequence 8 | session 8 | word 8 | time 8 | session, high 8 |
              payload | padding
    word      index << 16 | kind << 8 | flags

The checksum is xxh3-64 over everything behind it. It is seeded with the store's secret, the log's random key
and the record's offset, so a record is valid at its own location only, and no text of a client passes for one.
The sync word is random; behind damage a reader looks for the next sync word of a record with a right checksum.

A *run* is one opening of the store to write. It has 64 random bits, writes to logs of its own alone, and gives
sessions numbers of 128 bits: a count in the high half, the run in the low half. So two servers that ever write
to one store, or to copies of it, have no log and no session's number in common, and no mixture of their bytes
replays as a session of either.

The index beside a log has an entry for each record, without the payload, in a chunk for each commit. With
it the store opens without reading the log, and it tells which sessions a damaged log has lost records of. A
lost index is made again from the log.

    header    as above, one copy
    chunk     checksum 8 | sync 4 | entries 4 | extra bytes 4 | flags 4 | end of the log 8 | entries | extras

Format 3, which is read, had no runs and no keys: session numbers of 64 bits, records and entries without the
high half, checksums seeded with the log's number, and the time of day as time. A merge writes what it
copies in format 4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

FORMAT = 4
LOG_MAGIC, INDEX_MAGIC = b"hfastlog", b"hfastidx"
HEADER_BYTES = 4096
LOG_START = 2 * HEADER_BYTES
CHUNK_BYTES = 32
GROUP_END, LOST, ERASED = 1, 2, 4
"""Flags of a record. GROUP_END: it is the last of its group. LOST: its content was found damaged, and its
payload is only what the index had of it. ERASED, of a DROP or of an operation that removes items: a
client asked for it, so the bytes of what it removes have to leave the logs soon."""
SEALED, DIRTY = 1, 2
"""Flags of a chunk of the index. SEALED: the log is complete. DIRTY: damage was found in the log, so it must be
read whole at the next start."""
WRAP = (1 << 64) - 1
HIGH = 64
"""The bits of the low half of a session's number, which is the run that gave it."""
_HEADER = struct.Struct("<8sIIQ")
_CHUNK = struct.Struct("<4sIIIQ")
_CHECK = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQQQQII")
ENTRY = np.dtype(
    [
        ("sequence", "<u8"),
        ("session", "<u8"),
        ("word", "<u8"),
        ("time", "<u8"),
        ("offset", "<u8"),
        ("high", "<u8"),
        ("length", "<u4"),
        ("extra", "<u4"),
    ]
)
"""A record's entry in the index of its log. ``session``, ``high``: the halves of its session's number.
``word``: index, kind and flags. ``time``: microseconds of the store's clock (`ServedClock`). ``offset``: in the
log. ``length``: the bytes of its payload. ``extra``: how many bytes the index stores of it behind the chunk's
entries (`records.extra_of`)."""
_ENTRY_3 = np.dtype([(name, ENTRY[name]) for name in ENTRY.names or () if name != "high"])


class Frame(NamedTuple):
    """How the records of one log are framed. ``format``: of the log. ``sync``: the store's random word.
    ``seed``: of the checksums."""

    format: int
    sync: bytes
    seed: int

    @property
    def head(self) -> struct.Struct:
        """What stands between a record's checksum and its payload."""
        return _HEAD_3 if self.format == 3 else _HEAD

    @property
    def record_bytes(self) -> int:
        """The bytes of a record before its payload."""
        return _CHECK.size + self.head.size

    def padded(self, lengths: Any) -> Any:
        """How many bytes of the log a record with a payload of so many bytes takes, padded to a multiple of 8:
        of an int, or of each element of an array of ``<u8``."""
        return self.record_bytes + (lengths + 7 >> 3 << 3)


_HEAD_3, _HEAD = struct.Struct("<4sIQQQQ"), struct.Struct("<4sIQQQQQ")
RECORD_BYTES = _CHECK.size + _HEAD.size


class Kind(IntEnum):
    """What a record holds; the number is written in the record. START: a server began to use the store. DROP:
    the session was forgotten."""

    OPERATION = 1
    SNAPSHOT = 2
    SESSION = 3
    KEYRING = 4
    DROP = 5
    START = 6


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """A log's header. ``store`` (its id), ``seed`` and ``sync`` are random and the same in all logs of a store.
    ``model``: the digest of the model that the token ids belong to.

    ``number``: the one in the file's name. ``key``: random, of this log alone; 0 in format 3. ``replaces``:
    numbers of the logs that a merge wrote into this. ``ends``: by number, where the unfinished logs of
    earlier runs ended when this run began; what was written behind that was never acknowledged. ``generation``,
    ``next_session``, ``next_sequence``: when the log was made, the number of server starts, the high half of
    the next session's number, and the number of the next record.
    """

    format: int
    store: bytes
    seed: int
    sync: bytes
    model: bytes
    number: int
    key: int = 0
    replaces: tuple[int, ...] = ()
    ends: dict[int, int] = {}
    generation: int = 0
    next_session: int = 1
    next_sequence: int = 1

    @cached_property
    def frame(self) -> Frame:
        """How the records of this log are framed."""
        own = (self.key or self.number).to_bytes(8, "little")
        seed = xxh3_64_intdigest(self.store + own, self.seed)
        return Frame(self.format, self.sync, seed)


class Fresh(msgspec.Struct, frozen=True, gc=False):
    """A record to be written. ``session``: its session's number. ``index``: of an operation, its index among
    those of its session; of a START record, the number of the server start; else 0. ``extra``: the bytes that
    the log's index stores too."""

    session: int
    index: int
    kind: Kind
    payload: bytes
    extra: bytes = b""
    flags: int = 0

    @property
    def size(self) -> int:
        """How many bytes of a log that is written now it takes."""
        return RECORD_BYTES + (len(self.payload) + 7 & ~7)

    def word(self, last: bool = False) -> int:
        """The record's index, kind and flags, packed into one integer. ``last``: it is the last record of its
        group, which is one more flag."""
        return self.index << 16 | self.kind << 8 | self.flags | (GROUP_END if last else 0)


def encoded_header(header: SegmentHeader, magic: bytes) -> bytes:
    """The bytes of one copy of a log's or an index's header, padded to `HEADER_BYTES`. ``magic``: `LOG_MAGIC`
    or `INDEX_MAGIC`, the first 8 bytes. Raises ``ValueError`` if it does not fit."""
    payload = msgspec.msgpack.encode(header)
    fixed = _HEADER.pack(magic, len(payload), 0, xxh3_64_intdigest(payload, len(payload)))
    if len(fixed) + len(payload) > HEADER_BYTES:
        raise ValueError("too many logs in one header")
    return (fixed + payload).ljust(HEADER_BYTES, b"\0")


def decoded_header(data: bytes, magic: bytes) -> SegmentHeader | None:
    """The header at the beginning of ``data``; None if it is damaged or absent. ``magic``: the first 8 bytes
    of a log or of an index."""
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
    frame: Frame, offset: int, sequence: int, session: int, word: int, time: int, payload: bytes
) -> bytes:
    """The bytes of a record, with its checksum and padding. They are valid only at ``offset`` of the log with
    this ``frame``. ``word``: its index, kind and flags (`Fresh.word`). ``time``: microseconds of the store's
    clock."""
    fixed = _HEAD.pack(frame.sync, len(payload), sequence, session & WRAP, word, time, session >> HIGH)
    check = xxh3_64_intdigest(fixed + payload, frame.seed + offset & WRAP)
    return b"".join((_CHECK.pack(check), fixed, payload, bytes(-len(payload) & 7)))


@dataclass(frozen=True, slots=True)
class Found:
    """A record as read from a log; its checksum was right. ``offset``: in the log. ``session``: its session's
    number. ``word`` holds index, kind and flags. ``time``: microseconds of the store's clock; 0 in format 3."""

    offset: int
    sequence: int
    session: int
    word: int
    time: int
    payload: bytes

    @property
    def kind(self) -> int:
        """A `Kind`, or a number that a later version uses."""
        return self.word >> 8 & 0xFF

    @property
    def index(self) -> int:
        """The index in ``word``: of an operation, its index among those of its session; of a START record,
        the number of the server start; 0 for other kinds."""
        return self.word >> 16


def record_at(data: Any, offset: int, frame: Frame, base: int = 0) -> Found | None:
    """The record at ``offset`` of ``data``, which are bytes of a log from its offset ``base`` on; None if it is
    damaged. ``frame``: the log's."""
    begin = offset + frame.record_bytes
    if begin > len(data):
        return None
    (check,) = _CHECK.unpack_from(data, offset)
    sync, length, sequence, low, word, time, *high = frame.head.unpack_from(data, offset + _CHECK.size)
    if sync != frame.sync or begin + length > len(data):
        return None
    view = memoryview(data)
    if (
        xxh3_64_intdigest(view[offset + _CHECK.size : begin + length], frame.seed + base + offset & WRAP)
        != check
    ):
        return None
    session, time = (high[0] << HIGH | low, time) if high else (low, 0)
    return Found(base + offset, sequence, session, word, time, bytes(view[begin : begin + length]))


@dataclass(slots=True)
class Scan:
    """What a log holds: its whole ``records``; the damaged ``gaps`` between them, each as the offsets at which
    it begins and ends; and the offset at which the last whole record ends."""

    records: list[Found] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    end: int = LOG_START


def scan(data: bytes, frame: Frame) -> Scan:
    """Read all records in ``data``, the bytes of a log with this ``frame``. Damaged parts are skipped, and
    listed in the result's ``gaps``."""
    found, at, size = Scan(), LOG_START, len(data)
    while at + frame.record_bytes <= size:
        record = record_at(data, at, frame)
        if record is None:
            beyond = _next_record(data, at + 8, frame)
            if beyond is None:
                break
            found.gaps.append((at, beyond))
            at = beyond
            continue
        found.records.append(record)
        at += frame.padded(len(record.payload))
        found.end = at
    return found


def _next_record(data: bytes, at: int, frame: Frame) -> int | None:
    while (found := data.find(frame.sync, at + 8)) >= 0:
        if found % 8 == 0 and record_at(data, found - 8, frame) is not None:
            return found - 8
        at = found + 1 - 8
    return None


Row: TypeAlias = tuple[int, int, int, int, int, int, int, int]
"""An entry of an index, as in `ENTRY`."""


def entry(sequence: int, session: int, word: int, time: int, offset: int, length: int, extra: int) -> Row:
    """The entry of a record; ``session``: its session's number."""
    return sequence, session & WRAP, word, time, offset, session >> HIGH, length, extra


def sessions_of(entries: Any) -> list[int]:
    """The number of each record's session. ``entries``: an array of `ENTRY`."""
    pairs = zip(entries["high"].tolist(), entries["session"].tolist(), strict=True)
    return [high << HIGH | low for high, low in pairs]


def marks_of(entries: Any) -> Any:
    """A mark of 64 bits for the session of each record, as a sorted array without repetitions. ``entries``: an
    array of `ENTRY`. Two sessions have the same mark very rarely (`mark_of`)."""
    return np.unique(entries["session"] ^ entries["high"] * np.uint64(_SPREAD))


def mark_of(session: int) -> int:
    """The mark of 64 bits of the session with this number."""
    return session & WRAP ^ (session >> HIGH) * _SPREAD & WRAP


_SPREAD = 0x9E3779B97F4A7C15


def encoded_chunk(
    frame: Frame, offset: int, entries: Iterable[Row], extras: bytes, end: int, flags: int = 0
) -> bytes:
    """The bytes of a chunk of an index, with its checksum. They are valid only at ``offset`` of the index of
    the log with this ``frame``.

    ``entries``: one for each record. ``extras``: the bytes that the index stores of these records, joined.
    ``end``: the log's length with them. ``flags``: `SEALED`, `DIRTY`.
    """
    packed = [_ENTRY.pack(*one) for one in entries]
    body = b"".join((*packed, extras))
    fixed = _CHUNK.pack(frame.sync, len(packed), len(extras), flags, end)
    check = xxh3_64_intdigest(fixed + body, ~frame.seed + offset & WRAP)
    return b"".join((_CHECK.pack(check), fixed, body))


@dataclass(slots=True)
class Index:
    """The index of a log, as read: an array of `ENTRY`, one for each record; and in ``extras`` the bytes that
    it stores of some records, by the record's offset.

    ``whole``: no part of it is damaged. ``end``: where the log ended when the last whole chunk was written.
    ``sealed``: the log's length, if the index is complete and no damage is known; else None.
    """

    entries: Any
    extras: dict[int, bytes]
    whole: bool
    end: int
    sealed: int | None


def read_index(data: bytes, frame: Frame) -> Index:
    """Read ``data``, the bytes of an index file. Damaged chunks are skipped, and their entries are missing.
    ``frame``: the log's."""
    parts, extras, at = [np.empty(0, ENTRY)], dict[int, bytes](), HEADER_BYTES
    whole, dirty, log_end, sealed = True, False, LOG_START, None
    while at < len(data):
        chunk = _chunk_at(data, at, frame)
        if chunk is None:
            whole = False
            at = data.find(frame.sync, at + 9) - 8
            if at < 0:
                break
            continue
        entries, extra, end, flags, length = chunk
        parts.append(entries)
        begin = 0
        for row in np.flatnonzero(entries["extra"]).tolist():
            size = int(entries["extra"][row])
            extras[int(entries["offset"][row])] = extra[begin : begin + size]
            begin += size
        dirty |= bool(flags & DIRTY)
        log_end, sealed = end, end if flags & SEALED else None
        at += length
    return Index(np.concatenate(parts), extras, whole, log_end, sealed if whole and not dirty else None)


def _chunk_at(data: bytes, at: int, frame: Frame) -> tuple[Any, bytes, int, int, int] | None:
    """The chunk at the offset ``at`` of an index: its entries (an array of `ENTRY`), the bytes that it stores
    of their records, the log's length when it was written, its flags and its own length. None if it is
    damaged."""
    if at + CHUNK_BYTES > len(data):
        return None
    (check,) = _CHECK.unpack_from(data, at)
    word, count, extra, flags, end = _CHUNK.unpack_from(data, at + 8)
    form = _ENTRY_3 if frame.format == 3 else ENTRY
    length = CHUNK_BYTES + count * form.itemsize + extra
    if word != frame.sync or at + length > len(data):
        return None
    if xxh3_64_intdigest(memoryview(data)[at + 8 : at + length], ~frame.seed + at & WRAP) != check:
        return None
    entries = np.frombuffer(data, form, count, at + CHUNK_BYTES)
    if int(entries["extra"].sum()) != extra:
        return None
    if form is not ENTRY:
        older, entries = entries, np.zeros(count, ENTRY)  # its times are not those of the store's clock
        for name in set(_ENTRY_3.names or ()) - {"time"}:
            entries[name] = older[name]
    return entries, data[at + length - extra : at + length], end, flags, length


def kinds_of(entries: Any) -> Any:
    """The kind of each record, as an array. ``entries``: an array of `ENTRY`."""
    return entries["word"] >> 8 & 0xFF


@dataclass(slots=True)
class LoadedLog:
    """What opening a log found of its records: ``entries``, an array of `ENTRY`; ``locations``, an array of
    ``<u8`` with the location of each (`location_of`, or `HIT` if it is damaged); and ``extras``, the bytes that
    the index stores of some, by the record's offset."""

    entries: Any
    locations: Any
    extras: dict[int, bytes]


MISSING, HIT = 0, 1
"""Two special locations: of a record that is missing, and of one that is damaged.

Every other location packs three numbers into 64 bits: the log's slot, and the record's offset and length in
units of 8 bytes. A slot is a small number that this process gives to a log. A giant is a record with a length
that does not fit into its bits: its location has the largest length, and the real one is in the record itself.
"""
LENGTH_BITS, OFFSET_BITS = 21, 27
SLOT_SHIFT = LENGTH_BITS + OFFSET_BITS
GIANT = (1 << LENGTH_BITS) - 1
MOST_SLOTS = 1 << 64 - SLOT_SHIFT


def location_of(slot: int, offset: int, length: int) -> int:
    """Pack the location of a record into one integer: the log's slot, the record's offset in the log and its
    length, both in bytes. A length that does not fit is replaced by `GIANT`."""
    return slot << SLOT_SHIFT | offset >> 3 << LENGTH_BITS | min(length >> 3, GIANT)


def locations_of(slot: int, offsets: Any, lengths: Any) -> Any:
    """Pack the locations of many records of one log: an array of ``<u8``, each made of the log's slot and the
    record's offset and length, given as arrays in bytes. A length that does not fit is replaced by `GIANT`."""
    return slot << SLOT_SHIFT | offsets >> 3 << LENGTH_BITS | np.minimum(lengths >> 3, GIANT)


def bytes_at(locations: Any) -> Any:
    """How many bytes the record at a location takes, of an int or of each element of an array of ``<u8``. If it
    is more than a location can hold, the result is only the most that a location can hold."""
    return (locations & GIANT) << 3


def slot_of(location: int) -> int:
    """The slot of the log that the record at ``location`` is in."""
    return location >> SLOT_SHIFT


def offset_of(location: int) -> int:
    """The offset in bytes, in its log, of the record at ``location``."""
    return (location >> LENGTH_BITS & (1 << OFFSET_BITS) - 1) << 3
