"""Merges beside everything else: what is needed stays and what was forgotten stays forgotten, whatever
fails and wherever the process dies."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from holdfast.sessions.conversation.items import Preamble
from holdfast.sessions.errors import StorageUnavailable, StoreUnusable
from holdfast.sessions.journal import admin, merge
from holdfast.sessions.journal import store as store_module
from holdfast.sessions.journal.folder import Disk
from holdfast.sessions.journal.logs import Log, LogFolder
from holdfast.sessions.journal.records import (
    AnyOperation,
    EventReceived,
    Origin,
    SessionSnapshot,
    append,
    drop,
)
from holdfast.sessions.journal.segment import Fresh, slot_of
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.settings import JournalShare
from holdfast.tests.stored_files import bytes_below

from .bad_disks import ERRORS, BadDisk, Crash, killed
from .journal_stage import MODEL, SMALL, birth, folder

TIGHT = replace(SMALL, max_bytes=1 << 20, segment_bytes=1 << 14, snapshot_operations=5)


WIDE = replace(SMALL, segment_bytes=1 << 20)


def opened(path: Path, disk: Disk | None = None) -> JournalStore:
    shares = {b"": JournalShare(sessions=10**6, bytes=1 << 40)}
    return JournalStore(path, MODEL, replace(TIGHT, tenants=shares), disk=disk)


def said(number: int, index: int, text: str) -> Fresh:
    return append(number, index, EventReceived(event=text))


def with_text(number: int, count: int, **changes: Origin) -> list[Fresh]:
    return [*birth(number, **changes), said(number, 0, f"<{number}>" * (count // 4))]


def sealed(store: JournalStore) -> list[Log]:
    return [one for one in store.logs.logs.values() if one is not store.logs.active]


def merge_wanted(store: JournalStore) -> None:
    while store.wants_merge:
        store.merge()


def merge_once(store: JournalStore) -> None:
    """Once, also while it rests."""
    while store.merge():
        pass


def kept(store: JournalStore) -> set[int]:
    return {number for number, state in store.sessions.states.items() if state.kept}


def test_a_slice_that_fails_in_any_way_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path:
        store = JournalStore(path, MODEL, WIDE)
        for number in range(1, 60):
            store.write(with_text(number, 3000))
        store.erase([number for number in range(1, 60) if number % 3])
        store.logs.roll()
        read, calls = LogFolder.read, iter(range(1000))

        def fails(self: LogFolder, location: int) -> object:
            if next(calls) == 12:
                raise MemoryError
            return read(self, location)

        with monkeypatch.context() as patch:
            patch.setattr(LogFolder, "read", fails)
            with pytest.raises(MemoryError):
                merge_wanted(store)
            assert not store.wants_merge, "it rests"
            merge_once(store)
        for _ in range(2):
            for number in range(3, 60, 3):
                assert store.session(number).operations
            store.close()
            store = JournalStore(path, MODEL, WIDE)
        store.close()


def test_a_drop_is_kept_with_the_records_that_an_earlier_slice_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merge, "SLICE_BYTES", 1)
    with folder() as path:
        store = opened(path)
        store.write(with_text(1, 500))
        store.write(with_text(2, 100, origin=Origin(session=1, operations=1)))
        store.write([drop(1)])  # its fork needs it
        for number in range(3, 6):
            store.write(with_text(number, 4000))
        store.erase(range(3, 6))
        store.logs.roll()
        store.write(birth(9))
        for _ in range(3):
            assert store.merge()
        store.write([drop(2)])  # the fork goes, between the slices
        merge_wanted(store)
        assert kept(store) == {9}
        store.close()
        store = opened(path)
        assert set(store.sessions.states) == {9}
        store.close()


def test_dead_logs_do_not_return_when_only_some_of_them_could_be_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "DEAD_SHARE", 0.1)
    with folder() as path:
        store = JournalStore(path, MODEL, WIDE)
        for number in range(1, 4):
            store.write(with_text(number, 3000))
        store.erase([2])
        store.logs.roll()
        store.write(with_text(50, 9000))
        merge_once(store)  # its log has a higher number than that of the next drops
        store.erase([1, 3, 50])
        store.logs.roll()
        store.write(birth(60))
        remove, calls = LogFolder.remove, iter(range(100))

        def dies(self: LogFolder, one: Log) -> None:
            if next(calls) == 1:
                raise Crash
            remove(self, one)

        with monkeypatch.context() as patch:
            patch.setattr(LogFolder, "remove", dies)
            with pytest.raises(Crash):
                merge_wanted(store)
        killed(store)
        store = JournalStore(path, MODEL, WIDE)
        assert kept(store) == {60}
        store.close()


def stubborn(patch: pytest.MonkeyPatch, name: str) -> None:
    """A disk that cannot remove a file."""
    remove = Disk.remove

    def refuses(self: Disk, path: Path) -> None:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        remove(self, path)

    patch.setattr(Disk, "remove", refuses)


def test_a_log_that_cannot_be_removed_stays_replaced_when_its_replacement_is_rewritten() -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        store = opened(path)
        store.write(with_text(1, 4000))
        store.logs.roll()
        store.write(with_text(5, 100))
        store.erase([1])
        store.logs.roll()
        store.write(birth(9))
        remove = LogFolder.remove

        def dies(self: LogFolder, one: Log) -> None:
            remove(self, one)
            raise Crash

        stubborn(patch, "00000001.log")
        with pytest.raises(StorageUnavailable, match="cannot be removed"):
            store.rewrite()
        patch.setattr(store_module, "MOST_VICTIMS", 1)
        patch.setattr(LogFolder, "remove", dies)
        with pytest.raises(Crash):  # when the replacement is rewritten, and the first log is not yet
            store.rewrite()
        assert sorted(one.number for one in sealed(store)) == [1, 5]
        assert store.remove_dead() == 0
        killed(store)
        patch.undo()
        store = opened(path)
        assert kept(store) == {5, 9} and not (path / "journal" / "00000001.log").exists()
        store.close()


def test_an_erase_that_cannot_remove_a_log_says_so() -> None:
    with folder() as path:
        store = opened(path)
        store.begin(1)
        store.write([*birth(1, salt=b"t"), said(1, 0, "secret" * 100)])
        store.write(with_text(2, 100))
        store.close()
        with pytest.MonkeyPatch.context() as patch:
            stubborn(patch, "00000001.log")
            with pytest.raises(StoreUnusable, match="cannot be removed"):
                list(admin.erase(path, admin.of_tenant(b"t")))
        list(admin.erase(path, admin.of_tenant(b"t")))
        assert b"secret" not in bytes_below(path / "journal")


class History:
    """A random history of a store, and what its sessions have to hold.

    ``unsure``: what else a session may hold after a change that failed or was cut off; None: it may be gone.
    """

    def __init__(self, path: Path, seed: int, disk: BadDisk) -> None:
        self.path, self.random, self.disk = path, Random(seed), disk
        self.sessions: dict[int, tuple[str, ...]] = {}
        self.unsure: dict[int, list[tuple[str, ...] | None]] = {}
        self.dropped: set[int] = set()
        self.next = 1
        self.store = opened(path, disk)
        self.store.begin(1)

    def live(self) -> None:
        """Change something."""
        pick, store = self.random.random(), self.store
        if pick < 0.25 or not self.sessions:
            self.born()
            return
        number = self.random.choice(list(self.sessions))
        held = self.sessions[number]
        if pick < 0.65:
            text = f"{number}.{self.random.random()}" * self.random.randrange(1, 60)
            index = store.sessions.states[number].count
            self.change(number, (*held, text), lambda: store.write([said(number, index, text)]))
        elif pick < 0.8:
            self.change(number, None, lambda: store.erase([number]))
        elif pick < 0.85:
            name = f"snapshot {self.random.random()}"
            if not store.sessions.states[number].forks:
                self.change(number, (name,), lambda: store.condense(number, snapshot_named(name)))
        else:
            for _ in range(self.random.randrange(1, 6)):
                store.merge()

    def born(self) -> None:
        """Begin a session, maybe as a fork."""
        number, self.next = self.next, self.next + 1
        origin, base = None, ()
        if self.sessions and self.random.random() < 0.5:
            parent = self.random.choice(list(self.sessions))
            origin = Origin(session=parent, operations=self.store.sessions.states[parent].count)
            base = self.sessions[parent]
        text = f"<{number}>" * 100
        group = [*birth(number, origin=origin), said(number, 0, text)]
        self.change(number, (*base, text), lambda: self.store.write(group))

    def change(self, number: int, holds: tuple[str, ...] | None, how: Callable[[], object]) -> None:
        """Do it, and note what the session holds then."""
        try:
            how()
        except (StorageUnavailable, Crash):
            self.unsure.setdefault(number, []).append(holds)
            if number not in self.sessions:
                self.unsure[number].append(None)
            raise
        self.dropped.discard(number)
        if holds is None:
            del self.sessions[number]
            self.dropped.add(number)
        else:
            self.sessions[number] = holds

    def restart(self, *, clean: bool) -> None:
        """Close the store, or kill its process, and look at what is there."""
        self.disk.disarm()
        self.store.close() if clean else killed(self.store)
        self.store = opened(self.path, self.disk)
        self.store.begin(self.store.logs.generation + 1)
        assert not self.store.damaged() and not self.store.logs.findings.lines
        found = {number: texts(self.store.session(number).operations) for number in kept(self.store)}
        for number in found.keys() | self.sessions.keys() | self.unsure.keys():
            assert found.get(number) in [self.sessions.get(number), *self.unsure.get(number, [])]
        self.sessions, self.unsure = found, {}
        for one in self.store.logs.logs.values():
            states = self.store.sessions.states.values()
            locations = [location for state in states for location in state.locations()]
            assert one.live == sum(
                self.store.logs.size(location) for location in locations if slot_of(location) == one.slot
            )


def snapshot_named(name: str) -> Callable[[Sequence[AnyOperation]], tuple[int, AnyOperation]]:
    snapshot = SessionSnapshot(preamble=Preamble(), rendered=Preamble(), config=name.encode())
    return lambda operations: (len(operations), snapshot)


def texts(operations: Sequence[AnyOperation]) -> tuple[str, ...]:
    return tuple(one.config.decode() if isinstance(one, SessionSnapshot) else one.event for one in operations)


@pytest.mark.parametrize("dies", [False, True], ids=["calls fail", "the process dies"])
@pytest.mark.parametrize("seed", range(6))
def test_a_random_history_is_there_after_each_restart(
    seed: int, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "SLICE_RECORDS", 3)
    for run in range(20):
        with folder() as path:
            disk = BadDisk()
            history = History(path, 100 * seed + run, disk)
            chance = history.random
            for _ in range(4):
                times = chance.randrange(1, 4)
                disk.arm(chance.randrange(1, 250), 0 if dies else chance.choice(ERRORS), times)
                crashed = False
                for _ in range(chance.randrange(20, 90)):
                    try:
                        history.live()
                    except StorageUnavailable:
                        pass
                    except Crash:
                        crashed = True
                        break
                history.restart(clean=not crashed and chance.random() < 0.5)
            history.store.close()
