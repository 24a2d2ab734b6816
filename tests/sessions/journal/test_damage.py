"""Damage to the journal's files costs the sessions that have records in the damaged part, and no others,
now and later."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from msgspec.structs import replace as replaced

from holdfast.sessions.conversation.items import Message, Preamble
from holdfast.sessions.errors import HandleUnknown, RecordDamaged, StorageUnavailable
from holdfast.sessions.journal import admin, segment
from holdfast.sessions.journal import store as store_module
from holdfast.sessions.journal.folder import Disk
from holdfast.sessions.journal.records import (
    EventReceived,
    Inserted,
    Origin,
    SessionSnapshot,
    append,
    drop,
    put,
)
from holdfast.sessions.journal.segment import LOG_START, Kind, offset_of, slot_of
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.registry import Reopened
from holdfast.sessions.settings import JournalShare

from ..session_stage import ask, reciting, run
from .bad_disks import PAGE, BadDisk, Crash, cut, flipped, killed, swapped, zeroed
from .journal_stage import MODEL, SMALL, birth, folder, record_of, registry_in, store_in

Damage = Callable[[bytearray, Random], None]
SESSIONS = 24
ROUNDS = 5
NUMBERS = replace(SMALL, segment_bytes=24 << 10)


def word(number: int, at: int) -> str:
    return f"<{number}-{at}>" + "word" * ((number * 5 + at * 7) % 60)


def filled(path: Path) -> None:
    """Sessions that write alternately, over several logs; some are forks, some were forgotten."""
    with store_in(path, NUMBERS) as store:
        for number in range(1, SESSIONS + 1):
            origin = Origin(session=number - 1, operations=0) if number % 8 == 0 else None
            record = replaced(record_of(number), origin=origin)
            store.write([put(number, record), *birth(number)[1:]])
        for at in range(ROUNDS):
            for number in range(1, SESSIONS + 1):
                store.write([append(number, at, EventReceived(event=word(number, at)))])
        store.write([drop(5), drop(13)])


def there() -> list[int]:
    return [number for number in range(1, SESSIONS + 1) if number not in (5, 13)]


def said(store: JournalStore, number: int) -> list[str]:
    return [operation.event for operation in store.session(number).operations]


def wanted(number: int) -> list[str]:
    return [word(number, at) for at in range(ROUNDS)]


def files_of(path: Path) -> list[Path]:
    return sorted((path / "journal").glob("*.log"))


def held(path: Path) -> dict[tuple[Path, int], tuple[int, int]]:
    """Where each session's records lie that count: log and offset, number and length."""
    found = {}
    store = JournalStore(path, MODEL, NUMBERS, write=False)
    for state in store.sessions.states.values():
        for location in state.locations():
            if location:
                log = store.logs.logs[slot_of(location)]
                found[log.path, offset_of(location)] = (state.number, store.logs.size(location))
    store.close()
    return found


def hit(
    before: bytes, after: bytes, log: Path, locations: dict[tuple[Path, int], tuple[int, int]]
) -> tuple[set[int], set[int]]:
    """Sessions of which a record is not what it was, and those of them of which more than a record's padding
    may have changed."""
    struck, sure = set(), set()
    for (path, offset), (number, size) in locations.items():
        old, new = before[offset : offset + size], after[offset : offset + size]
        if path == log and old != new:
            struck.add(number)
            filled = len(old.rstrip(b"\0"))
            sure |= {number} if old[:filled] != new[:filled] else set()
    return struck, sure


