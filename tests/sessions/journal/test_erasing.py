"""What was deleted leaves the logs in time, and a full disk is left by deleting."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.sessions.errors import StorageUnavailable
from holdfast.sessions.journal.folder import Disk
from holdfast.sessions.journal.logs import LogFolder
from holdfast.sessions.journal.records import EventReceived, append
from holdfast.sessions.journal.store import JournalStore

from ..session_stage import ask, reciting, run
from .bad_disks import killed
from .journal_stage import MODEL, SMALL, birth, folder, registry_in, store_in

AT_ONCE = replace(SMALL, erase_seconds=0.0)
LATER = replace(SMALL, erase_seconds=3600.0)
KIB = 1 << 10


def holds(path: Path, text: str) -> bool:
    return any(text.encode() in one.read_bytes() for one in path.rglob("*") if one.is_file())


def secret(number: int) -> str:
    return f"secret {number} " * 100


def filled(store: JournalStore, count: int = 20) -> None:
    for number in range(1, count + 1):
        store.write([*birth(number), append(number, 0, EventReceived(event=secret(number)))])


def tidied(store: JournalStore) -> None:
    """What the journal's thread does about once a second."""
    store.watch()
    while store.wants_compaction and store.compact():
        pass


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_deleted_leaves_logs_in_which_little_is_dead(restart: bool) -> None:
    with folder() as path:
        store = JournalStore.open(path, MODEL, LATER if restart else AT_ONCE)
        filled(store)
        store.erase([7], deleted=True)
        if restart:
            tidied(store)
            assert holds(path, secret(7)), "nothing hurries"
            killed(store)
            store = JournalStore.open(path, MODEL, AT_ONCE)
        tidied(store)
        assert not holds(path, secret(7))
        assert len(store.sessions.states) == 19
        assert all(holds(path, secret(number)) for number in range(1, 21) if number != 7)
        store.close()


def test_what_retention_forgets_hurries_nothing() -> None:
    with folder() as path, store_in(path, AT_ONCE) as store:
        filled(store)
        store.erase([7])
        before = {one.name for one in path.rglob("*.log")}
        tidied(store)
        assert {one.name for one in path.rglob("*.log")} == before


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
    except StorageUnavailable:
        return False
    return True


@pytest.mark.parametrize("restart", [False, True])
def test_a_full_disk_is_left_by_deleting(restart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path:
        disk = SmallDisk(path, 4096 * KIB)
        monkeypatch.setattr(LogFolder, "free_bytes", lambda _: disk.free)
        tight = replace(LATER, reserve_bytes=1024 * KIB, segment_bytes=512 * KIB)
        store = JournalStore.open(path, MODEL, tight, disk=disk)
        store.begin(1)
        number = 1
        while written(store, number):
            number += 1
        assert number > 100 and store.free_bytes() < 512 * KIB, (
            "it has used its reserve, but for what makes room"
        )
        if restart:
            killed(store)
            store = JournalStore.open(path, MODEL, tight, disk=disk)
            store.begin(2)
        store.erase(sorted(store.sessions.states), deleted=True)
        for _ in range(20):
            tidied(store)
        assert store.free_bytes() > 3500 * KIB and not store.short
        assert written(store, number + 1)
        assert list(store.sessions.states) == [number + 1]
        store.close()
