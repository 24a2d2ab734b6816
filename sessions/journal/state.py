"""The index in memory, made again at each start: which records count for each session, and where they lie.

A session has a place of 8 bytes for its record, for its keyring and for each of its operations. A record
that a later one replaces is dead. A fork's own operations follow the first ones of the session it was
forked from; these stay as long as a fork needs them. When the journal or a tenant's share of it has too many,
the longest unused sessions are forgotten, none that is open. Knows no files.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Any

import numpy as np

from ..errors import RecordDamaged
from ..settings import JournalShare
from .records import origin_in
from .segment import (
    ENTRY,
    GIANT,
    HIT,
    MISSING,
    SLOT_SHIFT,
    Fresh,
    Kind,
    LoadedLog,
    all_bytes_at,
    kinds_of,
    sessions_of,
)

DIGEST_BYTES = 32


@dataclass(slots=True, eq=False)
class SessionState:
    """Where the records of one session lie; a place is an integer (`segment.place_of`). ``record``, ``ring``:
    the places of its record and its keyring. ``operations``: those of its operations from index ``first`` on.

    ``snapshot``: the first of these is a snapshot of all before it, of ``base`` bytes; the others have
    ``grown`` bytes. ``kept``: false once the session was forgotten, while its forks need its operations.
    ``used``: when it was last written (microseconds since the epoch), by the record with the sequence number
    ``last``. ``origin``: for a fork, the number of the other session with which it begins, and how many of that
    one's operations. ``digests``: those of its keyring, joined.
    """

    number: int
    kept: bool = True
    record: int = MISSING
    ring: int = MISSING
    first: int = 0
    operations: array[int] = field(default_factory=lambda: array("Q"))
    snapshot: bool = False
    base: int = 0
    grown: int = 0
    used: int = 0
    last: int = 0
    origin: tuple[int, int] | None = None
    salt: bytes = b""
    digests: bytes = b""

    @property
    def count(self) -> int:
        """How many operations the session has had, with those that a snapshot has replaced: the index of the
        next one."""
        return self.first + len(self.operations)

    @property
    def is_unopened_fork(self) -> bool:
        """Whether the session is a fork that no client has opened: it has only the handle that was issued
        with it."""
        return self.origin is not None and len(self.digests) == DIGEST_BYTES

    def kind_at(self, index: int) -> Kind:
        """The kind of the operation at ``index``: ``Kind.SNAPSHOT`` or ``Kind.OPERATION``."""
        return Kind.SNAPSHOT if self.snapshot and index == self.first else Kind.OPERATION

    def places(self) -> Iterator[int]:
        """The places of the session's own records: its record, its keyring and its operations. `MISSING`
        stands for one that does not exist, `HIT` for a damaged one."""
        yield self.record
        yield self.ring
        yield from self.operations

    def handles(self) -> Iterator[bytes]:
        """The digests, 32 bytes each, by which the session is found: of its handles and of its conversation."""
        for at in range(0, len(self.digests), DIGEST_BYTES):
            yield self.digests[at : at + DIGEST_BYTES]


class Sessions:
    """The index in memory. ``states``: of all sessions, by number. ``handles``: the number of the session with
    each digest of a keyring. ``forks``: the numbers of the sessions that were forked from each.

    ``size`` returns the bytes of the record at a place. ``died`` is called with the place of each record that
    no session needs any more.
    """

    def __init__(self, size: Callable[[int], int], died: Callable[[int], None]) -> None:
        self.states: dict[int, SessionState] = {}
        self.handles: dict[bytes, int] = {}
        self.forks: dict[int, set[int]] = {}
        self._size = size
        self._died = died
        self._salts: dict[bytes, bytes] = {}

    def apply(self, record: Fresh, place: int, sequence: int, moment: int) -> list[SessionState]:
        """Update the index with a record that was written at ``place``, with the sequence number ``sequence``,
        at ``moment`` (microseconds since the epoch). Returns the sessions that are removed from the index,
        because no record of theirs is needed any more."""
        if record.kind == Kind.DROP:
            state = self.states.get(record.session)
            if state is None:
                return []
            self._kill(state.ring)
            self._end(state)
            return self._erase(record.session)
        state = self._apply(record.kind, record.session, record.index, place, record.extra)
        if record.kind == Kind.SESSION and state.origin is not None:
            self.forks.setdefault(state.origin[0], set()).add(state.number)
        if record.kind != Kind.KEYRING:  # resuming a session alone does not count as use
            state.last, state.used = sequence, moment
        return []

    def _apply(self, kind: int, number: int, index: int, place: int, extra: bytes) -> SessionState:
        state = self._state(number)
        match kind:
            case Kind.OPERATION:
                self._operation(state, index, place)
            case Kind.SNAPSHOT:
                self._snapshot(state, index, place)
            case Kind.SESSION:
                state = self._born(state, place, extra)
            case Kind.KEYRING:
                self._kill(state.ring)
                self._end_handles(state)
                state.ring, state.digests = place, extra
                if state.kept:
                    self.handles.update((digest, number) for digest in state.handles())
        return state

    def _state(self, number: int) -> SessionState:
        state = self.states.get(number)
        if state is None:
            state = self.states[number] = SessionState(number)
        return state

    def _operation(self, state: SessionState, index: int, place: int) -> None:
        at, operations = index - state.first, state.operations
        if at < 0:
            self._kill(place)
            return
        if at >= len(operations):
            operations.extend([MISSING] * (at - len(operations)))
            operations.append(place)
        else:
            state.grown -= self._size(operations[at])
            self._kill(operations[at])
            operations[at] = place
        state.grown += self._size(place)

    def _snapshot(self, state: SessionState, index: int, place: int) -> None:
        behind = index + 1 - state.first
        if behind <= 0:
            self._kill(place)
            return
        for gone in state.operations[:behind]:
            self._kill(gone)
        state.operations = array("Q", [place]) + state.operations[behind:]
        state.first, state.snapshot = index, True
        state.base = self._size(place)
        state.grown = sum(map(self._size, state.operations[1:]))

    def _born(self, state: SessionState, place: int, extra: bytes) -> SessionState:
        if not state.kept:  # the number is another session's now
            for gone in state.places():
                self._kill(gone)
            state = self.states[state.number] = SessionState(state.number)
        self._kill(state.record)
        state.record = place
        if extra:
            salt, state.origin = origin_in(extra)
            state.salt = self._salts.setdefault(salt, salt)
        return state

    def _kill(self, place: int) -> None:
        if place not in (MISSING, HIT):
            self._died(place)

    def _end(self, state: SessionState) -> None:
        """Mark a session as forgotten: its handles open nothing any more, and its keyring is not needed."""
        self._end_handles(state)
        state.ring, state.digests, state.kept = MISSING, b"", False

    def _end_handles(self, state: SessionState) -> None:
        for digest in state.handles():
            if self.handles.get(digest) == state.number:
                del self.handles[digest]

    def _erase(self, number: int) -> list[SessionState]:
        """Remove a forgotten session from the index if no fork needs it, and then likewise the session that it
        was forked from, and so on. Returns those removed."""
        erased: list[SessionState] = []
        # No recursion: a chain of forks may be longer than the stack is deep.
        while not self.forked(number):
            state = self.states.get(number)
            if state is None or state.kept:
                break
            for place in state.places():
                self._kill(place)
            del self.states[number]
            erased.append(state)
            if state.origin is None:
                break
            forks = self.forks.get(state.origin[0], set())
            forks.discard(number)
            if not forks:
                self.forks.pop(state.origin[0], None)
            number = state.origin[0]
        return erased

    def load(self, parts: list[LoadedLog]) -> None:
        """Build the index from the records of all logs, at the start. Empties the list ``parts``, to save
        memory."""
        entries = np.concatenate([np.empty(0, ENTRY), *(part.entries for part in parts)])
        places = np.concatenate([np.empty(0, "<u8"), *(part.places for part in parts)])
        listed = [extra for part in parts for extra in _in_order(part)]
        extras = dict(zip(np.flatnonzero(entries["extra"]).tolist(), listed, strict=True))
        del listed
        parts.clear()  # there may be millions: do not keep them twice
        order = np.lexsort((entries["sequence"], entries["session"], entries["high"]))
        order = order[kinds_of(entries)[order] != Kind.START]
        if len(order):
            self._fill(entries, places, extras, order)
        del entries, places, extras, order
        for number, state in self.states.items():
            if state.origin is not None:
                self.forks.setdefault(state.origin[0], set()).add(number)
        for number in [number for number, state in self.states.items() if not state.kept]:
            self._erase(number)

    def _fill(self, entries: Any, places: Any, extras: dict[int, bytes], order: Any) -> None:
        words = entries["word"][order]
        kinds, indexes = words >> 8 & 0xFF, words >> 16
        low, high = entries["session"][order], entries["high"][order]
        same = np.zeros(len(order), bool)
        same[1:] = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
        placed, sequences, times = places[order], entries["sequence"][order], entries["time"][order]
        # A record may be in two logs: its group was written again after a failed sync, or was compacted.
        again = np.zeros(len(order), bool)
        again[1:] = (sequences[1:] == sequences[:-1]) & same[1:]
        joined = np.zeros(len(order), bool)
        joined[1:] = same[1:] & (kinds[1:] == Kind.OPERATION)
        joined[1:] &= (kinds[:-1] == Kind.OPERATION) & (indexes[1:] == indexes[:-1] + 1)
        joined[1:] &= ~again[1:] & ~again[:-1]
        begins = np.flatnonzero(~joined)
        ends = np.append(begins[1:], len(order))
        columns = [column[begins] for column in (kinds, indexes, placed, order, again)]
        columns += [begins, ends, sequences[ends - 1], times[ends - 1]]
        numbers = sessions_of(entries[order[begins]])
        for number, kind, index, place, row, repeated, begin, end, last, moment in zip(
            numbers, *(column.tolist() for column in columns), strict=True
        ):
            if repeated and place == HIT:
                continue  # its other copy is whole, or as damaged
            if kind == Kind.DROP:
                self._end(self._state(number))
                continue
            if kind == Kind.OPERATION:
                state = self._run(number, index, placed[begin:end])
            else:
                state = self._apply(kind, number, index, place, extras.get(row, b""))
            if kind != Kind.KEYRING:
                state.last, state.used = last, moment

    def _run(self, number: int, index: int, places: Any) -> SessionState:
        state = self._state(number)
        if index == state.count:
            state.operations.frombytes(places.tobytes())
            state.grown += int(self.bytes_at(places).sum())
            return state
        for at, place in enumerate(places.tolist(), index):
            self._operation(state, at, place)
        return state

    def bytes_at(self, places: Any) -> Any:
        """How many bytes the record at each of ``places`` takes, as an array; 0 for a missing or damaged
        one."""
        sizes = all_bytes_at(places)
        sizes[places >> SLOT_SHIFT == 0] = 0
        for at in np.flatnonzero(sizes >= GIANT << 3).tolist():  # the place does not tell: the record does
            sizes[at] = self._size(int(places[at]))
        return sizes

    def live(self) -> Iterator[Any]:
        """The places of all records that some session needs, in several arrays of ``<u8``. Some places are
        `MISSING` (no such record) or `HIT` (damaged)."""
        few = array("Q")
        for state in self.states.values():
            few.append(state.record)
            few.append(state.ring)
            if state.operations:
                yield np.frombuffer(state.operations, "<u8")
        yield np.frombuffer(few, "<u8")

    def forked(self, number: int) -> bool:
        """Whether the index has a session that was forked directly from this one; a forgotten fork counts as
        long as it is in the index."""
        return bool(self.forks.get(number))

    def descendants(self, *numbers: int) -> set[int]:
        """The forks of these sessions, their forks, and so on."""
        found: set[int] = set()
        waiting = list(numbers)
        while waiting:
            fresh = self.forks.get(waiting.pop(), set()) - found
            found |= fresh
            waiting += fresh
        return found & self.states.keys()

    def fork_tree(self, number: int) -> list[int]:
        """The numbers of all kept sessions of this one's fork tree."""
        while (state := self.states.get(number)) is not None and state.origin is not None:
            number = state.origin[0]
        found = {number} & self.states.keys() | self.descendants(number)
        return sorted(one for one in found if self.states[one].kept)

    def _known(self, number: int) -> SessionState:
        state = self.states.get(number)
        if state is None or state.record == MISSING:
            raise RecordDamaged(f"the record of session {number} is missing")
        return state

    def needed(self, number: int) -> Iterator[tuple[SessionState, int, int]]:
        """All operations that make a session's history, those inherited from the sessions that it was forked
        from first: for each the session that has it, its index there, and its place. Raises ``RecordDamaged``
        if some are not in the index."""
        state = self._known(number)
        pieces = [self._own(state, state.count)]
        while state.origin is not None and not state.snapshot:
            number, operations = state.origin
            state = self._known(number)
            if operations > state.count or (operations <= state.first and (operations or state.first)):
                raise RecordDamaged(f"session {number} lacks some of its first {operations} operations")
            pieces.append(self._own(state, operations))
        for piece in reversed(pieces):
            yield from piece

    @staticmethod
    def _own(state: SessionState, until: int) -> Iterator[tuple[SessionState, int, int]]:
        places = state.operations[: until - state.first]
        return ((state, index, place) for index, place in enumerate(places, state.first))

    def damaged(self) -> list[int]:
        """The numbers, sorted, of the kept sessions with a record that is damaged or missing, and of their
        forks that need such an operation."""
        hit = {
            number
            for number, state in self.states.items()
            if HIT in (state.record, state.ring)
            or state.record == MISSING
            or HIT in state.operations
            or MISSING in state.operations
        }
        found = {number for number in hit if self.states[number].kept}
        forks = self.descendants(*hit)
        found |= {child for child in forks if self.states[child].kept and not self._whole(child)}
        return sorted(found)

    def _whole(self, number: int) -> bool:
        try:
            return all(place not in (HIT, MISSING) for _, _, place in self.needed(number))
        except RecordDamaged:
            return False

    def set_place(self, number: int, kind: int, index: int, place: int) -> None:
        """Set the place of a session's record of this kind and index: it was copied to ``place``, or was found
        damaged (``place`` is `HIT`). Does nothing if the session is not in the index."""
        state = self.states.get(number)
        if state is None:
            return
        match kind:
            case Kind.SESSION:
                state.record = place
            case Kind.KEYRING:
                state.ring = place
            case _ if 0 <= index - state.first < len(state.operations):
                state.operations[index - state.first] = place

    def place(self, number: int, kind: int, index: int) -> int:
        """The place of a session's valid record of this kind and index: `HIT` if it is damaged, `MISSING` if
        there is none."""
        state = self.states.get(number)
        if state is None:
            return MISSING
        match kind:
            case Kind.SESSION:
                return state.record
            case Kind.KEYRING:
                return state.ring
            case Kind.OPERATION | Kind.SNAPSHOT if kind == state.kind_at(index):
                at = index - state.first
                return state.operations[at] if 0 <= at < len(state.operations) else MISSING
        return MISSING


