"""What was deleted leaves the logs in time, and a full disk is left by deleting."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.sessions.conversation.items import Preamble
from holdfast.sessions.errors import StorageFull
from holdfast.sessions.journal.folder import Disk
from holdfast.sessions.journal.logs import LogFolder
from holdfast.sessions.journal.records import (
    AnyOperation,
    Deleted,
    EventReceived,
    Origin,
    SessionSnapshot,
    append,
)
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.settings import JournalSettings
from holdfast.tests.stored_files import bytes_below

from ..session_stage import ask, reciting, run
from .bad_disks import killed
from .journal_stage import MODEL, SMALL, birth, folder, registry_in, store_in, unused

AT_ONCE = replace(SMALL, erase_seconds=0.0)
LATER = replace(SMALL, erase_seconds=3600.0)
KIB = 1 << 10


def holds(path: Path, text: str) -> bool:
    return text.encode() in bytes_below(path)


def secret(number: int) -> str:
    return f"secret {number} " * 100


def filled(store: JournalStore, count: int = 20) -> None:
    for number in range(1, count + 1):
        store.write([*birth(number), append(number, 0, EventReceived(event=secret(number)))])


def tidied(store: JournalStore) -> None:
    """What the journal's thread does about once a second."""
    store.watch()
    while store.wants_merge and store.merge():
        pass


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_deleted_leaves_logs_in_which_little_is_dead(restart: bool) -> None:
    with folder() as path:
        store = JournalStore(path, MODEL, LATER if restart else AT_ONCE)
        filled(store)
        store.erase([7], deleted=True)
        if restart:
            tidied(store)
            assert holds(path, secret(7)), "nothing hurries"
            killed(store)
            store = JournalStore(path, MODEL, AT_ONCE)
        tidied(store)
        assert not holds(path, secret(7))
        assert len(store.sessions.states) == 19
        assert all(holds(path, secret(number)) for number in range(1, 21) if number != 7)
        store.close()


@pytest.mark.parametrize("without", [18, 1])
def test_a_removed_item_leaves_all_logs_though_each_server_dies_after_one_merge(without: int) -> None:
    """A snapshot has replaced the operation that removed it, and little else in the logs is dead. The log with
    that operation is rewritten before the one with the text, or after it."""
    with folder() as path:
        store = JournalStore(path, MODEL, replace(LATER, segment_bytes=20 * KIB))
        store.write([*birth(99), append(99, 0, EventReceived(event="swordfish"))])
        for number in range(1, 19):
            if number == 10:
                store.logs.roll()
                store.write([append(99, 1, EventReceived(event="swordfish, too"))])
                store.write([append(99, 2, Deleted(item="item_1"))])
            if number != without:
                store.write([*birth(number), append(number, 0, EventReceived(event=secret(number)))])
        snapshot = SessionSnapshot(preamble=Preamble(), rendered=Preamble())
        assert store.condense(99, lambda operations: (len(operations), snapshot))
        for _ in range(8):
            assert store.session(99).operations == (snapshot,)
            killed(store)
            store = JournalStore(path, MODEL, replace(AT_ONCE, segment_bytes=20 * KIB))
            if not store.wants_merge:
                break
            while store.merge():
                pass
        assert not holds(path, "swordfish") and not store.wants_merge
        assert len(store.sessions.states) == 18
        store.close()


def test_what_retention_forgets_hurries_nothing() -> None:
    with folder() as path, store_in(path, AT_ONCE) as store:
        filled(store)
        store.erase([7])
        before = {one.name for one in path.rglob("*.log")}
        tidied(store)
        assert {one.name for one in path.rglob("*.log")} == before


def condensed(store: JournalStore) -> None:
    """Let the store's sessions be condensed as long as it wants that."""

    def snapshot(operations: Sequence[AnyOperation]) -> tuple[int, AnyOperation]:
        return len(operations), SessionSnapshot(preamble=Preamble(), rendered=Preamble())

    waits: list[int] = []
    while (number := store.overlong) is not None and waits.count(number) < 3:
        waits.append(number)
        store.condense(number, snapshot)


