"""A journal that is gone, exchanged or rolled back is said at the start, and the server starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.sessions.journal import admin
from holdfast.sessions.journal.folder import IDENTITY
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.logs import Log, LogFolder
from holdfast.sessions.journal.records import EventReceived, append, drop
from holdfast.sessions.journal.store import JournalStore

from ..session_stage import run
from .journal_stage import SMALL, birth, folder, started, unused


def lived(path: Path, starts: int = 2) -> None:
    """Servers had it, one after another; each was told something."""
    for number in range(1, starts + 1):
        with started(path) as store:
            store.write([*birth(fresh := unused(store)), append(fresh, 0, EventReceived(event="e"))])
            assert not store.mismatches and store.logs.generation == number


@pytest.mark.parametrize("how", ["deleted", "emptied", "truncated"])
def test_a_journal_that_is_gone_is_said_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        lived(path)
        match how:
            case "deleted":
                shutil.rmtree(path / "journal")
            case "emptied":
                for file in (path / "journal").iterdir():
                    file.unlink()
            case "truncated":
                for file in (path / "journal").iterdir():
                    file.write_bytes(b"")
        with started(path) as store:
            (line,) = store.mismatches
            assert ("rolled back" if how == "truncated" else "gone or empty, after 2 starts") in line
            assert line in caplog.messages and store.statistics()["journal_mismatch"] == 1
            assert store.logs.generation == 3
            store.write(birth(1))
        with started(path) as store:
            assert not store.mismatches and store.logs.generation == 4


def test_another_journal_in_its_place_is_said() -> None:
    with folder() as path, folder() as other:
        lived(path)
        lived(other, 3)
        shutil.rmtree(path / "journal")
        shutil.copytree(other / "journal", path / "journal")
        with started(path) as store:
            assert ["another journal lies here" in line for line in store.mismatches] == [True]
            assert store.logs.generation == 4 and store.session(1), "and its sessions can be had"
        with started(path) as store:
            assert not store.mismatches


def test_a_journal_that_changed_places_with_the_kv_index_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        lived(path, 1)
        (log,) = (path / "journal").glob("*.log")
        log.with_suffix(".index").unlink()
        log.write_bytes(b"\0" * 16 + b"\xde\xc0\xef\xbe" + b"\1" * 50_000)  # as a file of LMDB begins
        with started(path) as store:
            assert "rolled back" in store.mismatches[0]
            assert str(log) in caplog.text
            store.write(birth(unused(store)))
        with started(path) as store:
            assert not store.mismatches


@pytest.mark.parametrize("whole_start", [True, False])
def test_a_journal_that_was_rolled_back_is_said(whole_start: bool) -> None:
    with folder() as path, folder() as copy:
        lived(path)
        if whole_start:
            shutil.copytree(path / "journal", copy / "journal")
            lived_on(path)
        with started(path) as store:
            if not whole_start:
                shutil.copytree(path / "journal", copy / "journal")
            store.write(birth(unused(store)))
        shutil.rmtree(path / "journal")
        shutil.copytree(copy / "journal", path / "journal")
        with started(path) as store:
            (line,) = store.mismatches
            assert "rolled back" in line
            assert store.session(1) and store.session(2), "a backup that was restored is a journal"
            later = store.logs.generation
        with started(path) as store:
            assert not store.mismatches and store.logs.generation == later + 1


def lived_on(path: Path) -> None:
    with started(path) as store:
        store.write(birth(unused(store)))


@pytest.mark.parametrize("how", ["gone", "damaged", "older", "long"])
def test_a_second_copy_that_is_gone_or_damaged_is_said(how: str) -> None:
    with folder() as path:
        lived(path)
        file = path / IDENTITY
        whole = file.read_bytes()
        match how:
            case "gone":
                file.unlink()
            case "damaged":
                file.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
            case "older":
                lived_on(path)
                lived_on(path)
                file.write_bytes(whole)
            case "long":
                file.write_bytes(whole * 1000)
        with started(path) as store:
            (line,) = store.mismatches
            told = {
                "gone": "is gone",
                "damaged": "cannot be read",
                "older": "rolled back",
                "long": "cannot be",
            }
            assert IDENTITY in line and told[how] in line
            assert store.session(1) and store.session(2)
        with started(path) as store:
            assert not store.mismatches


def test_a_server_that_died_between_the_two_places_says_nothing() -> None:
    with folder() as path:
        lived(path)
        before = (path / IDENTITY).read_bytes()
        lived_on(path)
        (path / IDENTITY).write_bytes(before)
        with started(path) as store:
            assert not store.mismatches


def test_a_header_that_is_lost_everywhere_else_is_had_from_the_second_copy() -> None:
    with folder() as path:
        lived(path)
        for log in (path / "journal").glob("*.log"):
            log.with_suffix(".index").unlink()
            data = log.read_bytes()
            log.write_bytes(bytes(8192) + data[8192:])
        with started(path) as store:
            assert store.session(1) and store.session(2) and not store.mismatches


@run
async def test_another_models_journal_is_said_like_a_mismatch() -> None:
    with folder() as path:
        lived(path)
        for _ in range(2):
            journal = await Journal.open(path, b"another", SMALL)
            (line,) = journal.mismatches
            assert "another model" in line and "sessions are kept in" in line
            await journal.aclose()
        with started(path) as store:
            assert not store.mismatches and store.session(1)


def test_one_log_that_is_gone_is_said() -> None:
    with folder() as path:
        with started(path) as store:
            store.write([*birth(1), append(1, 0, EventReceived(event="e"))])
            store.logs.roll()
            store.write([*birth(2), append(2, 0, EventReceived(event="e"))])
        (path / "journal" / "00000001.log").unlink()
        with started(path) as store:
            (line,) = store.mismatches
            assert "00000001.log is gone" in line
            assert store.session(2).operations
        with started(path) as store:
            assert not store.mismatches


def rolled(path: Path) -> None:
    with started(path) as store:
        fill(store)


def fill(store: JournalStore) -> None:
    """Five logs with one session in each."""
    for number in range(1, 5):
        store.write([*birth(number), append(number, 0, EventReceived(event="e"))])
        store.logs.roll()
    store.write(birth(5))


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_logs_that_are_gone_with_their_indexes_are_said(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        if how == "killed":
            with folder() as other, started(other) as store:
                fill(store)
                shutil.copytree(other, path, dirs_exist_ok=True)
        else:
            rolled(path)
        for name in ("00000002", "00000003"):
            for kind in ("log", "index"):
                (path / "journal" / f"{name}.{kind}").unlink()
        damage: list[str] = []
        list(admin.verify(path, damage))
        assert any("00000002.log, 00000003.log" in line for line in damage)
        with started(path) as store:
            (line,) = store.mismatches
            assert "logs of the last start are gone: 00000002.log, 00000003.log:" in line
            assert line in caplog.messages and store.statistics()["journal_mismatch"] == 1
            assert store.session(1) and store.session(4) and store.session(5)
        with started(path) as store:
            assert not store.mismatches


@pytest.mark.parametrize("killed", ["before the second copy", "before the removal", "after it"])
def test_logs_that_were_merged_are_not_missed(killed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path, folder() as copy:
        rolled(path)
        removed = LogFolder.remove

        def remove(logs: LogFolder, one: Log) -> None:
            if killed == "before the removal" and not (copy / "journal").exists():
                shutil.copytree(path, copy, dirs_exist_ok=True)
            removed(logs, one)

        noted = JournalStore.note

        def note(store: JournalStore, without: Sequence[Log] = ()) -> None:
            if killed == "before the second copy" and without and not (copy / "journal").exists():
                shutil.copytree(path, copy, dirs_exist_ok=True)
            noted(store, without)

        with started(path) as store:
            monkeypatch.setattr(LogFolder, "remove", remove)
            monkeypatch.setattr(JournalStore, "note", note)
            store.write([drop(number) for number in (1, 2, 3)])
            store.rewrite()
            if killed == "after it":
                shutil.copytree(path, copy, dirs_exist_ok=True)
        for store_path in (path, copy):
            with started(store_path) as store:
                assert not store.mismatches
                assert store.session(4) and store.session(5)
