"""The index of many sessions: exact, whatever is kept of it as bytes, and small."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace as replaced

from holdfast.sessions.conversation.items import Message
from holdfast.sessions.journal.records import Begun, Emitted, Ended, Inserted, Keyring, Origin, append, put
from holdfast.sessions.journal.segment import Fresh
from holdfast.sessions.journal.session_states import (
    KEY_BYTES,
    PACKED,
    DigestTable,
    SessionState,
    SessionStates,
    key_of,
)
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.turn.events import EndReason, ReplyStatus

from .journal_stage import MODEL, SMALL, folder, record_of

WORDS = st.integers(0, (1 << 64) - 1)
NUMBERS = st.integers(0, (1 << 128) - 1)
MOST_BYTES = 1024


@given(
    number=NUMBERS,
    where=st.lists(WORDS, max_size=2 * PACKED),
    fields=st.tuples(WORDS, WORDS, WORDS, WORDS, WORDS, WORDS, st.integers(0, 1 << 31)),
    flags=st.tuples(st.booleans(), st.booleans()),
    origin=st.none() | st.tuples(NUMBERS, st.integers(0, 1 << 31)),
    forks=st.sets(NUMBERS, max_size=4),
    salt=st.binary(max_size=20),
    keys=st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=17),
)
def test_a_state_that_rested_is_what_it_was(number, where, fields, flags, origin, forks, salt, keys) -> None:  # type: ignore[no-untyped-def]
    states = SessionStates()
    for one in (number, 1):
        state = states.edit(one)
        state.operations.extend(where)
        state.record, state.ring, state.base, state.grown, state.used, state.last, state.first = fields
        state.kept, state.snapshot = flags
        state.origin, state.forks, state.salt, state.keys, state.row = (
            origin,
            set(forks),
            salt,
            b"".join(keys),
            7,
        )
    told = seen(state)
    assert told[1:] == seen(states[number])[1:]
    states.rest(0)
    assert (
        seen(states[1]) == told
        and states.keeps(number) == flags[0]
        and states.keys_of(number) == b"".join(keys)
    )
    listed = [location for part in states.all_locations() for location in part.tolist()]
    assert listed == [*fields[:2], *where] * len(states)


def seen(state: SessionState) -> list[object]:
    return [getattr(state, name) for name in SessionState.__slots__]


class Digests(RuleBasedStateMachine):
    """The table of digests against a dict. Of the digests from `ALIKE` on two have one tag, which never
    happens; they lead to some session that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.states = SessionStates()
        self.table = DigestTable(self.states)
        self.known: dict[bytes, int] = {}
        self.held: dict[int, list[bytes]] = {}
        self.next = 1

    @rule(rings=st.lists(st.lists(st.integers(0, 11), max_size=4), min_size=1, max_size=3))
    def begin(self, rings: list[list[int]]) -> None:
        number = self.next << 64 | 5
        self.next += 1
        self.states.edit(number).row = self.table.enter(number)
        self.held[number] = []
        for ring in rings:
            self.turn(number, ring)

    @rule(data=st.data(), ring=st.lists(st.integers(0, 11), max_size=6))
    def change(self, data: st.DataObject, ring: list[int]) -> None:
        if self.held:
            self.turn(data.draw(st.sampled_from(sorted(self.held))), ring)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.held:
            number = data.draw(st.sampled_from(sorted(self.held)))
            self.turn(number, [])
            self.table.leave(self.states[number].row)
            del self.states[number], self.held[number]

    @rule(most=st.integers(0, 3))
    def rest(self, most: int) -> None:
        self.states.rest(most)

    @invariant()
    def each_digest_leads_where_it_was_given_last(self) -> None:
        for name in range(12):
            digest, found = digest_of(name), self.table.get(digest_of(name))
            if name < ALIKE:
                assert found == self.known.get(digest)
            else:
                assert found is None or digest in self.held[found]

    def turn(self, number: int, ring: list[int]) -> None:
        state = self.states.edit(number)
        digests = [digest_of(name) for name in ring]
        self.table.remove(state.keys, state.row)
        state.keys = b"".join(map(key_of, digests))
        self.table.add(state.keys, state.row)
        for digest in self.held[number]:
            if self.known.get(digest) == number:
                del self.known[digest]
        self.held[number] = digests
        self.known.update((digest, number) for digest in digests)


