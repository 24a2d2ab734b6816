"""Where the records of each session lie, in few bytes for each session, and which session has a digest.

A journal keeps sessions by the hundred thousand, few of which are open. So the state of a session is an object
while it was used lately, and else one byte string. A digest (of a handle, of a conversation's end, of a name)
leads to its session by 8 bytes in a sorted array and the first `KEY_BYTES` of the digest in the session's
state. Knows no files.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from .segment import MISSING, Kind

KEY_BYTES = 16
"""So many bytes of each digest are kept in memory, its key (`key_of`): no two digests of BLAKE2b ever share
them."""
LATELY = 256  # sessions with a state that is an object
NUMBER_BYTES = 16  # of a session's number
PACKED = 32  # locations from which on they are compressed
SHARDS = 1 << 10  # sorted arrays of digests: what is moved when one is added does not grow with their number


@dataclass(slots=True, eq=False)
class SessionState:
    """The locations of one session's records, integers (`segment.location_of`). ``record``, ``ring``: of its
    record and its keyring. ``operations``: of its operations from index ``first`` on.

    ``snapshot``: the first of these is a snapshot of all before it, of ``base`` bytes; the others have
    ``grown`` bytes. ``kept``: false once the session was forgotten, while its forks need its operations.
    ``used``: when it was last written (microseconds of the store's clock), by the record with the sequence
    number ``last``. ``origin``: for a fork, the number of the other session with which it begins, and how many
    of that one's operations. ``deleted``: a client has deleted it. ``forks``: the numbers of the sessions that
    were forked from it directly, forgotten ones too, and need its operations, as no snapshot of theirs replaces
    these. ``keys``: the first `KEY_BYTES` of each digest of its keyring, joined. ``counted``: its bytes in the
    sum of its tenant. ``row``: stands for it in the `DigestTable`.
    """

    number: int
    kept: bool = True
    deleted: bool = False
    keys: bytes = b""
    record: int = MISSING
    ring: int = MISSING
    first: int = 0
    snapshot: bool = False
    base: int = 0
    grown: int = 0
    used: int = 0
    last: int = 0
    salt: bytes = b""
    counted: int = 0
    row: int = 0
    origin: tuple[int, int] | None = None
    forks: set[int] = field(default_factory=set)
    operations: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def count(self) -> int:
        """How many operations the session has had, with those that a snapshot has replaced: the index of the
        next one."""
        return self.first + len(self.operations)

    @property
    def is_unopened_fork(self) -> bool:
        """Whether the session is a fork that no client has opened: it has only the handle that was issued
        with it."""
        return self.origin is not None and len(self.keys) == KEY_BYTES

    def kind_at(self, index: int) -> Kind:
        """The kind of the operation at ``index``: ``Kind.SNAPSHOT`` or ``Kind.OPERATION``."""
        return Kind.SNAPSHOT if self.snapshot and index == self.first else Kind.OPERATION

    def locations(self) -> Iterator[int]:
        """The locations of the session's own records: its record, its keyring and its operations. `MISSING`
        stands for one that does not exist, `HIT` for a damaged one."""
        yield self.record
        yield self.ring
        yield from self.operations


_VALUES = attrgetter(*SessionState.__slots__[1:])
"""All of a state but its number, in the order of its fields."""


class SessionStates(Mapping[int, SessionState]):
    """The states of all sessions, by number. A state that was got by `edit` may be changed until the next
    `rest`; all others are to be read only. One thread uses it, but for `keeps` and `keys_of`, which any may
    call."""

    def __init__(self) -> None:
        self._resting: dict[int, bytes] = {}  # b"" for one that was changed
        self._lately: OrderedDict[int, SessionState] = OrderedDict()
        self._changed: set[int] = set()

    def __len__(self) -> int:
        return len(self._resting)

    def __iter__(self) -> Iterator[int]:
        return iter(self._resting)

    def __contains__(self, number: object) -> bool:
        return number in self._resting

    def __getitem__(self, number: int) -> SessionState:
        state = self._lately.get(number)
        if state is None:
            state = _unpacked(number, self._resting[number])
            if len(self._lately) < 2 * LATELY:
                self._lately[number] = state
        else:
            self._lately.move_to_end(number)
        return state

    def edit(self, number: int) -> SessionState:
        """The state of a session, to be changed; a new one if there is none."""
        state = self[number] if number in self._resting else SessionState(number)
        self.put(state)
        return state

    def put(self, state: SessionState) -> None:
        """Add a state, or replace the one of its number."""
        self._lately[state.number] = state
        self._changed.add(state.number)
        self._resting[state.number] = b""

    def __delitem__(self, number: int) -> None:
        del self._resting[number]
        self._lately.pop(number, None)
        self._changed.discard(number)

    def rest(self, most: int = LATELY) -> None:
        """Make byte strings of all states but the ``most`` that were used last."""
        while len(self._lately) > most:
            number = next(iter(self._lately))
            if number in self._changed:
                self._resting[number] = _packed(self._lately[number])
                self._changed.discard(number)
            del self._lately[number]

    def keeps(self, number: int) -> bool:
        """Whether there is a session of this number that is not forgotten."""
        return self._seen(number)[0]

    def is_doomed(self, number: int) -> bool:
        """Whether a client has deleted this session, and it is not forgotten yet."""
        kept, deleted, _ = self._seen(number)
        return kept and deleted

    def keys_of(self, number: int) -> bytes:
        """The keys of a session's digests, joined; b"" if there is no such session."""
        return self._seen(number)[2]

    def _seen(self, number: int) -> tuple[bool, bool, bytes]:
        """Whether a session is kept, whether it is deleted, and its keys, for any thread."""
        while (data := self._resting.get(number)) is not None:
            if data:
                kept, deleted, keys, *_ = msgspec.msgpack.decode(data)
                return kept, deleted, keys
            if (state := self._lately.get(number)) is not None:
                return state.kept, state.deleted, state.keys
        return False, False, b""

    def all_locations(self) -> Iterator[Any]:
        """The locations of all records of all sessions, in several arrays of ``<u8``."""
        pieces: list[bytes] = []
        for number, data in self._resting.items():
            state = self._lately.get(number) or _unpacked(number, data)
            pieces += array("Q", [state.record, state.ring]).tobytes(), state.operations.tobytes()
            if len(pieces) >= LATELY:
                yield np.frombuffer(b"".join(pieces), "<u8")
                pieces.clear()
        yield np.frombuffer(b"".join(pieces), "<u8")


def _packed(state: SessionState) -> bytes:
    """The state as bytes, for this process alone. Many locations become fewer bytes: most follow each other in
    a log, so their differences are small."""
    *values, origin, forks, operations = _VALUES(state)
    began = None if origin is None else (origin[0].to_bytes(NUMBER_BYTES), origin[1])
    children = [one.to_bytes(NUMBER_BYTES) for one in forks]
    locations = operations.tobytes()
    if len(operations) >= PACKED:
        steps = np.diff(np.frombuffer(locations, "<u8"), prepend=np.uint64(0))
        locations = (zlib.compress(steps.view(np.uint8).reshape(-1, 8).T.tobytes(), 1),)
    encoded = msgspec.msgpack.encode((*values, began, children, locations))
    return bytes(memoryview(encoded))  # a copy: the first one holds more memory than it has bytes


def _unpacked(number: int, data: bytes) -> SessionState:
    *values, began, children, locations = msgspec.msgpack.decode(data)
    origin = None if began is None else (int.from_bytes(began[0]), began[1])
    forks = set(map(int.from_bytes, children))
    if not isinstance(locations, bytes):
        steps = np.frombuffer(zlib.decompress(locations[0]), np.uint8).reshape(8, -1).T
        locations = np.cumsum(np.ascontiguousarray(steps).view("<u8").ravel(), dtype="<u8").tobytes()
    return SessionState(number, *[*values, origin, forks, array("Q", locations)])


class DigestTable:
    """Which session has a digest: the last one that it was given to. ``states``: those of the sessions. One
    thread changes it; any may look into it."""

    def __init__(self, states: SessionStates) -> None:
        self._states = states
        self._shards: list[array[int] | None] = [None] * SHARDS
        self._numbers: list[int] = []  # by row; -1 for a free one
        self._free: list[int] = []

    def enter(self, number: int) -> int:
        """Give a session a row, which `add` and `remove` take."""
        if self._free:
            row = self._free.pop()
            self._numbers[row] = number
            return row
        self._numbers.append(number)
        return len(self._numbers) - 1

    def leave(self, row: int) -> None:
        """Take the row of a session back, of which no digest is in the table any more."""
        self._numbers[row] = -1
        self._free.append(row)

    def rows(self, before: int | None, most: int) -> Iterator[tuple[int, int]]:
        """At most ``most`` rows, the last first, each with the number of its session; -1 for a free one. They
        are those before the row ``before``; None: the last ones."""
        end = len(self._numbers) if before is None else min(before, len(self._numbers))
        begin = max(0, end - most)
        return zip(range(end - 1, begin - 1, -1), self._numbers[begin:end][::-1], strict=True)

    def get(self, digest: bytes) -> int | None:
        """The number of the session with this digest; None for none."""
        entry = self._find(key_of(digest))
        return None if entry is None else self._numbers[entry & _ROW]

    def add(self, keys: bytes, row: int) -> None:
        """Let the digests with these keys lead to the session in ``row``, which has them in its state
        already."""
        for key in _each(keys):
            before, entry, at = self._find(key), _tag_of(key) | row, _shard_of(key)
            shard = self._shards[at]
            if shard is None:
                shard = self._shards[at] = array("Q")
            insort(shard, entry)
            if before is not None and before != entry:
                del shard[bisect_left(shard, before)]

    def _find(self, key: bytes) -> int | None:
        """The first entry that leads to a session with the digest of this key."""
        shard, tag = self._shards[_shard_of(key)], _tag_of(key)
        if shard is None:
            return None
        for entry in shard[bisect_left(shard, tag) : bisect_left(shard, tag + _TAG)]:
            if _has(self._states.keys_of(self._numbers[entry & _ROW]), key):
                return entry
        return None

    def remove(self, keys: bytes, row: int) -> None:
        """Let those of the digests with these keys lead nowhere that lead to the session in ``row``. They are
        all that it has."""
        for key in _each(keys):
            shard, entry = self._shards[_shard_of(key)], _tag_of(key) | row
            if shard is None:
                continue
            found = bisect_left(shard, entry)
            if found < len(shard) and shard[found] == entry:
                del shard[found]


_TAG, _ROW = 1 << 32, (1 << 32) - 1


def key_of(digest: bytes) -> bytes:
    """The key of a digest: its first and its last bytes."""
    return digest[: KEY_BYTES // 2] + digest[-KEY_BYTES // 2 :]


def _each(keys: bytes) -> Iterable[bytes]:
    """Each of these keys once."""
    return dict.fromkeys(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))


def _shard_of(key: bytes) -> int:
    return int.from_bytes(key[:2], "little") % SHARDS


def _tag_of(key: bytes) -> int:
    return int.from_bytes(key[-4:], "little") << 32


def _has(keys: bytes, key: bytes) -> bool:
    at = keys.find(key)
    while at % KEY_BYTES:
        if at < 0:
            return False
        at = keys.find(key, at + 1)
    return True
