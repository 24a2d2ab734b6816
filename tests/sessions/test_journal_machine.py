"""The store against a plain dict, with crashes in mid-commit and reopenings in between."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from journal_stage import MODEL, SMALL, birth, folder

from holdfast.sessions.errors import RecordDamaged
from holdfast.sessions.items import Message
from holdfast.sessions.journal import store as journal_store
from holdfast.sessions.journal.changes import Append, Change, Drop, Put
from holdfast.sessions.journal.records import AnyOperation, HandleRecord, Heard, Inserted, Keyring, Said
from holdfast.sessions.journal.store import JournalStore, Table, key_of

TEXTS = st.text(max_size=20)
OPERATIONS: st.SearchStrategy[AnyOperation] = st.one_of(
    TEXTS.map(lambda text: Heard(event=text)),
    TEXTS.map(lambda text: Inserted(item=Message(id="item_1", role="user", text=text))),
    st.binary(max_size=40).map(lambda ids: Said(response="resp", ids=ids)),
    TEXTS.map(lambda text: Inserted(item=Message(id="item_1", role="user", text=text * 3000))),
)


class Crash(Exception):
    """The process dies here."""


@dataclass
class Shadow:
    """A session as it must be."""

    operations: list[AnyOperation] = field(default_factory=list)
    handles: tuple[bytes, ...] = ()


class StoreMachine(RuleBasedStateMachine):
    """Groups of changes to a few sessions; now and then the process dies in one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.path = self.stack.enter_context(folder())
        self.store = JournalStore.open(self.path, MODEL, SMALL)
        self.shadow: dict[int, Shadow] = {}
        self.gone: set[bytes] = set()
        self.next = 1

    def teardown(self) -> None:
        self.store.close()
        self.stack.close()

    @rule(count=st.integers(1, 3), operations=st.lists(OPERATIONS, max_size=4))
    def begin(self, count: int, operations: list[AnyOperation]) -> None:
        group: list[Change] = []
        for number in range(self.next, self.next + count):
            group += birth(number)
            group += [Append(number, index, op) for index, op in enumerate(operations)]
            self.shadow[number] = Shadow(list(operations), (bytes([number % 256]) * 32,))
        self.next += count
        self.store.write(group)

    @rule(data=st.data(), operations=st.lists(OPERATIONS, min_size=1, max_size=6))
    def append(self, data: st.DataObject, operations: list[AnyOperation]) -> None:
        if self.shadow:
            number = data.draw(st.sampled_from(sorted(self.shadow)))
            self.store.write(self._appended(number, operations))
            self.shadow[number].operations += operations

    @rule(data=st.data(), digest=st.binary(min_size=31, max_size=31))
    def turn_handle(self, data: st.DataObject, digest: bytes) -> None:
        digest = b"h" + digest  # not one of a birth
        if self.shadow and digest not in self._handles():
            number = data.draw(st.sampled_from(sorted(self.shadow)))
            kept, *dropped = self.shadow[number].handles
            ring = Keyring(fresh=(digest,), used=kept)
            group: list[Change] = [Put(Table.HANDLES, old, None) for old in dropped]
            group.append(Put(Table.HANDLES, digest, HandleRecord(session=number, owner=b"me")))
            self.store.write([*group, Put(Table.KEYRINGS, key_of(number), ring)])
            self.gone = (self.gone | set(dropped)) - {digest}
            self.shadow[number].handles = (digest, kept)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.shadow:
            number = data.draw(st.sampled_from(sorted(self.shadow)))
            self.store.write([Drop(number)])
            self.gone |= set(self.shadow.pop(number).handles)

    @rule(data=st.data(), operations=st.lists(OPERATIONS, min_size=2, max_size=6), at=st.integers(0, 5))
    def crash_in_a_commit(self, data: st.DataObject, operations: list[AnyOperation], at: int) -> None:
        if not self.shadow:
            return
        group = self._appended(data.draw(st.sampled_from(sorted(self.shadow))), operations)
        sealed, whole = 0, journal_store.seal

        def dying(key: bytes, record: object) -> bytes:
            nonlocal sealed
            sealed += 1
            if sealed > min(at, len(group) - 1):
                raise Crash
            return whole(key, record)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal_store, "seal", dying)
            with pytest.raises(Crash):
                self.store.write(group)
        self.reopen()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = JournalStore.open(self.path, MODEL, SMALL)

    @invariant()
    def holds_what_was_committed(self) -> None:
        for number, wanted in self.shadow.items():
            stored = self.store.session(number)
            assert list(stored.operations) == wanted.operations
            ring = stored.keyring
            assert ring.digests() == wanted.handles
            assert all(self.store.handle(digest).session == number for digest in wanted.handles)
        for number in set(range(1, self.next)) - set(self.shadow):
            with pytest.raises(RecordDamaged, match="missing"):
                self.store.session(number)
        assert all(self.store.handle(digest) is None for digest in self.gone - self._handles())

    def _appended(self, number: int, operations: list[AnyOperation]) -> list[Change]:
        at = len(self.shadow[number].operations)
        return [Append(number, at + index, op) for index, op in enumerate(operations)]

    def _handles(self) -> set[bytes]:
        return {digest for shadow in self.shadow.values() for digest in shadow.handles}


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=30)