ALIKE = 8


def digest_of(name: int) -> bytes:
    """All of them in one shard."""
    tag = name if name < ALIKE else name // 2 * 2
    return bytes(2) + bytes([name]) * 26 + tag.to_bytes(4, "little")


TestDigests = Digests.TestCase
TestDigests.settings = settings(stateful_step_count=30)


def chat(number: int, turns: int = 4) -> list[list[Fresh]]:
    """A conversation of so many turns as a server writes it: by a client that sends the whole conversation each
    time and gives it a key. Each turn's response is stored, too, as a fork of the one before."""
    groups = [[put(number, record_of(number))]]
    for turn in range(turns):
        response = f"resp_{number:032x}{turn}"
        operations = (
            Inserted(item=Message(id=f"item_{number:032x}{turn}", role="user", text="Hello there. " * 4)),
            Begun(response=response, request={"temperature": 0.0}),
            Emitted(response=response, ids=bytes(80)),
            Ended(response=response, status=ReplyStatus.COMPLETED, reason=EndReason.STOP, kept=True),
        )
        ring = Keyring(
            fresh=(digest(number, "handle"),),
            conversations=tuple(digest(number, f"turn {at}") for at in range(turn + 1)),
            names=(digest(number, "key"), *(digest(number, f"name {at}") for at in range(turn + 1)))[-4:],
        )
        group = [append(number, 4 * turn + at, operation) for at, operation in enumerate(operations)]
        stored = number + (turn + 1 << 64)
        origin = Origin.of(stored - (1 << 64), 1) if turn else None
        named = (digest(stored, "object"),) * 2
        groups.append([*group, put(number, ring)])
        groups.append(
            [
                put(stored, replaced(record_of(stored), origin=origin)),
                put(stored, Keyring(fresh=(), conversations=named)),
                append(stored, 0, Inserted(item=Message(id="item", role="user", text="Hello there." * 20))),
            ]
        )
    return groups


def digest(number: int, what: str) -> bytes:
    return blake2b(f"{number} {what}".encode(), digest_size=32).digest()


def test_a_stored_session_takes_less_than_a_kibibyte_of_memory() -> None:
    """Measured between two sizes, while the server writes them and after the next one has opened the store.
    Each conversation is a session and four stored objects."""
    turns, sizes = 4, (150, 600)
    with folder() as path:
        store = JournalStore(path, MODEL, replace(SMALL, segment_bytes=1 << 20, max_bytes=1 << 28))
        taken = []
        written = 0
        tracemalloc.start()
        try:
            for size in sizes:
                while written < size:
                    written += 1
                    for group in chat((written * 8) << 64 | 5, turns):
                        store.write(group)
                gc.collect()
                taken.append(tracemalloc.get_traced_memory()[0])
            sessions = (sizes[1] - sizes[0]) * (turns + 1)
            assert len(store.sessions.states) == sizes[1] * (turns + 1)
            assert (taken[1] - taken[0]) / sessions < MOST_BYTES
            store.close()
            del store
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            store = JournalStore(path, MODEL, SMALL)
            gc.collect()
            opened = (tracemalloc.get_traced_memory()[0] - before) / (sizes[1] * (turns + 1))
            assert opened < MOST_BYTES, "also with what it takes for itself"
        finally:
            tracemalloc.stop()
        for number in (8 << 64 | 5, 8 * sizes[1] << 64 | 5):
            assert store.handle(digest(number, "handle")) == (number, b"me")
            stored = number + (turns << 64)
            assert store.handle(digest(stored, "object")) == (stored, b"me")
            assert len(store.session(stored).operations) == turns
        store.close()