def _in_order(part: LoadedLog) -> Iterator[bytes]:
    """Yield the bytes that the log's index stores of some records (`records.extra_of`), in the order of the
    log's entries."""
    for place in np.flatnonzero(part.entries["extra"]).tolist():
        yield part.extras.get(int(part.entries["offset"][place]), b"")


@dataclass(slots=True)
class _TenantHolding:
    """One tenant's share of the journal and what it has there. ``sizes``: the bytes of each session, by number.
    ``kept``: its sessions that are not forgotten, the longest unused first. ``bytes``: of all."""

    share: JournalShare
    sizes: dict[int, int] = field(default_factory=dict)
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    bytes: int = 0

    def surplus(self, live: Container[int]) -> Iterator[int]:
        """The numbers of the sessions to forget so that the rest fits the share: the longest unused first, none
        in ``live``, the sessions in memory."""
        sessions, size = len(self.kept), self.bytes
        for number in self.kept:
            if sessions <= self.share.sessions and size <= self.share.bytes:
                return
            if number not in live:
                sessions, size = sessions - 1, size - self.sizes[number]
                yield number


class TenantShares:
    """Counts what each tenant that has a share of the journal has there, and finds sessions beyond it. Tenants
    are known by salt; those without a share are not counted."""

    def __init__(self, shares: Mapping[bytes, JournalShare]) -> None:
        self._held = {salt: _TenantHolding(share) for salt, share in shares.items()}
        self._changed: set[bytes] = set()
        self._over: set[bytes] = set()

    def count(self, state: SessionState, size: int) -> None:
        """Note that a session's records take ``size`` bytes now: it was written to, or forgotten. Does
        nothing if its tenant has no share."""
        held = self._held.get(state.salt)
        if held is None:
            return
        held.bytes += size - held.sizes.pop(state.number, 0)
        if size or state.kept:  # damaged records have no bytes
            held.sizes[state.number] = size
        held.kept.pop(state.number, None)
        if state.kept:
            held.kept[state.number] = None
        self._changed.add(state.salt)
        (self._over.add if held.bytes > held.share.bytes else self._over.discard)(state.salt)

    def look_again(self, salt: bytes) -> None:
        """Called when a session of this tenant was closed, so that it may be forgotten now: lets the next
        `surplus` look at the tenant."""
        if salt in self._held:
            self._changed.add(salt)

    def surplus(self, live: Container[int], most: int) -> list[int]:
        """The numbers of up to ``most`` sessions that the caller has to erase: those of one tenant beyond its
        share, the longest unused first, none in ``live``, the sessions in memory. Erase them and call again,
        until there are none."""
        while self._changed:
            salt = next(iter(self._changed))
            if gone := list(islice(self._held[salt].surplus(live), most)):
                return gone
            self._changed.discard(salt)
        return []

    def full(self) -> frozenset[bytes]:
        """The salts of the tenants with more bytes in the journal than their share."""
        return frozenset(self._over)

    def statistics(self, salt: bytes) -> dict[str, float]:
        """How many sessions the journal keeps of a tenant (``kept``), and their bytes (``journal``); empty if
        it has no share."""
        held = self._held.get(salt)
        return {} if held is None else {"kept": float(len(held.kept)), "journal": float(held.bytes)}


def surplus(states: Iterable[SessionState], count: int, weigh: Callable[[SessionState], int]) -> list[int]:
    """Choose up to ``count`` of the sessions to forget; returns their numbers. Each is taken from the tenant
    that holds most at that moment, by the sum of ``weigh`` over its sessions: first its forks that were never
    opened, then the session that was not used for longest."""
    holds: dict[bytes, int] = defaultdict(int)
    queues: dict[bytes, list[SessionState]] = defaultdict(list)
    if count <= 0:
        return []
    for state in states:
        holds[state.salt] += weigh(state)
        queues[state.salt].append(state)
    for queue in queues.values():
        queue.sort(key=lambda state: (not state.is_unopened_fork, state.used, state.last), reverse=True)
    tenants = [(-holds[salt], salt) for salt in queues]
    heapify(tenants)
    gone: list[int] = []
    while tenants and len(gone) < count:
        held, salt = tenants[0]
        state = queues[salt].pop()
        gone.append(state.number)
        if queues[salt]:
            heapreplace(tenants, (held + weigh(state), salt))
        else:
            heappop(tenants)
    return gone
