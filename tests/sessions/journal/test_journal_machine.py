"""The store against a plain dict, on a disk that fails or dies at any call, with reopenings in between."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace as replaced

from holdfast.sessions.conversation.items import Message, Preamble
from holdfast.sessions.errors import RecordDamaged, StorageUnavailable
from holdfast.sessions.journal import store as store_module
from holdfast.sessions.journal.records import (
    AnyOperation,
    Emitted,
    EventReceived,
    Inserted,
    Keyring,
    Origin,
    SessionSnapshot,
    append,
    drop,
    put,
)
from holdfast.sessions.journal.segment import Fresh
from holdfast.sessions.journal.store import JournalStore

from .bad_disks import BadDisk, Crash, killed
from .journal_stage import MODEL, SMALL, birth, folder, record_of

TEXTS = st.text(max_size=20)
OPERATIONS: st.SearchStrategy[AnyOperation] = st.one_of(
    TEXTS.map(lambda text: EventReceived(event=text)),
    TEXTS.map(lambda text: Inserted(item=Message(id="item_1", role="user", text=text))),
    st.binary(max_size=40).map(lambda ids: Emitted(response="resp", ids=ids)),
    TEXTS.map(lambda text: Inserted(item=Message(id="item_1", role="user", text=text * 300))),
)
SHARES = st.sampled_from([0.0, 0.3, 0.7, 1.0])
NUMBERS = replace(SMALL, segment_bytes=16 << 10)


@dataclass
class Shadow:
    """A session as it must be. ``written``: how many operations it has had of its own."""

    operations: list[AnyOperation] = field(default_factory=list)
    handles: tuple[bytes, ...] = ()
    written: int = 0
    origin: int = 0
    inherited: int = 0


class StoreMachine(RuleBasedStateMachine):
    """Groups of changes to a few sessions; now and then a call fails, or the process dies in one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(store_module, "DEAD_SHARE", -1.0)  # any log is rewritten
        patch.setattr(store_module, "MOST_VICTIMS", 3)
        self.path = self.stack.enter_context(folder())
        self.disk = BadDisk()
        self.store = self.opened()
        self.shadow: dict[int, Shadow] = {}
        self.gone: set[bytes] = set()
        self.next = 1
        self.blind = False  # an index was lost: what a write that failed has left may be damage

    def opened(self) -> JournalStore:
        return JournalStore(self.path, MODEL, NUMBERS, disk=self.disk)

    def teardown(self) -> None:
        self.disk.disarm()
        self.store.close()
        self.stack.close()

    # --- what may be written --------------------------------------------------------------------------------

    def begun(self, data: st.DataObject) -> tuple[list[Fresh], dict[int, Shadow]]:
        operations = data.draw(st.lists(OPERATIONS, max_size=4))
        group: list[Fresh] = []
        after = dict(self.shadow)
        for number in range(self.next, self.next + data.draw(st.integers(1, 3))):
            group += birth(number)
            group += [append(number, index, op) for index, op in enumerate(operations)]
            after[number] = Shadow(list(operations), (bytes([number % 256]) * 32,), len(operations))
        self.next = max(after) + 1
        return group, after

    def forked(self, data: st.DataObject) -> tuple[list[Fresh], dict[int, Shadow]]:
        origin = self.one_of_them(data)
        past, number = self.shadow[origin], self.next
        self.next += 1
        record = replaced(record_of(number), origin=Origin(session=origin, operations=past.written))
        group = [put(number, record), *birth(number)[1:]]
        handles = (bytes([number % 256]) * 32,)
        child = Shadow(list(past.operations), handles, 0, origin, len(past.operations))
        return group, {**self.shadow, number: child}

    def grown(self, data: st.DataObject) -> tuple[list[Fresh], dict[int, Shadow]]:
        number = self.one_of_them(data)
        operations = data.draw(st.lists(OPERATIONS, min_size=1, max_size=6))
        was = self.shadow[number]
        group: list[Fresh] = [append(number, was.written + at, op) for at, op in enumerate(operations)]
        written = was.written + len(operations)
        now = Shadow([*was.operations, *operations], was.handles, written, was.origin, was.inherited)
        return group, {**self.shadow, number: now}

    def turned(self, data: st.DataObject) -> tuple[list[Fresh], dict[int, Shadow]]:
        number, digest = self.one_of_them(data), b"h" + data.draw(st.binary(min_size=31, max_size=31))
        was = self.shadow[number]
        if digest in self.handles() | self.gone:
            return [], self.shadow
        kept = was.handles[0]
        group = [put(number, Keyring(fresh=(digest,), used=kept))]
        now = Shadow(was.operations, (digest, kept), was.written, was.origin, was.inherited)
        return group, {**self.shadow, number: now}

    def forgotten(self, data: st.DataObject) -> tuple[list[Fresh], dict[int, Shadow]]:
        number = self.one_of_them(data)
        return [drop(number)], {key: value for key, value in self.shadow.items() if key != number}

    def condensed(self, data: st.DataObject) -> tuple[list[Fresh], dict[int, Shadow]]:
        """The whole session as one record, as long as no fork follows on it."""
        number = self.one_of_them(data)
        was = self.shadow[number]
        if not was.written or self.store.sessions.states[number].forks:
            return [], self.shadow
        snapshot = SessionSnapshot(preamble=Preamble(instructions=f"{number}"), rendered=Preamble())
        now = Shadow([snapshot], was.handles, was.written)
        return [append(number, was.written - 1, snapshot)], {**self.shadow, number: now}

    # --- how it goes ----------------------------------------------------------------------------------------

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        group, after = self.drawn(data)
        self.store.write(group)
        self.becomes(after)

    @rule(data=st.data(), at=st.integers(1, 8), share=SHARES)
    def die_in_a_commit(self, data: st.DataObject, at: int, share: float) -> None:
        group, after = self.drawn(data)
        self.disk.arm(at, share=share)
        try:
            self.store.write(group)
        except Crash:
            self.die()
            self.takes_either(after)
        else:
            self.disk.disarm()
            self.becomes(after)

    @rule(
        data=st.data(),
        at=st.integers(1, 6),
        share=SHARES,
        error=st.sampled_from([errno.ENOSPC, errno.EIO]),
        times=st.integers(1, 4),
        restart=st.booleans(),
    )
    def fail_in_a_commit(
        self, data: st.DataObject, at: int, share: float, error: int, times: int, restart: bool
    ) -> None:
        """It is tried again until it holds, as the journal does."""
        group, after = self.drawn(data)
        self.disk.arm(at, error, times, share)
        failed = True
        while failed:
            try:
                self.store.write(group)
                failed = False
            except StorageUnavailable:
                self.holds_what_was_committed()
                if restart:
                    self.die()
                    self.takes_either(after)
                    return
        self.disk.disarm()
        self.becomes(after)

    @rule()
    def roll(self) -> None:
        self.store.logs.roll()

    @rule(steps=st.integers(1, 6))
    def merge(self, steps: int) -> None:
        """Some slices; what is written meanwhile moves on."""
        for _ in range(steps):
            self.store.merge()

    @rule(at=st.integers(1, 30), share=SHARES)
    def die_in_a_merge(self, at: int, share: float) -> None:
        self.disk.arm(at, share=share)
        try:
            for _ in range(20):
                self.store.merge()
        except Crash:
            self.die()
        self.disk.disarm()

    @rule(at=st.integers(1, 30), error=st.sampled_from([errno.ENOSPC, errno.EIO]), share=SHARES)
    def fail_in_a_merge(self, at: int, error: int, share: float) -> None:
        self.disk.arm(at, error, 2, share)
        for _ in range(10):
            self.store.merge()
        self.disk.disarm()

    @rule()
    def remove_what_is_dead(self) -> None:
        self.store.remove_dead()

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        if clean:
            self.store.close()
        else:
            killed(self.store)
        self.store = self.opened()

    @rule(data=st.data())
    def lose_an_index(self, data: st.DataObject) -> None:
        """A log is read instead."""
        self.store.close()
        self.blind = True
        found = sorted(self.path.glob("journal/*.index"))
        if found:
            data.draw(st.sampled_from(found)).unlink()
        self.store = self.opened()

    @invariant()
    def holds_what_was_committed(self) -> None:
        assert not self.store.damaged()
        assert self.blind or not self.store.logs.findings.lost
        for number, wanted in self.shadow.items():
            stored = self.store.session(number)
            assert list(stored.operations) == wanted.operations and stored.written == wanted.written
            assert stored.keyring.digests() == wanted.handles
            assert all(self.store.handle(digest)[0] == number for digest in wanted.handles)
        for number in set(range(1, self.next)) - set(self.shadow):
            with pytest.raises(RecordDamaged, match="missing"):
                self.store.session(number)
        assert all(self.store.handle(digest) is None for digest in self.gone - self.handles())
        for log in self.store.logs.logs.values():
            assert 0 <= log.live <= log.end

    # --- inside ---------------------------------------------------------------------------------------------

    def drawn(self, data: st.DataObject) -> tuple[list[Fresh], dict[int, Shadow]]:
        kinds = [self.begun]
        if self.shadow:
            kinds += [self.grown, self.grown, self.turned, self.forgotten, self.forked, self.condensed]
        return data.draw(st.sampled_from(kinds))(data)

    def one_of_them(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.shadow)))

    def becomes(self, after: dict[int, Shadow]) -> None:
        before = self.handles()
        self.shadow = after
        self.gone |= before - self.handles()

    def die(self) -> None:
        killed(self.store)
        self.disk.disarm()
        self.store = self.opened()

    def takes_either(self, after: dict[int, Shadow]) -> None:
        """What was not acknowledged may be there, whole, or not."""
        numbers = {
            number for number in {*self.shadow, *after} if self.shadow.get(number) != after.get(number)
        }
        if not numbers:
            return
        found = {number: self.seen(number) for number in numbers}
        if found == {number: seen_of(after.get(number)) for number in numbers}:
            self.becomes(after)
        else:
            assert found == {number: seen_of(self.shadow.get(number)) for number in numbers}

    def seen(self, number: int) -> object:
        try:
            stored = self.store.session(number)
        except RecordDamaged:
            return None
        return list(stored.operations), stored.keyring.digests()

    def handles(self) -> set[bytes]:
        return {digest for shadow in self.shadow.values() for digest in shadow.handles}


def seen_of(shadow: Shadow | None) -> object:
    return None if shadow is None else (shadow.operations, shadow.handles)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)
