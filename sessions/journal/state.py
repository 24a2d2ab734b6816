"""Which records of the logs say what each session is: the index in memory, made anew at each start.

A session has a place for its record, its keyring and each of its operations, 8 bytes each. Records that a
later one supersedes are dead, and the logs are told of each. A fork's own operations follow on the
first ones of the session it came from, which stay as long as any fork needs them. Knows no files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from ..errors import RecordDamaged
from .records import NOWHERE
from .segment import ENTRY, HIT, MISSING, Kind, LoadedLog, all_bytes_at

DIGEST_BYTES = 32


class SessionState:
    """One session. ``operations``: places of those from index ``first`` on; before it all is in a snapshot.

    ``kept``: false once it was forgotten, while forks need its operations. ``used``: when it was last written
    (microseconds since the epoch), by the record with the sequence number ``last``.
    """

    __slots__ = (
        "base",
        "digests",
        "first",
        "grown",
        "kept",
        "last",
        "number",
        "operations",
        "origin",
        "record",
        "ring",
        "salt",
        "snapshot",
        "used",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.kept = True
        self.record = self.ring = MISSING
        self.first = 0
        self.operations: array[int] = array("Q")
        self.snapshot = False
        self.base = self.grown = 0
        self.used = self.last = 0
        self.origin: tuple[int, int] | None = None
        self.salt = b""
        self.digests = b""

    @property
    def count(self) -> int:
        """Operations that it has had."""
        return self.first + len(self.operations)

    @property
    def is_unopened_fork(self) -> bool:
        """Whether it was forked off and never opened: it has the handle of its birth alone."""
        return self.origin is not None and len(self.digests) == DIGEST_BYTES

    def places(self) -> Iterator[int]:
        """Of all that it needs."""
        yield self.record
        yield self.ring
        yield from self.operations

    def handles(self) -> Iterator[bytes]:
        """Digests of its handles."""
        for at in range(0, len(self.digests), DIGEST_BYTES):
            yield self.digests[at : at + DIGEST_BYTES]


class Sessions:
    """All sessions. ``size`` tells how many bytes a record takes, ``died`` is told of records not needed
    now."""

    def __init__(self, size: Callable[[int], int], died: Callable[[int], None]) -> None:
        self.states: dict[int, SessionState] = {}
        self.handles: dict[bytes, int] = {}
        self.forks: dict[int, set[int]] = {}
        self._size = size
        self._died = died
        self._salts: dict[bytes, bytes] = {}

    # --- one record -----------------------------------------------------------------------------------------

    def apply(self, kind: int, number: int, index: int, place: int, extra: bytes) -> list[int]:
        """A record was written; sessions of which nothing is needed any more."""
        if kind == Kind.DROP:
            return self._forget(number)
        self._apply(kind, number, index, place, extra)
        state = self.states.get(number)
        if kind == Kind.SESSION and state is not None and state.origin is not None:
            self.forks.setdefault(state.origin[0], set()).add(number)
        return []

    def touched(self, number: int, sequence: int, moment: int) -> None:
        """Its last record so far."""
        state = self.states.get(number)
        if state is not None:
            state.last, state.used = sequence, moment

    def _apply(self, kind: int, number: int, index: int, place: int, extra: bytes) -> None:
        state = self.states.get(number)
        if state is None:
            state = self.states[number] = SessionState(number)
        match kind:
            case Kind.OPERATION:
                self._operation(state, index, place)
            case Kind.SNAPSHOT:
                self._snapshot(state, index, place)
            case Kind.SESSION:
                self._born(state, place, extra)
            case Kind.KEYRING:
                self._kill(state.ring)
                for digest in state.handles():
                    if self.handles.get(digest) == number:
                        del self.handles[digest]
                state.ring, state.digests = place, extra
                if state.kept:
                    self.handles.update((digest, number) for digest in state.handles())

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
        self._measure(state)

    def _measure(self, state: SessionState) -> None:
        sizes = [self._size(place) for place in state.operations]
        state.base = sizes.pop(0) if state.snapshot and sizes else 0
        state.grown = sum(sizes)

    def _born(self, state: SessionState, place: int, extra: bytes) -> None:
        if not state.kept:  # the number is another session's now
            for gone in state.places():
                self._kill(gone)
            state = self.states[state.number] = SessionState(state.number)
        self._kill(state.record)
        state.record = place
        if extra:
            salt, session, operations = msgspec.msgpack.decode(extra)
            state.salt = self._salts.setdefault(salt, salt)
            state.origin = None if session == NOWHERE else (session, operations)

    def _kill(self, place: int) -> None:
        if place not in (MISSING, HIT):
            self._died(place)

    def _forget(self, number: int) -> list[int]:
        state = self.states.get(number)
        if state is None:
            return []
        for digest in state.handles():
            if self.handles.get(digest) == number:
                del self.handles[digest]
        self._kill(state.ring)
        state.ring, state.digests, state.kept = MISSING, b"", False
        return self._erase(number)

    def _erase(self, number: int) -> list[int]:
        """A session that was forgotten, and its ancestors, if no fork needs them."""
        erased: list[int] = []
        # No recursion: a line of forks may be longer than a stack is deep.
        while not self.forked(number):
            state = self.states.get(number)
            if state is None or state.kept:
                break
            for place in state.places():
                self._kill(place)
            del self.states[number]
            erased.append(number)
            if state.origin is None:
                break
            forks = self.forks.get(state.origin[0], set())
            forks.discard(number)
            if not forks:
                self.forks.pop(state.origin[0], None)
            number = state.origin[0]
        return erased

    # --- all records ----------------------------------------------------------------------------------------

    def load(self, parts: list[LoadedLog]) -> int:
        """Make everything from the records of all logs; the highest generation that one of them tells."""
        entries = np.concatenate([np.empty(0, ENTRY), *(part.entries for part in parts)])
        places = np.concatenate([np.empty(0, "<u8"), *(part.places for part in parts)])
        told = [extra for part in parts for extra in _in_order(part)]
        extras = dict(zip(np.flatnonzero(entries["extra"]).tolist(), told, strict=True))
        del told
        parts.clear()  # millions of entries: not twice in memory
        starts = entries["word"][_kinds(entries) == Kind.START] >> np.uint64(16)
        order = np.lexsort((entries["sequence"], entries["session"]))
        order = order[_kinds(entries)[order] != Kind.START]
        if len(order):
            self._fill(entries, places, extras, order)
        del entries, places, extras, order
        for number, state in self.states.items():
            if state.origin is not None:
                self.forks.setdefault(state.origin[0], set()).add(number)
        for number in [number for number, state in self.states.items() if not state.kept]:
            self._erase(number)
        return int(starts.max()) if len(starts) else 0

    def _fill(self, entries: Any, places: Any, extras: dict[int, bytes], order: Any) -> None:
        words = entries["word"][order]
        kinds, indexes = words >> np.uint64(8) & np.uint64(0xFF), words >> np.uint64(16)
        sessions = entries["session"][order]
        placed, sequences, times = places[order], entries["sequence"][order], entries["time"][order]
        # The same record may stand in two logs: a group that was written again after a failed sync, or moved.
        again = np.zeros(len(order), bool)
        again[1:] = (sequences[1:] == sequences[:-1]) & (sessions[1:] == sessions[:-1])
        joined = np.zeros(len(order), bool)
        joined[1:] = (sessions[1:] == sessions[:-1]) & (kinds[1:] == Kind.OPERATION)
        joined[1:] &= (kinds[:-1] == Kind.OPERATION) & (indexes[1:] == indexes[:-1] + np.uint64(1))
        joined[1:] &= ~again[1:] & ~again[:-1]
        begins = np.flatnonzero(~joined)
        ends = np.append(begins[1:], len(order))
        rows = zip(
            begins.tolist(),
            ends.tolist(),
            sessions[begins].tolist(),
            kinds[begins].tolist(),
            indexes[begins].tolist(),
            placed[begins].tolist(),
            order[begins].tolist(),
            again[begins].tolist(),
            strict=True,
        )
        lasts, moments = sequences[ends - 1].tolist(), times[ends - 1].tolist()
        for (begin, end, number, kind, index, place, row, repeated), last, moment in zip(
            rows, lasts, moments, strict=True
        ):
            if repeated and place == HIT:
                continue  # its other copy is whole, or as damaged
            if kind == Kind.DROP:
                state = self.states.setdefault(number, SessionState(number))
                for digest in state.handles():
                    if self.handles.get(digest) == number:
                        del self.handles[digest]
                state.ring, state.digests, state.kept = MISSING, b"", False
                continue
            if kind == Kind.OPERATION:
                self._run(number, index, placed[begin:end])
            else:
                self._apply(kind, number, index, place, extras.get(row, b""))
            if kind != Kind.KEYRING:
                state = self.states[number]
                state.last, state.used = last, moment

    def _run(self, number: int, index: int, places: Any) -> None:
        state = self.states.get(number)
        if state is None:
            state = self.states[number] = SessionState(number)
        if index == state.count:
            state.operations.frombytes(places.tobytes())
            state.grown += int(all_bytes_at(places).sum())
            return
        for at, place in enumerate(places.tolist(), index):
            self._operation(state, at, place)

    def live(self) -> Iterator[Any]:
        """Places of all records that are needed, in arrays."""
        few = array("Q")
        for state in self.states.values():
            few.append(state.record)
            few.append(state.ring)
            if state.operations:
                yield np.frombuffer(state.operations, "<u8")
        yield np.frombuffer(few, "<u8")

    # --- forks ----------------------------------------------------------------------------------------------

    def forked(self, number: int) -> bool:
        """Whether operations of other sessions follow on this one's."""
        return bool(self.forks.get(number))

    def fork_tree(self, number: int) -> list[int]:
        """All that were forked from one another with this session among them; forgotten ones not."""
        while (state := self.states.get(number)) is not None and state.origin is not None:
            number = state.origin[0]
        found: list[int] = []
        waiting = [number]
        while waiting:
            number = waiting.pop()
            state = self.states.get(number)
            if state is not None and state.kept:
                found.append(number)
            waiting += self.forks.get(number, ())
        return sorted(found)

    def _known(self, number: int) -> SessionState:
        state = self.states.get(number)
        if state is None or state.record == MISSING:
            raise RecordDamaged(f"the record of session {number} is missing")
        return state

    def needed(self, number: int) -> Iterator[tuple[int, int, int]]:
        """What a session is made of: (session, index, place) of each operation, from its first ancestor on.

        Raises ``RecordDamaged``.
        """
        pieces = [self._own(number, None)]
        state = self._known(number)
        while state.origin is not None and not state.snapshot:
            number, operations = state.origin
            state = self._known(number)
            pieces.append(self._own(number, operations))
        for piece in reversed(pieces):
            yield from piece

    def _own(self, number: int, until: int | None) -> list[tuple[int, int, int]]:
        state = self.states[number]
        if until is not None and (until > state.count or (until <= state.first and (until or state.first))):
            raise RecordDamaged(f"session {number} has not its first {until} operations")
        places = state.operations if until is None else state.operations[: until - state.first]
        return [(number, state.first + at, place) for at, place in enumerate(places)]

    def damaged(self) -> list[int]:
        """Sessions that cannot be opened, as far as is known without reading them, and forks of such."""
        hit = {
            number
            for number, state in self.states.items()
            if HIT in (state.record, state.ring)
            or state.record == MISSING
            or HIT in state.operations
            or MISSING in state.operations
        }
        found = {number for number in hit if self.states[number].kept}
        waiting = [child for number in hit for child in self.forks.get(number, ())]
        seen: set[int] = set()
        while waiting:
            child = waiting.pop()
            if child in seen or child not in self.states:
                continue
            seen.add(child)
            waiting += self.forks.get(child, ())
            if self.states[child].kept and not self._whole(child):
                found.add(child)
        return sorted(found)

    def _whole(self, number: int) -> bool:
        try:
            return all(place not in (HIT, MISSING) for _, _, place in self.needed(number))
        except RecordDamaged:
            return False

    def strike(self, number: int, kind: int, index: int) -> None:
        """The record was found damaged."""
        state = self.states.get(number)
        if state is None:
            return
        match kind:
            case Kind.SESSION:
                state.record = HIT
            case Kind.KEYRING:
                state.ring = HIT
            case _ if 0 <= index - state.first < len(state.operations):
                state.operations[index - state.first] = HIT

    def place(self, number: int, kind: int, index: int) -> int:
        """Where what is valid of this kind lies; a superseded record lies elsewhere."""
        state = self.states.get(number)
        if state is None:
            return MISSING
        match kind:
            case Kind.SESSION:
                return state.record
            case Kind.KEYRING:
                return state.ring
            case Kind.SNAPSHOT if not state.snapshot or index != state.first:
                return MISSING
            case Kind.OPERATION if state.snapshot and index == state.first:
                return MISSING
            case Kind.OPERATION | Kind.SNAPSHOT if 0 <= index - state.first < len(state.operations):
                return state.operations[index - state.first]
        return MISSING

    def move(self, number: int, kind: int, index: int, place: int) -> None:
        """A record that is valid lies there now."""
        state = self.states[number]
        match kind:
            case Kind.SESSION:
                state.record = place
            case Kind.KEYRING:
                state.ring = place
            case _:
                state.operations[index - state.first] = place


def _kinds(entries: Any) -> Any:
    return entries["word"] >> np.uint64(8) & np.uint64(0xFF)


def _in_order(part: LoadedLog) -> Iterator[bytes]:
    """What is said of the records, in the order of the entries."""
    for place in np.flatnonzero(part.entries["extra"]).tolist():
        yield part.extras.get(int(part.entries["offset"][place]), b"")
