"""Two servers and one store: one of them serves it, whatever was done to locks, folders and files; nothing that
was acknowledged is lost, and no session has another's records."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.kvstore import folder_lock
from holdfast.sessions.errors import StorageUnavailable, StoreHeld, StoreUnusable
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.lock import StoreLock
from holdfast.sessions.journal.records import EventReceived, Keyring
from holdfast.sessions.journal.session_log import SessionLog

from ..session_stage import run
from .journal_stage import MODEL, SMALL, folder, record_of


def unlocked(patch: pytest.MonkeyPatch) -> None:
    """A file system on which a lock keeps no server out, as some network file systems are mounted."""
    patch.setattr(fcntl, "flock", lambda fd, how: None)


async def begun(journal: Journal) -> SessionLog:
    """A session with one event that was acknowledged."""
    log = born(journal)
    log.append(EventReceived(event="first"))
    await log.sync()
    return log


def born(journal: Journal) -> SessionLog:
    log = SessionLog.begin(journal, record_of(1))
    log.keep(Keyring(fresh=(log.number.to_bytes(32, "big"),)))
    return log


async def refused(journal: Journal) -> StorageUnavailable:
    """Wait until the journal refuses turns; returns why."""
    told: asyncio.Future[StorageUnavailable] = asyncio.get_running_loop().create_future()
    journal.watchers.add(lambda fault: told.done() or told.set_result(fault))
    return journal.fault or await told


async def events(path: Path) -> dict[int, list[str]]:
    """What the next server finds in each session."""
    journal = await Journal.open(path, MODEL, SMALL)
    try:
        assert not journal.mismatches
        return await journal.read(
            lambda store: {
                number: [operation.event for operation in store.session(number).operations]
                for number in store.sessions.states
            }
        )
    finally:
        await journal.aclose()


@run
async def test_a_cleaner_of_stale_locks_lets_no_second_server_in() -> None:
    with folder() as path:
        journal = await Journal.open(path, MODEL, SMALL)
        log = await begun(journal)
        for _ in range(2):
            (path / "lock").unlink()
            with pytest.raises(StoreHeld, match=str(os.getpid())):
                await Journal.open(path, MODEL, SMALL)
            log.append(EventReceived(event="more"))
            await log.sync()
        await journal.aclose()
        assert list((await events(path)).values()) == [["first", "more", "more"]]


def renamed(path: Path, aside: Path) -> None:
    path.rename(aside)


def replaced(path: Path, aside: Path) -> None:
    path.rename(aside)
    shutil.copytree(aside, path)


def without_its_journal(path: Path, aside: Path) -> None:
    aside.mkdir()
    (path / "journal").rename(aside / "journal")
    shutil.copytree(aside / "journal", path / "journal")


def linked_elsewhere(path: Path, aside: Path) -> None:
    path.rename(aside)
    shutil.copytree(aside, path.with_name("another"))
    path.symlink_to(path.with_name("another"))


@pytest.mark.parametrize("how", [renamed, replaced, without_its_journal, linked_elsewhere])
@run
async def test_a_store_that_is_not_at_its_path_is_not_written_and_heals(
    how: Callable[[Path, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with folder() as base:
        path, aside = base / "store", base / "aside"
        journal = await Journal.open(path, MODEL, SMALL)
        log = await begun(journal)
        how(path, aside)
        log.append(EventReceived(event="unacknowledged"))
        ticket = log.sync()
        fault = await refused(journal)
        assert str(path) in fault.message and not ticket.done()
        with pytest.raises(StorageUnavailable):
            await journal.read(lambda store: None)
        if how is without_its_journal:
            with pytest.raises(StoreHeld):
                await events(path)
            shutil.rmtree(path / "journal")
            (aside / "journal").rename(path / "journal")
        else:
            if path.exists():  # another server may have what is there
                assert list((await events(path)).values()) == [["first"]]
            path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
            aside.rename(path)
        await ticket
        assert journal.fault is None
        await journal.aclose()
        assert list((await events(path)).values()) == [["first", "unacknowledged"]]
        said = [line for line in caplog.messages if "turns are refused" in line]
        assert len(said) == 1, "one line"


@run
async def test_an_idle_server_notices_that_its_store_was_replaced() -> None:
    with folder() as base:
        path = base / "store"
        journal = await Journal.open(path, MODEL, SMALL)
        await begun(journal)
        replaced(path, base / "aside")
        assert str(path) in (await refused(journal)).message
        await journal.aclose()


@pytest.mark.parametrize("folders", [True, False], ids=["folders lock", "folders do not lock"])
def test_a_signature_that_cannot_be_flushed_is_none(folders: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host would not see it: only a lock of the folder can stand for it."""

    def flushed(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def locked(fd: int, how: int) -> None:
        if not folders and stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(fcntl, "flock", locked)
    with folder() as path:
        lock = StoreLock(path)
        if folders:
            assert not lock.acquire().lost()
            lock.release()
        else:
            with pytest.raises(StoreUnusable, match="Input/output error"):
                lock.acquire()


@run
async def test_without_locks_the_last_server_has_the_store_and_the_first_acknowledges_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlocked(monkeypatch)
    with folder() as path:
        first = await Journal.open(path, MODEL, SMALL)
        shared = await begun(first)
        second = await Journal.open(path, MODEL, SMALL)
        shared.append(EventReceived(event="of the first"))
        own = born(first)
        own.append(EventReceived(event="of the first alone"))
        tickets = [shared.sync(), own.sync()]
        log = SessionLog(second, shared.number, 1)
        log.append(EventReceived(event="of the second"))
        other = born(second)
        other.append(EventReceived(event="of the second alone"))
        await other.sync()
        assert "process" in (await refused(first)).message
        await first.aclose()
        for ticket in tickets:
            with pytest.raises(StorageUnavailable):
                ticket.result()
        await second.aclose()
        found = await events(path)
        assert found == {
            shared.number: ["first", "of the second"],
            other.number: ["of the second alone"],
        }, "and nothing of what was never acknowledged"
        assert own.number != other.number, "two servers never give two sessions one number"


@pytest.mark.parametrize("there", [["lost+found"], [".snapshot"], ["reserve", "notes.txt"], []])
def test_a_folder_with_files_of_others_alone_is_refused(tmp_path: Path, there: list[str]) -> None:
    (tmp_path / "Documents").mkdir()
    with pytest.raises(StoreUnusable, match="Documents: give the store a folder of its own"):
        StoreLock(tmp_path).acquire()
    assert os.listdir(tmp_path) == ["Documents"]
    (tmp_path / "Documents").rmdir()
    for name in there:
        (tmp_path / name).touch()
    StoreLock(tmp_path).acquire().release()
    StoreLock(tmp_path).acquire().release()


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "gone"])
def test_a_folder_that_goes_while_it_is_looked_at_is_this_servers_again_when_it_is_back(
    tmp_path: Path, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, aside = tmp_path / "store", tmp_path / "aside"
    lock = StoreLock(path).acquire()
    look = folder_lock.elsewhere

    def goes(where: Path, fd: int) -> str:
        found = look(where, fd)
        path.rename(aside)
        if replaced:
            path.mkdir()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(folder_lock, "elsewhere", goes)
        lock.lost()
    assert lock.lost()
    if replaced:
        path.rmdir()  # nothing was made in it
    aside.rename(path)
    assert not lock.lost()
    lock.release()
