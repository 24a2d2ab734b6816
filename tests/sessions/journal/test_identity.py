"""A journal that is gone, exchanged or rolled back is said at the start, and the server starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.sessions.journal import identity
from holdfast.sessions.journal.changes import Append
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.opening import open_for
from holdfast.sessions.journal.records import Heard
from holdfast.sessions.journal.store import JournalStore

from ..session_stage import run
from .journal_stage import MODEL, SMALL, birth, folder


@contextmanager
def started(path: Path, model: bytes = MODEL) -> Iterator[JournalStore]:
    """A server has the store."""
    store = open_for(path, model, SMALL)
    try:
        yield store
    finally:
        store.close()


def lived(path: Path, starts: int = 2) -> None:
    """Servers had it, one after another; each was told something."""
    for number in range(1, starts + 1):
        with started(path) as store:
            store.write([*birth(fresh := store.next_number()), Append(fresh, 0, Heard(event="e"))])
            assert not store.mismatches and store.generation == number


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
            assert "gone or empty, after 2 starts" in line or "rolled back" in line
            assert line in caplog.messages and store.statistics()["journal_mismatch"] == 1
            assert store.generation == 3
            store.write(birth(1))
        with started(path) as store:
            assert not store.mismatches and store.generation == 4


def test_another_journal_in_its_place_is_said() -> None:
    with folder() as path, folder() as other:
        lived(path)
        lived(other, 3)
        shutil.rmtree(path / "journal")
        shutil.copytree(other / "journal", path / "journal")
        with started(path) as store:
            assert ["another journal lies here" in line for line in store.mismatches] == [True]
            assert store.generation == 4 and store.session(1), "and its sessions can be had"
        with started(path) as store:
            assert not store.mismatches


def test_a_journal_that_changed_places_with_the_kv_index_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        lived(path)
        (log,) = (path / "journal").glob("*.log")
        log.with_suffix(".index").unlink()
        log.write_bytes(b"\0" * 16 + b"\xde\xc0\xef\xbe" + b"\1" * 50_000)  # as a file of LMDB begins
        with started(path) as store:
            assert "gone or empty" in store.mismatches[0] or "rolled back" in store.mismatches[0]
            assert str(log) in caplog.text
            store.write(birth(store.next_number()))
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
            store.write(birth(store.next_number()))
        shutil.rmtree(path / "journal")
        shutil.copytree(copy / "journal", path / "journal")
        with started(path) as store:
            (line,) = store.mismatches
            assert "rolled back" in line
            assert store.session(1) and store.session(2), "a backup that was restored is a journal"
            later = store.generation
        with started(path) as store:
            assert not store.mismatches and store.generation == later + 1


def lived_on(path: Path) -> None:
    with started(path) as store:
        store.write(birth(store.next_number()))


@pytest.mark.parametrize("how", ["gone", "damaged", "older", "long"])
def test_a_second_place_that_is_gone_or_damaged_is_said(how: str) -> None:
    with folder() as path:
        lived(path)
        place = path / identity.FILE
        whole = place.read_bytes()
        match how:
            case "gone":
                place.unlink()
            case "damaged":
                place.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
            case "older":
                lived_on(path)
                lived_on(path)
                place.write_bytes(whole)
            case "long":
                place.write_bytes(whole * 1000)
        with started(path) as store:
            (line,) = store.mismatches
            told = {
                "gone": "is gone",
                "damaged": "cannot be read",
                "older": "rolled back",
                "long": "cannot be",
            }
            assert identity.FILE in line and told[how] in line
            assert store.session(1) and store.session(2)
        with started(path) as store:
            assert not store.mismatches


def test_a_server_that_died_between_the_two_places_says_nothing() -> None:
    with folder() as path:
        lived(path)
        before = (path / identity.FILE).read_bytes()
        lived_on(path)
        (path / identity.FILE).write_bytes(before)
        with started(path) as store:
            assert not store.mismatches


def test_a_header_that_is_lost_everywhere_else_is_had_from_the_second_place() -> None:
    with folder() as path:
        lived(path)
        (log,) = (path / "journal").glob("*.log")
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
            store.write([*birth(1), Append(1, 0, Heard(event="e"))])
            store.logs.roll()
            store.write([*birth(2), Append(2, 0, Heard(event="e"))])
        (path / "journal" / "00000001.log").unlink()
        with started(path) as store:
            (line,) = store.mismatches
            assert "00000001.log is gone" in line
            assert store.session(2).operations
        with started(path) as store:
            assert not store.mismatches


def test_an_old_journal_that_is_put_beside_a_begun_one_is_said_and_kept() -> None:
    with folder() as path:
        lived(path)
        old = path / "data.mdb"
        old.write_bytes(b"sessions of before" * 1000)
        for _ in range(2):
            store = open_for(path, MODEL, SMALL)
            store.close()
            assert old.exists() and any("earlier version" in line for line in store.mismatches)