@pytest.mark.parametrize("down", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("damage", [zeroed, flipped, swapped, cut])
@pytest.mark.parametrize("seed", range(8))
def test_damage_costs_the_sessions_that_have_records_there(down: bool, damage: Damage, seed: int) -> None:
    rng = Random(f"{seed} {down} {damage.__name__}")
    with folder() as path:
        filled(path)
        locations = held(path)
        log = rng.choice(files_of(path))
        before = log.read_bytes()
        after = bytearray(before)
        damage(after, rng)
        struck, sure = hit(before, bytes(after).ljust(len(before), b"\0"), log, locations)
        store = None if down else JournalStore(path, MODEL, NUMBERS)
        with log.open("r+b") as file:
            file.write(after)
            file.truncate(len(after))
        try:
            for _ in range(2):  # and after a restart
                named: set[int] = set()
                store = store or JournalStore(path, MODEL, NUMBERS)
                for number in there():
                    try:
                        words = said(store, number)
                        # Of a log that lost its end a session has what was there before.
                        short = damage is cut and number in struck
                        assert words == wanted(number)[: len(words)] if short else words == wanted(number)
                    except RecordDamaged:
                        named.add(number)
                assert named <= struck, "no others"
                if damage is not cut:  # the end that was lost may have said that they are forgotten
                    for number in (5, 13):
                        with pytest.raises(RecordDamaged):
                            store.session(number)
                assert set(store.damaged()) <= struck
                assert named <= set(store.damaged()), "their sessions are known"
                if damage is not cut:
                    assert sure <= named
                store.write([*birth(100), append(100, 0, EventReceived(event="new"))])
                assert said(store, 100) == ["new"]
                store.write([drop(100)])
                store.close()
                store = None
        finally:
            if store is not None:
                store.close()


def test_the_last_record_of_a_session_does_not_vanish_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        with store_in(path) as store:
            for number in (1, 2):
                store.write([*birth(number), append(number, 0, EventReceived(event="a"))])
                store.write([append(number, 1, EventReceived(event="acknowledged" * 9))])
            location = store.sessions.location(2, Kind.OPERATION, 1)
        (log,) = files_of(path)
        data = log.read_bytes()
        for spoilt in (data[: offset_of(location)] + bytes(len(data) - offset_of(location)),):
            log.write_bytes(spoilt)
            for _ in range(2):
                caplog.clear()
                with store_in(path) as store:
                    assert said(store, 1)[0] == "a" and store.damaged() == [2]
                    with pytest.raises(RecordDamaged):
                        store.session(2)
                assert "sess_2" in caplog.text


def test_lost_records_of_unknown_sessions_are_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The log and the index beside it, both damaged."""
    with folder() as path:
        filled(path)
        log = files_of(path)[1]
        log.with_suffix(".index").unlink()
        data = bytearray(log.read_bytes())
        data[LOG_START + PAGE : LOG_START + 2 * PAGE] = bytes(PAGE)
        log.write_bytes(data)
        with store_in(path, NUMBERS) as store:
            lost = store.logs.findings.lost
            assert lost > 5 and store.statistics()["journal_lost_records"] == lost
            right = [number for number in there() if number not in store.damaged()]
            assert right
            for number in right:
                assert said(store, number) == wanted(number)[: len(said(store, number))]
        assert f"{lost} records of unknown sessions are lost" in caplog.text and str(log) in caplog.text


@pytest.mark.parametrize("damage", [zeroed, flipped, swapped, cut])
@pytest.mark.parametrize("seed", range(4))
def test_damage_to_an_index_costs_nothing(damage: Damage, seed: int) -> None:
    rng = Random(f"{seed} {damage.__name__}")
    with folder() as path:
        filled(path)
        for log in files_of(path):
            data = bytearray(log.with_suffix(".index").read_bytes())
            damage(data, rng)
            log.with_suffix(".index").write_bytes(data)
        with store_in(path, NUMBERS) as store:
            assert {number: said(store, number) for number in there()} == {n: wanted(n) for n in there()}
            assert not store.damaged()


def test_another_times_index_is_believed_only_where_the_log_agrees() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, EventReceived(event="a"))])
        (log,) = files_of(path)
        old = log.with_suffix(".index").read_bytes()
        with store_in(path) as store:
            store.write([*birth(2), append(1, 1, EventReceived(event="b"))])
        log.with_suffix(".index").write_bytes(old)
        for _ in range(2):
            with store_in(path) as store:
                assert said(store, 1) == ["a", "b"] and said(store, 2) == [] and not store.damaged()


def test_text_that_looks_like_a_record_is_never_taken_for_one() -> None:
    """A client knows the format, and even a record of its own with the right checksum of its own location."""
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, EventReceived(event="mine"))])
            location = store.sessions.location(1, Kind.OPERATION, 0)
            log = files_of(path)[0].read_bytes()
            genuine = log[offset_of(location) : offset_of(location) + store.logs.size(location)]
            frame = segment.Frame(segment.FORMAT, store.logs.header.sync, 0)
            word = 7 << 16 | Kind.OPERATION << 8 | 1
            guessed = segment.encoded_record(frame, 0, 10**6, 2, word, 0, b"\x80")
            forged = (genuine + guessed) * 20
            aligned = [bytes(shift) + forged for shift in range(8)]
            ids = [(b"x" * shift + forged) for shift in range(8)]
            for at, payload in enumerate([*aligned, *ids]):
                text = payload.decode("latin-1")
                store.write([append(1, 1 + at, Inserted(item=Message(id="i", role="user", text=text)))])
                store.logs.append([segment.Fresh(1, 100 + at, Kind.OPERATION, payload)])
            store.write([*birth(2), append(2, 0, EventReceived(event="theirs"))])
        (file,) = files_of(path)
        data = file.read_bytes()
        for at in range(LOG_START, len(data), 512):
            spoilt = bytearray(data)
            spoilt[at : at + 64] = bytes(64)
            file.write_bytes(spoilt)
            file.with_suffix(".index").unlink(missing_ok=True)
            with store_in(path) as store:
                assert set(store.sessions.states) <= {1, 2}
                if 2 in store.sessions.states:
                    with suppress(RecordDamaged):
                        assert said(store, 2) in ([], ["theirs"])
                assert store.sessions.states[1].count <= 100 + 16


def test_damage_to_what_forks_share_costs_them_too_and_only_them() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), *(append(1, at, EventReceived(event=f"{at}")) for at in range(6))])
            for number, operations in ((2, 2), (3, 4), (4, 6)):
                record = replaced(record_of(number), origin=Origin(session=1, operations=operations))
                store.write([put(number, record), *birth(number)[1:]])
                store.write([append(number, 0, EventReceived(event="own"))])
            store.write(birth(5))
            location = store.sessions.location(1, Kind.OPERATION, 3)
            store.write([drop(1)])
        (log,) = files_of(path)
        data = bytearray(log.read_bytes())
        data[offset_of(location) + 50] ^= 1
        log.write_bytes(data)
        for _ in range(2):
            with store_in(path) as store:
                assert said(store, 2) == ["0", "1", "own"] and store.session(5)
                for number in (3, 4):
                    with pytest.raises(RecordDamaged):
                        store.session(number)
                assert store.damaged() == [3, 4]
                store.logs.roll()
                store.rewrite()
                assert said(store, 2) == ["0", "1", "own"]


def test_a_damaged_session_is_left_out_of_the_fork_tree() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write(birth(1))
            for number in (2, 3):
                record = replaced(record_of(number), origin=Origin.of(1, 0), tree=Origin.of(1, 0))
                store.write([put(number, record), *birth(number)[1:]])
            location = store.sessions.location(2, Kind.SESSION, 0)
        (log,) = files_of(path)
        data = bytearray(log.read_bytes())
        data[offset_of(location) + 50] ^= 1
        log.write_bytes(data)
        with store_in(path) as store:
            for number in (1, 3):
                assert [one for one, _ in store.fork_tree(number)] == [1, 3]
            with pytest.raises(RecordDamaged):
                store.fork_tree(2)


def test_forks_that_an_earlier_version_wrote_are_in_the_fork_tree() -> None:
    """Its records do not say which session the tree began with."""
    with folder() as path:
        with store_in(path) as store:
            store.write(birth(1))
            for number in (2, 3):
                origin = Origin.of(number - 1, 0)
                fresh = put(number, replaced(record_of(number), origin=origin, root="sess_1"))
                earlier = msgspec.msgpack.encode(msgspec.msgpack.decode(fresh.extra)[: 7 - 2 * (number - 1)])
                store.write([replaced(fresh, extra=earlier), *birth(number)[1:]])
            assert store.fork_tree(3) == store.fork_tree(1)
        with store_in(path) as store:
            for number in (1, 2, 3):
                assert [one for one, _ in store.fork_tree(number)] == [1, 2, 3]


@pytest.mark.parametrize("lost", [False, True], ids=["damaged", "absent"])
def test_a_fork_with_a_damaged_snapshot_is_damaged_like_any_session(lost: bool) -> None:
    """The session that it was forked from is gone: it was not needed any more."""
    with folder() as path:
        with store_in(path, replace(SMALL, erase_seconds=0.0)) as store:
            store.write([*birth(1), *(append(1, at, EventReceived(event=f"{at}")) for at in range(2))])
            store.write([*birth(2, origin=Origin.of(1, 2)), append(2, 0, EventReceived(event="own"))])
            store.erase([1], deleted=True)
            store.logs.roll()
            snapshot = SessionSnapshot(preamble=Preamble(), rendered=Preamble())
            assert store.condense(2, lambda operations: (len(operations), snapshot))
            location = store.sessions.location(2, Kind.SNAPSHOT, 0)
            log = store.logs.logs[slot_of(location)].path
            store.logs.roll()
            while store.wants_merge and store.merge():
                pass
            assert log.exists() and store.session(2).operations == (snapshot,)
            assert not any(one.has(1) for one in store.logs.logs.values())
        if lost:
            log.unlink()
            log.with_suffix(".index").unlink()
        else:
            data = bytearray(log.read_bytes())
            data[offset_of(location) + 50] ^= 1
            log.write_bytes(data)
        with store_in(path) as store:
            assert store.damaged() == [2] * lost, "what an index does not tell is found when it is read"
            with pytest.raises(RecordDamaged):
                store.session(2)
            assert store.damaged() == [2]


def test_damage_is_remembered_when_its_log_is_rewritten() -> None:
    """And what is left of the session is kept, until it is forgotten."""
    with folder() as path:
        with store_in(path) as store:
            for number in (1, 2):
                store.write(
                    [*birth(number), *(append(number, at, EventReceived(event=f"{at}")) for at in range(3))]
                )
            location = store.sessions.location(1, Kind.OPERATION, 1)
        (log,) = files_of(path)
        data = bytearray(log.read_bytes())
        data[offset_of(location) + 50] ^= 1
        log.write_bytes(data)
        for _ in range(3):
            with store_in(path) as store:
                assert store.damaged() == [1] and said(store, 2) == ["0", "1", "2"]
                store.logs.roll()
                store.rewrite()
                assert store.logs.read(store.sessions.location(1, Kind.OPERATION, 2)).payload
        assert not log.exists()
        with store_in(path) as store:
            store.write([drop(1)])
        with store_in(path) as store:
            assert not store.damaged() and said(store, 2) == ["0", "1", "2"]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_process_that_dies_between_any_two_writes_of_a_merge_loses_nothing(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "DEAD_SHARE", 0.01)
    at, reached = 0, True
    while reached:
        at += 1
        with folder() as path:
            filled(path)
            disk = BadDisk()
            store = JournalStore(path, MODEL, NUMBERS, disk=disk)
            store.write([drop(3), drop(21)])
            store.logs.roll()
            disk.arm(at, share=share)
            reached = False
            try:
                while store.merge() or (
                    store.wants_merge
                    and any(one.dead for one in store.logs.logs.values() if one is not store.logs.active)
                ):
                    pass
            except Crash:
                reached = True
            killed(store)
            with store_in(path, NUMBERS) as store:
                assert not store.damaged() and not store.logs.findings.lost
                kept = [number for number in there() if number not in (3, 21)]
                assert sorted(store.sessions.states) == kept
                assert {number: said(store, number) for number in kept} == {n: wanted(n) for n in kept}
                names = os.listdir(path / "journal")
                assert not [name for name in names if name.endswith(".new")]
    assert at > 8


@run
async def test_two_hundred_damaged_resumes_cost_the_whole_sessions_nothing() -> None:
    with folder() as path:
        async with registry_in(path, reciting("Fine.", "Fine.", "Fine.")) as registry:
            bad, good = registry.create(), registry.create()
            await ask(bad, "hello")
            await ask(good, "hello")
            handles = [await left(session) for session in (bad, good)]
            numbers = [session.log.number for session in (bad, good)]
        store = JournalStore(path, MODEL, SMALL, write=False)
        location = store.sessions.location(numbers[0], Kind.OPERATION, 0)
        store.close()
        (log,) = files_of(path)
        data = bytearray(log.read_bytes())
        data[offset_of(location) + 50] ^= 1
        log.write_bytes(data)
        before = len(os.listdir("/proc/self/fd"))
        async with registry_in(path, reciting("Still fine.")) as registry:
            for _ in range(200):
                with pytest.raises(RecordDamaged):
                    await registry.resume(handles[0], b"")
            found = await registry.resume(handles[1], b"")
            assert isinstance(found, Reopened)
            assert (await ask(found.session, "hello")).items[0].text == "Still fine."
            assert (await registry.journal.statistics())["journal_damaged"] == 1
            with pytest.raises(HandleUnknown):
                await registry.resume("another", b"")
        assert len(os.listdir("/proc/self/fd")) == before


async def left(session: object) -> str:
    """Its handle, once all is durable."""
    ticket = session.log.sync()
    assert ticket is not None
    await ticket
    return session.handles.current


def test_damage_found_on_a_full_disk_is_known_after_the_next_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with folder() as path:
        store = JournalStore(path, MODEL, SMALL)
        store.write([*birth(1), append(1, 0, EventReceived(event="first"))])
        store.write([append(1, 1, EventReceived(event="second" * 40))])
        store.write([*birth(3), append(3, 0, EventReceived(event="x" * 9000))])
        location = store.sessions.states[1].operations[1]
        log = store.logs.logs[slot_of(location)]
        store.logs.roll()
        data = bytearray(log.path.read_bytes())
        data[offset_of(location) + 80] ^= 1
        log.path.write_bytes(data)
        with monkeypatch.context() as full:
            full.setattr(Disk, "write", no_room)
            with pytest.raises(RecordDamaged):
                store.session(1)
        store.write(birth(2))
        store.erase([3])
        while store.wants_merge:
            store.merge()
        assert not log.path.exists()
        store.close()
        store = JournalStore(path, MODEL, SMALL)
        assert store.damaged() == [1]
        store.close()


def no_room(disk: Disk, fd: int, data: bytes, offset: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("index", [True, False])
def test_a_sector_that_cannot_be_read_is_damage_like_any_other(
    index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folder() as path:
        store = JournalStore(path, MODEL, SMALL)
        for number in range(1, 20):
            store.write([*birth(number), append(number, 0, EventReceived(event="x" * 4000))])
        log = store.logs.active
        assert log is not None
        bad = 10 * PAGE
        hit = {
            number
            for number, state in store.sessions.states.items()
            for location in state.locations()
            if offset_of(location) < bad + PAGE and offset_of(location) + segment.bytes_at(location) > bad
        }
        killed(store)
        if not index:
            log.index_path.unlink()
        read = Disk.read

        def fails(disk: Disk, fd: int, length: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{fd}") == str(log.path) and offset <= bad < offset + length:
                raise OSError(errno.EIO, "Input/output error")
            return read(disk, fd, length, offset)

        monkeypatch.setattr(Disk, "read", fails)
        for _ in range(2):
            store = JournalStore(path, MODEL, SMALL)
            assert store.logs.findings.damaged and (not index or set(store.damaged()) == hit)
            whole = set(store.sessions.states) - hit
            assert whole >= set(range(1, 20)) - hit
            assert all(store.session(number).operations for number in whole)
            store.close()
        found: list[str] = []
        assert list(admin.verify(path, found)) and found
        assert "rewritten" in "".join(admin.repair(path))


def test_a_damaged_record_of_a_session_without_operations_does_not_stop_retention() -> None:
    shares = {b"tenant": JournalShare(sessions=3, bytes=1 << 20)}
    with folder() as path:
        store = JournalStore(path, MODEL, SMALL)
        for number in range(1, 6):
            store.write(birth(number, salt=b"tenant"))
        location = store.sessions.states[1].record
        log = store.logs.logs[slot_of(location)].path
        store.close()
        data = bytearray(log.read_bytes())
        data[offset_of(location) + 60] ^= 1
        log.write_bytes(data)
        store = JournalStore(path, MODEL, replace(SMALL, tenants=shares))
        store.keep_shares(set())
        assert len([state for state in store.sessions.states.values() if state.kept]) == 3
        store.close()


def test_a_failed_group_that_could_not_be_cut_off_is_cut_off_before_anything_else_is_written() -> None:
    with folder() as path:
        disk = BadDisk()
        store = JournalStore(path, MODEL, SMALL, disk=disk)
        store.write([*birth(1), append(1, 0, EventReceived(event="first"))])
        disk.sync, disk.truncate = fails, fails  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                store.erase([1])
        del disk.sync, disk.truncate
        store.write([append(1, 1, EventReceived(event="second"))])
        killed(store)
        store = JournalStore(path, MODEL, SMALL)
        assert [operation.event for operation in store.session(1).operations] == ["first", "second"]
        store.close()


def fails(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_dead_log_that_cannot_be_read_does_not_close_a_full_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = replace(SMALL, max_bytes=1 << 18, segment_bytes=1 << 14)
    with folder() as path:
        store = JournalStore(path, MODEL, tight)
        store.write([*birth(1), append(1, 0, EventReceived(event="x" * 3000))])
        log = store.logs.active
        assert log is not None
        store.logs.roll()
        log.index_path.unlink()
        store.erase([1])
        read = Disk.read

        def refuses(disk: Disk, fd: int, length: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{fd}") == str(log.path):
                raise OSError(errno.EMFILE, "Too many open files")
            return read(disk, fd, length, offset)

        monkeypatch.setattr(Disk, "read", refuses)
        for number in range(2, 200):
            group = [*birth(number), append(number, 0, EventReceived(event="x" * 3000))]
            try:
                store.write(group)
            except StorageUnavailable:
                assert store.full and store.make_room(frozenset())
                store.write(group)
        store.close()


def test_a_long_record_counts_its_bytes_after_a_restart() -> None:
    wide = replace(SMALL, max_bytes=1 << 30, segment_bytes=64 << 20)
    with folder() as path:
        store = JournalStore(path, MODEL, wide)
        store.write([*birth(1), append(1, 0, EventReceived(event="kept"))])
        store.write([*birth(2), append(2, 0, EventReceived(event="x" * (20 << 20)))])
        live = [one.live for one in store.logs.logs.values()]
        store.logs.roll()
        store.close()
        store = JournalStore(path, MODEL, wide)
        assert [one.live for one in store.logs.logs.values()] == live
        assert store.sessions.states[2].grown > 20 << 20
        store.close()
