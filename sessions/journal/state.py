"""The index in memory, made again at each start: which records count for each session, and where they lie.

A session has a location of 8 bytes for its record, for its keyring and for each of its operations. A record
that a later one replaces is dead. A fork's own operations follow the first ones of the session it was
forked from; these stay as long as a fork needs them. Knows no files.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from ..errors import RecordDamaged
from .records import told_in
from .segment import (
    ENTRY,
    ERASED,
    GIANT,
    HIT,
    MISSING,
    SLOT_SHIFT,
    Fresh,
    Kind,
    LoadedLog,
    bytes_at,
    kinds_of,
    sessions_of,
)
from .session_states import DigestTable, SessionState, SessionStates, key_of

DIGEST_BYTES = 32
Moved = tuple[int, int, int, int]
"""Of a record that was copied: its kind and index, its location before, and its location now."""


class Sessions:
    """The index in memory. ``states``: of all sessions, by number. ``handles``: the session with each digest of
    a keyring.

    ``size`` returns the bytes of the record at a location. ``died`` is called with the location of each record
    that no session needs any more."""

    def __init__(self, size: Callable[[int], int], died: Callable[[int], None]) -> None:
        self.states = SessionStates()
        self.handles = DigestTable(self.states)
        self.torn: dict[int, bytes] = {}
        """The digests, joined, of keyrings that were found damaged at the start, by session."""
        self.trees: dict[int, int] = {}
        """Of each fork in a fork tree, the number of the tree's first session."""
        self._members: dict[int, set[int]] = {}  # the forks in each tree, by the number of its first session
        self._struck: set[int] = set()  # sessions that lacked records when the index was built
        self._removals: dict[int, int] = {}  # the last operation that removed items, as the index was built
        self._size = size
        self._died = died

    def apply(self, record: Fresh, location: int, sequence: int, moment: int) -> list[SessionState]:
        """Update the index with a record that was written at ``location``, with the sequence number
        ``sequence``, at ``moment`` (microseconds of the store's clock). Returns the sessions that are removed
        from the index, because no record of theirs is needed any more. Of a session that is not in the index
        only its SESSION record counts: any other was queued before the session was forgotten."""
        if record.kind != Kind.SESSION and record.session not in self.states:
            if record.kind != Kind.DROP:
                self._kill(location)
            return []
        if record.kind == Kind.DROP:
            state = self.states.edit(record.session)
            self._kill(state.ring)
            self._end(state)
            return self._erase(record.session)
        state = self._apply(record.kind, record.session, record.index, location, record.extra)
        if record.kind != Kind.KEYRING:  # resuming a session alone does not count as use
            state.last, state.used = sequence, moment
        if record.kind == Kind.SNAPSHOT and state.origin is not None:
            return self._erase(state.origin[0])
        return []

    def _apply(self, kind: int, number: int, index: int, location: int, extra: bytes) -> SessionState:
        state = self._state(number)
        match kind:
            case Kind.OPERATION:
                self._operation(state, index, location)
            case Kind.SNAPSHOT:
                self._snapshot(state, index, location)
            case Kind.SESSION:
                state = self._born(state, location, extra)
            case Kind.KEYRING:
                self._kill(state.ring)
                self.handles.remove(state.keys, state.row)
                state.ring, state.keys = location, _keys_in(extra)
                if state.kept:
                    self.handles.add(state.keys, state.row)
                if location == HIT:
                    self.torn[number] = extra
                else:
                    self.torn.pop(number, None)
        return state

    def _state(self, number: int) -> SessionState:
        """The state of a session, to be changed."""
        known = number in self.states
        state = self.states.edit(number)
        if not known:
            state.row = self.handles.enter(number)
        return state

    def _operation(self, state: SessionState, index: int, location: int) -> None:
        at, operations = index - state.first, state.operations
        if at < 0:
            self._kill(location)
            return
        if at >= len(operations):
            operations.extend([MISSING] * (at - len(operations)))
            operations.append(location)
        else:
            state.grown -= self._size(operations[at])
            self._kill(operations[at])
            operations[at] = location
        state.grown += self._size(location)

    def _snapshot(self, state: SessionState, index: int, location: int) -> None:
        behind = index + 1 - state.first
        if behind <= 0:
            self._kill(location)
            return
        for gone in state.operations[:behind]:
            self._kill(gone)
        state.operations = array("Q", [location]) + state.operations[behind:]
        state.first, state.snapshot = index, True
        state.base = self._size(location)
        state.grown = sum(map(self._size, state.operations[1:]))
        self._unlink(state)

    def _unlink(self, state: SessionState) -> None:
        """Note that this fork does not need the operations of the session that it was forked from."""
        if state.origin is not None and state.origin[0] in self.states:
            self.states.edit(state.origin[0]).forks.discard(state.number)

    def _born(self, state: SessionState, location: int, extra: bytes) -> SessionState:
        if not state.kept:  # the number is another session's now
            for gone in state.locations():
                self._kill(gone)
            state = SessionState(state.number, row=state.row, forks=state.forks)
            self.states.put(state)
        self._kill(state.record)
        state.record = location
        if extra:
            state.salt, state.origin, state.deleted, first = told_in(extra)
            if state.origin is not None:
                origin = state.origin[0]
                if first is None:  # an earlier version wrote it
                    first = self.trees.get(origin, origin)
                if origin in self.states and not state.snapshot:
                    self.states.edit(origin).forks.add(state.number)
            if first:
                self._leave_tree(state.number)
                self.trees[state.number] = first
                self._members.setdefault(first, set()).add(state.number)
        return state

    def _leave_tree(self, number: int) -> None:
        if (first := self.trees.pop(number, None)) is not None:
            self._members[first].discard(number)
            if not self._members[first]:
                del self._members[first]

    def _kill(self, location: int) -> None:
        if location not in (MISSING, HIT):
            self._died(location)

    def _end(self, state: SessionState) -> None:
        """Mark a session as forgotten: its handles open nothing any more, and its keyring is not needed."""
        self.handles.remove(state.keys, state.row)
        self.torn.pop(state.number, None)
        state.ring, state.keys, state.kept = MISSING, b"", False

    def _erase(self, number: int) -> list[SessionState]:
        """Remove a forgotten session from the index if no fork needs it, and then likewise the session that it
        was forked from, and so on. Returns those removed."""
        erased: list[SessionState] = []
        # No recursion: a chain of forks may be longer than the stack is deep.
        while number in self.states:
            state = self.states[number]
            if state.kept or state.forks:
                break
            for location in state.locations():
                self._kill(location)
            self.handles.leave(state.row)
            del self.states[number]
            self._leave_tree(number)
            erased.append(state)
            if state.origin is None:
                break
            self._unlink(state)
            number = state.origin[0]
        return erased

    def load(self, parts: list[LoadedLog], loaded: Callable[[SessionState], None]) -> list[int]:
        """Build the index from the records of all logs, at the start. Empties the list ``parts``, to save
        memory. ``loaded`` is called with the state of each session, also of those that are not needed any more.
        Returns the numbers of the sessions that a client has deleted; those that a fork needs are in the index
        still."""
        entries = np.concatenate([np.empty(0, ENTRY), *(part.entries for part in parts)])
        locations = np.concatenate([np.empty(0, "<u8"), *(part.locations for part in parts)])
        listed = [extra for part in parts for extra in _in_order(part)]
        extras = dict(zip(np.flatnonzero(entries["extra"]).tolist(), listed, strict=True))
        del listed
        parts.clear()  # there may be millions: do not keep them twice
        order = np.lexsort((entries["sequence"], entries["session"], entries["high"]))
        order = order[kinds_of(entries)[order] != Kind.START]
        if len(order):
            self._fill(entries, locations, extras, order, loaded)
        del entries, locations, extras, order
        deleted = []
        for number in [number for number in self.states if not self.states.keeps(number)]:
            deleted += [state.number for state in self._erase(number) if state.deleted]
            if number in self.states and self.states[number].deleted:
                deleted.append(number)
            self.states.rest()
        self._struck &= self.states.keys()
        return deleted

    def _fill(
        self,
        entries: Any,
        locations: Any,
        extras: dict[int, bytes],
        order: Any,
        loaded: Callable[[SessionState], None],
    ) -> None:
        words = entries["word"][order]
        kinds, indexes = words >> 8 & 0xFF, words >> 16
        low, high = entries["session"][order], entries["high"][order]
        same = np.zeros(len(order), bool)
        same[1:] = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
        located, sequences, times = locations[order], entries["sequence"][order], entries["time"][order]
        # A record may be in two logs: its group was written again after a failed sync, or its log was merged.
        again = np.zeros(len(order), bool)
        again[1:] = (sequences[1:] == sequences[:-1]) & same[1:]
        joined = np.zeros(len(order), bool)
        joined[1:] = same[1:] & (kinds[1:] == Kind.OPERATION)
        joined[1:] &= (kinds[:-1] == Kind.OPERATION) & (indexes[1:] == indexes[:-1] + 1)
        joined[1:] &= ~again[1:] & ~again[:-1]
        begins = np.flatnonzero(~joined)
        ends = np.append(begins[1:], len(order))
        columns = [column[begins] for column in (kinds, indexes, located, order, again)]
        columns += [begins, ends, sequences[ends - 1], times[ends - 1], words[begins] & 0xFF]
        removes = np.flatnonzero((kinds == Kind.OPERATION) & (words & ERASED != 0))
        removers = sessions_of(entries[order[removes]])
        self._removals.update(zip(removers, indexes[removes].tolist(), strict=True))
        numbers = sessions_of(entries[order[begins]])
        runs = zip(numbers, *(column.tolist() for column in columns), strict=True)
        for begun, records in groupby(runs, itemgetter(0)):
            for number, kind, index, location, row, repeated, begin, end, last, moment, flags in records:
                if repeated and location == HIT:
                    continue  # its other copy is whole, or as damaged
                if kind == Kind.DROP:
                    state = self._state(number)
                    self._end(state)
                    state.deleted |= flags & ERASED != 0
                    continue
                if kind == Kind.OPERATION:
                    state = self._run(number, index, located[begin:end])
                else:
                    state = self._apply(kind, number, index, location, extras.get(row, b""))
                if kind != Kind.KEYRING:
                    state.last, state.used = last, moment
            state = self.states.edit(begun)
            loaded(state)
            lacks = state.record == MISSING or HIT in (state.record, state.ring)
            if state.origin is not None and not state.snapshot:
                lacks = lacks or state.origin[0] not in self.states
            if lacks or HIT in state.operations or MISSING in state.operations:
                self._struck.add(begun)
            self.states.rest()

    def removals(self) -> Iterator[tuple[int, int, bool]]:
        """Call once, after `load`: the number of each session of which the logs have an operation that removed
        items from it, the index of the last one, and whether a snapshot has replaced that."""
        found, self._removals = self._removals, {}
        for number, index in found.items():
            if number in self.states:
                yield number, index, self.location(number, Kind.OPERATION, index) == MISSING

    def _run(self, number: int, index: int, locations: Any) -> SessionState:
        state = self._state(number)
        if index == state.count:
            state.operations.frombytes(locations.tobytes())
            state.grown += int(self.bytes_at(locations).sum())
            return state
        for at, location in enumerate(locations.tolist(), index):
            self._operation(state, at, location)
        return state

    def bytes_at(self, locations: Any) -> Any:
        """How many bytes the record at each of ``locations`` takes, as an array; 0 for a missing or damaged
        one."""
        sizes = bytes_at(locations)
        sizes[locations >> SLOT_SHIFT == 0] = 0
        for at in np.flatnonzero(sizes >= GIANT << 3).tolist():  # the location does not tell: the record does
            sizes[at] = self._size(int(locations[at]))
        return sizes

    def outlasts(self, number: int) -> bool:
        """Whether a session has operations that some of the forks which need it do not have."""
        state = self.states[number]
        origins = (self.states[one].origin for one in state.forks)
        return any(origin is not None and origin[1] < state.count for origin in origins)

    def descendants(self, *numbers: int) -> set[int]:
        """The forks that need the operations of these sessions, the forks that need theirs, and so on."""
        found: set[int] = set()
        waiting = list(numbers)
        while waiting:
            if (state := self.states.get(waiting.pop())) is not None:
                fresh = state.forks - found
                found |= fresh
                waiting += fresh
        return found & self.states.keys()

    def fork_tree(self, number: int) -> list[int]:
        """The numbers of all kept sessions of this one's fork tree."""
        first = self.trees.get(number, number)
        found = {first, number, *self._members.get(first, ())}
        return sorted(filter(self.states.keeps, found))

    def _known(self, number: int) -> SessionState:
        state = self.states.get(number)
        if state is None or state.record == MISSING:
            raise RecordDamaged(f"the record of session {number} is missing")
        return state

    def needed(self, number: int) -> Iterator[tuple[SessionState, int, int]]:
        """All operations that make a session's history, those inherited from the sessions that it was forked
        from first: for each the session that has it, its index there, and its location. Raises
        ``RecordDamaged`` if some are not in the index."""
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
        locations = state.operations[: until - state.first]
        return ((state, index, location) for index, location in enumerate(locations, state.first))

    def damaged(self) -> list[int]:
        """The numbers, sorted, of the kept sessions with a record that was damaged or missing at the start, and
        of their forks that need such an operation."""
        found = {number for number in self._struck if self.states.keeps(number)}
        forks = self.descendants(*self._struck)
        found |= {child for child in forks if self.states[child].kept and not self._whole(child)}
        return sorted(found)

    def _whole(self, number: int) -> bool:
        try:
            return all(location not in (HIT, MISSING) for _, _, location in self.needed(number))
        except RecordDamaged:
            return False

    def hit(self, number: int, kind: int, index: int) -> None:
        """Called when a session's record of this kind and index was found damaged. Does nothing if the session
        is not in the index."""
        if number in self.states:
            state = self.states.edit(number)
            self._set(state, kind, index, HIT)

    def moved(self, number: int, records: Iterable[Moved]) -> Iterator[int]:
        """Called when records of a session were copied: those that still count have their new locations now.
        Yields these."""
        if number not in self.states:
            return
        state = self.states.edit(number)
        for kind, index, source, target in records:
            if self._at(state, kind, index) == source:
                self._set(state, kind, index, target)
                yield target

    @staticmethod
    def _set(state: SessionState, kind: int, index: int, location: int) -> None:
        match kind:
            case Kind.SESSION:
                state.record = location
            case Kind.KEYRING:
                state.ring = location
            case _ if 0 <= index - state.first < len(state.operations):
                state.operations[index - state.first] = location

    def location(self, number: int, kind: int, index: int) -> int:
        """The location of a session's valid record of this kind and index: `HIT` if it is damaged, `MISSING` if
        there is none."""
        state = self.states.get(number)
        return MISSING if state is None else self._at(state, kind, index)

    @staticmethod
    def _at(state: SessionState, kind: int, index: int) -> int:
        match kind:
            case Kind.SESSION:
                return state.record
            case Kind.KEYRING:
                return state.ring
            case Kind.OPERATION | Kind.SNAPSHOT if kind == state.kind_at(index):
                at = index - state.first
                return state.operations[at] if 0 <= at < len(state.operations) else MISSING
        return MISSING


def _keys_in(digests: bytes) -> bytes:
    """The keys of these digests, which are joined."""
    return b"".join(key_of(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES))


def _in_order(part: LoadedLog) -> Iterator[bytes]:
    """Yield the bytes that the log's index stores of some records (`records.extra_of`), in the order of the
    log's entries."""
    for row in np.flatnonzero(part.entries["extra"]).tolist():
        yield part.extras.get(int(part.entries["offset"][row]), b"")