@pytest.mark.parametrize("dies", ["never", "before the snapshots", "after the snapshots"])
def test_a_chain_of_forks_lets_go_what_only_its_first_session_had(dies: str) -> None:
    with folder() as path:
        store = JournalStore(path, MODEL, AT_ONCE)
        store.write([*birth(1), append(1, 0, EventReceived(event="shared "))])
        for number in range(2, 40):
            origin = Origin.of(number - 1, 1)
            text = EventReceived(event=f"own {number} ")
            store.write([*birth(number, origin=origin), append(number, 0, text)])
        store.write([append(1, 1, EventReceived(event=secret(1)))])
        store.write([*birth(90, origin=Origin.of(39, 1)), append(90, 0, EventReceived(event="last "))])
        store.erase([1], deleted=True)
        store.erase([20])
        if dies == "before the snapshots":
            killed(store)
            store = JournalStore(path, MODEL, AT_ONCE)
        condensed(store)
        if dies == "after the snapshots":
            killed(store)
            store = JournalStore(path, MODEL, AT_ONCE)
        for _ in range(3):
            tidied(store)
        assert not holds(path, secret(1))
        for _ in range(2):
            assert not store.damaged()
            kept = [*range(2, 20), *range(21, 40), 90]
            assert sorted(store.sessions.states) == kept
            for number in kept:
                (snapshot,) = store.session(number).operations
                assert isinstance(snapshot, SessionSnapshot)
            killed(store)
            store = JournalStore(path, MODEL, AT_ONCE)
        store.close()


def test_forks_that_have_all_of_a_deleted_session_are_not_copied() -> None:
    """Each copy would be as long as the session."""
    with folder() as path, store_in(path, AT_ONCE) as store:
        store.write([*birth(1), append(1, 0, EventReceived(event="shared "))])
        for number in (2, 3):
            text = EventReceived(event=f"own {number} ")
            store.write([*birth(number, origin=Origin.of(1, 1)), append(number, 0, text)])
        store.erase([1], deleted=True)
        assert store.overlong is None
        assert [one.event for one in store.session(3).operations] == ["shared ", "own 3 "]
        store.erase([2, 3], deleted=True)
        for _ in range(2):
            tidied(store)
        assert not holds(path, "shared ")


@run
async def test_an_open_session_that_is_deleted_after_the_engine_died_leaves_no_kv() -> None:
    """Its sequence died with the engine; what lower tiers have of it did not."""
    with folder() as path:
        link = reciting("Hello")
        async with registry_in(path, link) as registry:
            session = registry.create(salt=b"tenant")
            await ask(session, "Hi")
            link.die()
            link.restart()
            link.log.clear()
            await registry.delete(session.log.number)
            await registry.close(session.id)
            verbs = [entry[0] for entry in link.log]
            assert verbs == ["open", "close"] and link.log[-1][-1] is False
            assert b"tenant" in link.log[0]


class SmallDisk(Disk):
    """A disk of ``size`` bytes, of which a store has those that its files take."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size_in_all = folder, size

    @property
    def free(self) -> int:
        taken = sum(one.stat().st_blocks * 512 for one in self.folder.rglob("*") if one.is_file())
        return max(0, self.size_in_all - taken)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if len(data) > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data, offset)


def written(store: JournalStore, number: int) -> bool:
    try:
        store.write([*birth(number), append(number, 0, EventReceived(event="x" * 20 * KIB))])
    except StorageFull:
        return False
    return True


def write_until_full(store: JournalStore, number: int) -> None:
    """Write sessions with numbers from this one on until the disk is full."""
    while written(store, number):
        number += 1


def full_store(
    path: Path, disk: SmallDisk, patch: pytest.MonkeyPatch, tight: JournalSettings
) -> JournalStore:
    """A store that has filled its disk."""
    patch.setattr(LogFolder, "free_bytes", lambda _: disk.free)
    store = JournalStore(path, MODEL, tight, disk=disk)
    store.begin(1)
    write_until_full(store, 1)
    return store


@pytest.mark.parametrize("restart", [False, True])
def test_a_full_disk_is_left_by_deleting(restart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path:
        disk = SmallDisk(path, 4096 * KIB)
        tight = replace(LATER, reserve_bytes=1024 * KIB, segment_bytes=512 * KIB)
        store = full_store(path, disk, monkeypatch, tight)
        number = unused(store)
        assert number > 100 and store.free_bytes() < 512 * KIB, (
            "it has used its reserve, but for what makes room"
        )
        if restart:
            killed(store)
            store = JournalStore(path, MODEL, tight, disk=disk)
            store.begin(2)
        store.erase(sorted(store.sessions.states), deleted=True)
        for _ in range(20):
            tidied(store)
        assert store.free_bytes() > 3500 * KIB and not store.short
        assert written(store, number + 1)
        assert list(store.sessions.states) == [number + 1]
        store.close()


def test_a_full_disk_has_room_where_something_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that fails over and over lets the journal come to no other work."""
    with folder() as path:
        disk = SmallDisk(path, 4096 * KIB)
        tight = replace(LATER, reserve_bytes=2048 * KIB, segment_bytes=256 * KIB)
        store = full_store(path, disk, monkeypatch, tight)
        number = unused(store)
        store.erase(sorted(store.sessions.states)[::3])
        kept = set(store.sessions.states)
        disk.size_in_all -= disk.free  # another program takes what is left
        write_until_full(store, number)
        assert len(store.sessions.states) > len(kept) + 5 and kept < store.sessions.states.keys()
        store.close()
