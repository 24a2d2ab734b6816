"""What an operator does with a journal: verified, repaired, copied beside a server, tidied, a tenant erased."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replaced

from holdfast.sessions.errors import HandleUnknown, RecordDamaged, StoreHeld, StoreUnusable
from holdfast.sessions.journal import admin
from holdfast.sessions.journal.folder import Disk
from holdfast.sessions.journal.lock import StoreLock
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.records import EventReceived, Origin, append, drop, put
from holdfast.sessions.journal.segment import Fresh, Kind, offset_of, slot_of
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.registry import Reopened
from holdfast.tests.stored_files import bytes_below

from ..session_stage import ask, reciting, run
from .journal_stage import MODEL, SMALL, birth, folder, record_of, registry_in, store_in, unused
from .test_format_3 import kept, laid_out, said, wanted

COUNT = 5


def begun(number: int, salt: bytes = b"", origin: Origin | None = None) -> list[Fresh]:
    record = replaced(record_of(number), salt=salt, origin=origin)
    heard = [append(number, at, EventReceived(event=f"<{number}-{at}>")) for at in range(COUNT)]
    return [put(number, record), *birth(number)[1:], *heard]


def lived(path: Path, count: int = 6) -> None:
    store = open_for(path, MODEL, SMALL)
    for number in range(1, count + 1):
        store.write(begun(number))
    store.close()


def strike(path: Path, number: int, kind: Kind, index: int = 0) -> None:
    """Flip a bit of a record."""
    store = JournalStore(path, MODEL, SMALL, write=False)
    location = store.sessions.location(number, kind, index)
    log = store.logs.logs[slot_of(location)].path
    store.close()
    data = bytearray(log.read_bytes())
    data[offset_of(location) + 49] ^= 1
    log.write_bytes(data)


def events(store: JournalStore, number: int) -> list[str]:
    return [operation.event for operation in store.session(number).operations]


def whole(number: int, count: int = COUNT) -> list[str]:
    return [f"<{number}-{at}>" for at in range(count)]


def test_a_whole_journal_is_verified_and_left_as_it_is() -> None:
    with folder() as path:
        lived(path)
        before = {file: file.read_bytes() for file in (path / "journal").iterdir()}
        damage: list[str] = []
        (line,) = admin.verify(path, damage)
        assert not damage and "6 sessions" in line and "0 damaged" in line
        (line,) = admin.stat(path)
        assert "6 sessions" in line
        (line,) = admin.repair(path)
        assert "nothing is damaged" in line
        assert before == {file: file.read_bytes() for file in (path / "journal").iterdir()}


def test_damage_is_verified_by_name_in_every_log() -> None:
    with folder() as path:
        lived(path)
        for number in (2, 4):
            strike(path, number, Kind.OPERATION, COUNT - 1)
        damage: list[str] = []
        lines = list(admin.verify(path, damage))
        (log,) = (path / "journal").glob("*.log")
        assert damage == ["session sess_2", "session sess_4", f"log {log}"]
        assert "3 damaged" in lines[0] and [line.strip() for line in lines[1:]] == [
            f"damaged: {one}" for one in damage
        ]


def test_a_damaged_journal_is_repaired_and_kept_aside() -> None:
    with folder() as path:
        lived(path)
        strike(path, 2, Kind.OPERATION, 3)
        strike(path, 3, Kind.OPERATION, 0)
        strike(path, 4, Kind.SESSION)
        strike(path, 5, Kind.KEYRING)
        digest = bytes([5]) * 32
        lines = list(admin.repair(path))
        told = {line.strip().split(":")[0]: line for line in lines[1:]}
        assert "sess_2: 3 operations are whole, 2 and more are not" in told["cut back"]
        assert "sess_5" in told["mended"]
        lost = [line for line in lines if "lost:" in line]
        assert ["sess_3" in line or "number 4" in line for line in lost] == [True, True]
        assert "journal.damaged" in lines[0] and (path / "journal.damaged").is_dir()
        store = open_for(path, MODEL, SMALL)
        assert not store.damaged() and not store.mismatches and not store.logs.findings.lost
        assert [events(store, number) for number in (1, 2, 5, 6)] == [
            whole(1),
            whole(2, 3),
            whole(5),
            whole(6),
        ]
        assert store.handle(digest)[0] == 5 and store.session(5).keyring.digests() == (digest,)
        for number in (3, 4):
            with pytest.raises(RecordDamaged, match="missing"):
                store.session(number)
        assert store.logs.generation == 2
        store.write(begun(7))
        store.close()
        damage: list[str] = []
        list(admin.verify(path, damage))
        assert not damage
        strike(path, 6, Kind.OPERATION, 2)
        assert "journal.damaged-2" in next(iter(admin.repair(path)))


def test_forks_are_repaired_with_what_they_follow_on() -> None:
    with folder() as path:
        store = open_for(path, MODEL, SMALL)
        store.write(begun(1))
        store.write(begun(2, origin=Origin(session=1, operations=2)))
        store.write(begun(3, origin=Origin(session=1, operations=4)))
        store.write(begun(4, origin=Origin(session=2, operations=5)))
        store.write(begun(5))
        store.write(begun(6, origin=Origin(session=5, operations=3)))
        store.write([drop(1), drop(5)])
        store.close()
        strike(path, 1, Kind.OPERATION, 2)
        lines = list(admin.repair(path))
        store = open_for(path, MODEL, SMALL)
        assert events(store, 2) == [*whole(1, 2), *whole(2)]
        assert events(store, 3) == whole(1, 2), "cut back to before the damage"
        assert events(store, 4) == [*whole(1, 2), *whole(2), *whole(4)]
        assert events(store, 6) == [*whole(5, 3), *whole(6)]
        assert "cut back: session sess_3" in "".join(lines) and "sess_2" not in "".join(lines)
        assert store.sessions.states[6].origin == (5, 3) and not store.damaged()
        store.close()


def test_a_copy_is_a_store_and_says_nothing_of_a_mismatch() -> None:
    with folder() as path, folder() as other:
        lived(path)
        target = other / "copy"
        assert "6 sessions" in next(iter(admin.backup(path, target)))
        store = open_for(target, MODEL, SMALL)
        assert not store.mismatches
        assert [events(store, number) for number in range(1, 7)] == [whole(number) for number in range(1, 7)]
        store.close()


def test_a_copy_beside_a_server_that_writes_and_merges_is_whole() -> None:
    with folder() as path, folder() as other:
        store = open_for(path, MODEL, replace(SMALL, segment_bytes=16 << 10))
        written, stop, failed = [0], threading.Event(), []

        def serve() -> None:
            number = 0
            try:
                while not stop.is_set():
                    number += 1
                    store.write(begun(number))
                    written[0] = number
                    if number > 40:
                        store.write([drop(number - 40)])
                    while store.wants_merge and store.merge():
                        pass
            except BaseException as fault:
                failed.append(fault)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            for attempt in range(15):
                while written[0] < 60 * (attempt + 1) and not failed:
                    stop.wait(0.001)
                least = written[0]
                list(admin.backup(path, other / f"{attempt}"))
                with store_in(other / f"{attempt}") as copy:
                    assert not copy.damaged() and not copy.logs.findings.lost
                    numbers = sorted(number for number in copy.sessions.states)
                    assert numbers[-1] >= least, "what was acknowledged before is in it"
                    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) in (
                        40,
                        41,
                        42,
                    )
                    assert all(events(copy, number) == whole(number) for number in numbers)
        finally:
            stop.set()
            thread.join()
            store.close()
        assert not failed


class Overtaken(Disk):
    """A disk on which a server writes a group behind the point up to which a log was read."""

    def __init__(self, server: JournalStore, times: int) -> None:
        self.server, self.times = server, times

    def read(self, fd: int, length: int, offset: int) -> bytes:
        active = self.server.logs.active
        assert active is not None
        if not self.times or offset or length <= active.end:
            return super().read(fd, length, offset)
        self.times -= 1
        seen = active.end + 8
        before = super().read(fd, seen, 0)
        self.server.write(begun(unused(self.server)))
        return before + super().read(fd, length - seen, seen)


@pytest.mark.parametrize("times", [1, 3])
def test_a_reader_beside_a_server_sees_no_part_of_a_group(times: int) -> None:
    with folder() as path:
        lived(path)
        server = open_for(path, MODEL, SMALL)
        server.write(begun(7))
        disk = Overtaken(server, times)
        reader = JournalStore(path, b"", SMALL, disk=disk, write=False, whole=True)
        assert not disk.times and not reader.damaged() and not reader.logs.findings.lines
        known = range(1, 8 + times)
        assert set(range(1, 8)) <= set(reader.sessions.states) <= set(known)
        assert all(events(reader, number) == whole(number) for number in reader.sessions.states)
        reader.close()
        server.close()


def test_a_reader_beside_a_server_has_the_logs_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path:
        server = open_for(path, MODEL, replace(SMALL, segment_bytes=1 << 14))
        for number in range(1, 41):
            server.write(begun(number))
        listed, times = os.listdir, [2]

        def merges(where: Path) -> list[str]:
            found = listed(where)
            if times[0]:
                times[0] -= 1
                server.erase(range(1, 18) if times[0] else range(18, 38))
                server.rewrite()
            return found

        monkeypatch.setattr(os, "listdir", merges)
        reader = JournalStore(path, b"", SMALL, write=False, whole=True)
        assert not times[0] and not reader.logs.findings.lines
        kept = {number for number, state in reader.sessions.states.items() if state.kept}
        assert kept == {38, 39, 40} and all(events(reader, number) == whole(number) for number in kept)
        reader.close()
        server.close()


def test_a_tenant_is_erased_from_every_file_and_the_others_stay() -> None:
    with folder() as path:
        laid_out(path)
        store = open_for(path, MODEL, SMALL)
        store.write([drop(3)])  # of the tenant, and forgotten already
        store.close()
        theirs = [number for number in kept() if number % 2]
        assert b"<21-" in bytes_below(path)
        lines = list(admin.erase(path, admin.of_tenant(b"acme")))
        assert f"{len(theirs) - 1} sessions erased" in lines[0]
        # What a fork of another tenant follows on is its past, too: here each tenth session is such a one.
        shared = {number - 1 for number in kept() if number % 10 == 0}
        gone = [number for number in (*theirs, 3) if number not in shared]
        data = bytes_below(path)
        assert not [number for number in gone if mark(number) in data or b"sess_%d\xa5" % number in data]
        store = open_for(path, MODEL, SMALL)
        for number in kept():
            if number % 2 == 0:
                assert said(store, number) == wanted(number)
            else:
                with pytest.raises(RecordDamaged):
                    store.session(number)
        assert not store.mismatches and not store.damaged()
        store.close()


def mark(number: int) -> bytes:
    return f"<{number}-".encode()


def test_what_is_dead_goes() -> None:
    with folder() as path:
        lived(path)
        store = open_for(path, MODEL, SMALL)
        store.write([drop(number) for number in range(1, 6)])
        store.close()
        lines = list(admin.gc(path))
        assert "1 sessions" in lines[0]
        assert b"<3-" not in bytes_below(path)
        store = open_for(path, MODEL, SMALL)
        assert events(store, 6) == whole(6) and not store.mismatches
        store.close()


def test_a_store_that_a_server_holds_is_left_alone() -> None:
    with folder() as path:
        lived(path)
        with StoreLock(path).acquire(0.0):
            for act in (admin.repair, admin.gc, lambda root: admin.erase(root, admin.of_tenant(b"acme"))):
                with pytest.raises(StoreHeld, match=str(os.getpid())):
                    list(act(path))
            assert list(admin.stat(path)) and list(admin.verify(path, []))


def test_a_journal_in_lmdb_is_refused_by_name_also_beside_another() -> None:
    with folder() as path:
        old = path / "data.mdb"
        for begin in (lambda: None, lambda: lived(path)):
            begin()
            old.write_bytes(b"sessions of before" * 1000)
            for act in (
                admin.stat,
                admin.repair,
                admin.gc,
                lambda root: admin.erase(root, admin.of_tenant(b"")),
            ):
                with pytest.raises(StoreUnusable, match=f"{old} is a journal in LMDB"):
                    list(act(path))
            with pytest.raises(StoreUnusable, match=f"{old} is a journal in LMDB"):
                open_for(path, MODEL, SMALL)
            old.unlink()
        with store_in(path) as store:
            assert len(store.sessions.states) == 6


@run
async def test_a_repaired_session_goes_on_where_no_reply_ran() -> None:
    with folder() as path:
        async with registry_in(path, reciting("One.", "Two.", "Three.")) as registry:
            session = registry.create()
            for text in ("a", "b", "c"):
                await ask(session, text)
            ticket = session.log.sync()
            assert ticket is not None
            await ticket
            handle, number = session.handles.current, session.log.number
        store = JournalStore(path, MODEL, SMALL, write=False)
        count = store.sessions.states[number].count
        store.close()
        strike(path, number, Kind.OPERATION, count - 1)
        assert "cut back" in "".join(admin.repair(path))
        async with registry_in(path, reciting("Now.")) as registry:
            found = await registry.resume(handle, b"")
            assert isinstance(found, Reopened)
            texts = [item.text for item in found.session.history.items()]
            assert texts[:4] == ["a", "One.", "b", "Two."] and "Three." not in texts
            assert (await ask(found.session, "d")).items[0].text == "Now."
            with pytest.raises(HandleUnknown):
                await registry.resume("unknown", b"")


@pytest.mark.parametrize("then", ["start", "repair"])
@pytest.mark.parametrize("aside", [False, True], ids=["before the damaged one is aside", "after"])
def test_a_repair_that_dies_between_its_renames_loses_nothing(
    aside: bool, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folder() as path:
        lived(path)
        strike(path, 2, Kind.OPERATION, 1)
        rename = os.rename

        def die(old: Path, new: Path) -> None:
            if Path(new if aside else old) == path / "journal":
                raise KeyboardInterrupt
            rename(old, new)

        with monkeypatch.context() as dying:
            dying.setattr(os, "rename", die)
            with pytest.raises(KeyboardInterrupt):
                list(admin.repair(path))
        assert (path / "journal.new").exists() and (path / "journal").exists() != aside
        if aside:
            with pytest.raises(StoreUnusable, match="did not end"):
                list(admin.stat(path))
        if then == "repair":
            assert "ended now" in next(iter(list(admin.repair(path))))
        store = open_for(path, MODEL, SMALL)
        try:
            assert not store.mismatches and (path / "journal.damaged").exists()
            assert [events(store, number) for number in (1, 3)] == [whole(1), whole(3)]
        finally:
            store.close()


def test_a_journal_that_is_gone_is_no_clean_verify() -> None:
    with folder() as path:
        lived(path)
        for file in (path / "journal").iterdir():
            file.unlink()
        damage: list[str] = []
        list(admin.verify(path, damage))
        assert any("gone or empty" in line for line in damage)


def test_what_a_repair_that_died_left_is_erased_too() -> None:
    with folder() as path:
        lived(path)
        shutil.copytree(path / "journal", path / "journal.new")
        list(admin.erase(path, admin.of_tenant(b"")))
        assert not (path / "journal.new").exists()


def test_a_backup_into_the_store_itself_is_refused() -> None:
    with folder() as path:
        lived(path)
        with pytest.raises(StoreUnusable, match="inside the store"):
            list(admin.backup(path, path / "journal" / "copy"))
        assert not (path / "journal" / "copy").exists()


@pytest.mark.parametrize("name", ["00000001.index", "00000009.index", "00000009.log"])
def test_a_folder_with_the_name_of_a_file_costs_no_session(name: str) -> None:
    with folder() as path:
        lived(path)
        (path / "journal" / name).unlink(missing_ok=True)
        (path / "journal" / name).mkdir()
        damage: list[str] = []
        list(admin.verify(path, damage))
        for _ in range(2):
            store = open_for(path, MODEL, SMALL)
            assert {number: events(store, number) for number in range(1, 7)} == {
                number: whole(number) for number in range(1, 7)
            }
            store.close()
        list(admin.gc(path))


def test_a_check_beside_a_server_writes_nothing() -> None:
    with folder() as path:
        store = open_for(path, MODEL, SMALL)
        later = Fresh(1, 0, Kind.OPERATION, b"\x81\xa2op\xa5later")
        store.write([put(1, record_of(1)), *birth(1)[1:], later])
        before = {file: file.read_bytes() for file in (path / "journal").iterdir()}
        found: list[str] = []
        assert list(admin.verify(path, found)) and found == ["session sess_1"]
        assert {file: file.read_bytes() for file in (path / "journal").iterdir()} == before
        store.close()


def test_tidying_on_a_full_disk_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with folder() as path:
        lived(path)
        create = Disk.create

        def no_room(disk: Disk, file: Path) -> int:
            if file.name.startswith("merged-"):
                raise OSError(28, "No space left on device")
            return create(disk, file)

        monkeypatch.setattr(Disk, "create", no_room)
        with pytest.raises(StoreUnusable, match="no space"):
            list(admin.gc(path))
