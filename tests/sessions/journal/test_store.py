"""The store file: what is written is there again, damage is noticed, and one server at a time opens it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replaced

from holdfast.sessions.conversation.items import Message
from holdfast.sessions.errors import (
    RecordDamaged,
    StorageUnavailable,
    StoreForeign,
    StoreHeld,
    StoreNewer,
    StoreUnusable,
)
from holdfast.sessions.journal import store as store_module
from holdfast.sessions.journal.lock import StoreLock
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.records import (
    AnyOperation,
    Deleted,
    EventReceived,
    Inserted,
    Keyring,
    Origin,
    append,
    drop,
    put,
)
from holdfast.sessions.journal.replay import condensed, replay
from holdfast.sessions.journal.segment import (
    FORMAT,
    HEADER_BYTES,
    LOG_MAGIC,
    LOG_START,
    RECORD_BYTES,
    Kind,
    bytes_at,
    decoded_header,
    encoded_header,
    offset_of,
)
from holdfast.sessions.journal.store import JournalStore
from holdfast.tests.stored_files import bytes_below

from .journal_stage import MODEL, SMALL, birth, folder, record_of, store_in

HELLO = Inserted(item=Message(id="item_1", role="user", text="hello"))


def test_what_is_written_is_there_after_a_restart() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, HELLO), append(1, 1, EventReceived(event="e"))])
        with store_in(path) as store:
            stored = store.session(1)
            assert stored.record == record_of(1) and stored.operations == (HELLO, EventReceived(event="e"))
            found = store.handle(stored.keyring.fresh[0])
            assert found is not None and found[0] == 1
            assert store.logs.next_session > 2 and store.handle(b"x" * 32) is None


@pytest.mark.parametrize("left", [1, 2])
def test_a_group_that_a_crash_cut_off_is_not_there_at_all(left: int) -> None:
    """The machine loses power when ``left`` of the group's three records are on the disk."""
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, HELLO)])
            for index in (1, 2):
                start = store.logs.active.end  # type: ignore[union-attr]
                store.write([append(1, index, HELLO)])
            log = store.logs.active
            assert log is not None
            size = log.end - start
            store.write([append(1, index, HELLO) for index in (3, 4, 5)])
            end = log.end
        os.truncate(log.path, end - (3 - left) * size)
        log.path.with_suffix(".index").unlink(missing_ok=True)
        with store_in(path) as store:
            assert len(store.session(1).operations) == 3


@pytest.mark.parametrize("kind", [Kind.OPERATION, Kind.SESSION, Kind.KEYRING])
@pytest.mark.parametrize("index", [True, False])
def test_every_flipped_bit_of_a_record_is_noticed(kind: Kind, index: bool) -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, HELLO), *birth(2), append(2, 0, HELLO)])
            location = store.sessions.location(1, kind, 0)
            size = RECORD_BYTES + len(store.logs.read(location).payload)
        (log,) = logs_of(path)
        whole = log.read_bytes()
        index_file = log.with_suffix(".index")
        told = index_file.read_bytes()
        for bit in range(0, 8 * size, 5):
            spoilt = bytearray(whole)
            spoilt[offset_of(location) + bit // 8] ^= 1 << bit % 8
            log.write_bytes(spoilt)
            index_file.write_bytes(told)
            if not index:
                index_file.unlink()
            with store_in(path) as store:
                if index:
                    assert store.damaged() == [1] and store.logs.findings.lost == 0
                    with pytest.raises(RecordDamaged):
                        store.session(1)
                else:  # its session is not known
                    assert store.logs.findings.lost == 1
                assert store.session(2).operations == (HELLO,)
        log.write_bytes(whole)
        with store_in(path) as store:
            assert store.session(1).operations == (HELLO,) and store.session(2).operations == (HELLO,)


def test_a_record_in_anothers_location_or_a_missing_one_is_noticed() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, HELLO), append(1, 1, HELLO), append(1, 2, HELLO)])
            first, second = (store.sessions.location(1, Kind.OPERATION, index) for index in (0, 1))
        (log,) = logs_of(path)
        data = bytearray(log.read_bytes())
        size = bytes_at(first)
        assert bytes_at(second) == size
        copy = data[offset_of(second) : offset_of(second) + size]
        data[offset_of(first) : offset_of(first) + size] = copy
        log.write_bytes(data)
        with store_in(path) as store, pytest.raises(RecordDamaged, match="operation 0 is damaged"):
            store.session(1)
        log.with_suffix(".index").unlink()
        with store_in(path) as store:
            with pytest.raises(RecordDamaged, match="operation 0 is missing"):
                store.session(1)
            assert store.logs.findings.lost == 1


def test_a_damaged_keyring_opens_nothing_and_its_handle_says_so() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), *birth(2)])
            digest, other = (store.session(number).keyring.fresh[0] for number in (1, 2))
            location = store.sessions.location(1, Kind.KEYRING, 0)
        (log,) = logs_of(path)
        spoil(log, offset_of(location) + 50)
        with store_in(path) as store:
            found = store.handle(digest)
            assert found is not None and found[0] == 1
            with pytest.raises(RecordDamaged):
                store.session(1)
            assert store.damaged() == [1] and store.handle(other) is not None


def test_the_journal_grows_until_its_limit_and_then_the_oldest_go() -> None:
    settings = replace(SMALL, max_bytes=1 << 20)
    big = Inserted(item=Message(id="item_1", role="user", text="x" * 100_000))
    with folder() as path, store_in(path, settings) as store:
        number = 0
        with pytest.raises(StorageUnavailable, match="may have no more"):  # noqa: PT012
            for number in range(1, 30):
                store.write([*birth(number), append(number, 0, big)])
        assert store.full
        assert number > 4, "it had grown"
        store.session(number - 1)
        assert store.make_room(frozenset({number - 1}))
        store.write([*birth(number), append(number, 0, big)])
        assert store.session(number).operations == store.session(number - 1).operations == (big,)
        with pytest.raises(RecordDamaged):
            store.session(1)


def test_retention_lets_the_oldest_go_and_keeps_the_live() -> None:
    with folder() as path, store_in(path, replace(SMALL, max_sessions=3)) as store:
        for number in range(1, 7):
            store.write([*birth(number), append(number, 0, HELLO)])
        digest = store.session(2).keyring.fresh[0]
        assert store.sweep(frozenset({1})) == 3
        assert store.session(1).operations == (HELLO,)
        assert kept_in(store) == [1, 5, 6] and store.statistics()["journal_forgotten_number"] == 3
        assert store.handle(digest) is None
    with folder() as path, store_in(path, replace(SMALL, max_age_seconds=60)) as store:
        store.write(birth(1))
        assert store.sweep(frozenset()) == 0
    with folder() as path, store_in(path, replace(SMALL, max_age_seconds=-1)) as store:
        store.write(birth(1))
        assert store.sweep(frozenset(), aged=False) == 0, "by a clock that may be wrong"
        assert store.sweep(frozenset()) == 1


def test_a_flood_of_one_tenant_costs_another_none_of_its_sessions() -> None:
    with folder() as path, store_in(path, replace(SMALL, max_sessions=8)) as store:
        for number in (1, 2):
            store.write([*birth(number, salt=b"quiet"), append(number, 0, HELLO)])
        for number in range(3, 23):
            store.write([*birth(number, salt=b"flood"), append(number, 0, HELLO)])
        assert store.sweep(frozenset()) == 14
        assert kept_in(store) == [1, 2, *range(17, 23)]


def test_a_full_journal_makes_room_at_the_tenant_that_holds_most() -> None:
    big = Inserted(item=Message(id="item_1", role="user", text="x" * 8000))
    with folder() as path, store_in(path) as store:
        for number in range(1, 81):
            store.write([*birth(number, salt=b"quiet"), append(number, 0, HELLO)])
        for number in range(81, 151):
            store.write([*birth(number, salt=b"flood"), append(number, 0, big)])
        assert store.make_room(frozenset({81}))
        assert kept_in(store) == [*range(1, 82), *range(146, 151)]


def test_forks_that_were_never_opened_are_forgotten_first() -> None:
    with folder() as path, store_in(path, replace(SMALL, max_sessions=4)) as store:
        store.write([*birth(1), append(1, 0, HELLO)])
        store.write([*birth(2), append(2, 0, HELLO)])
        for number in range(3, 7):
            store.write(birth(number, origin=Origin(session=1, operations=1)))
        opened = Keyring(fresh=(b"a" * 32,), used=b"b" * 32)
        store.write([put(3, opened)])
        assert store.sweep(frozenset()) == 2
        assert kept_in(store) == [1, 2, 3, 6]
        assert store.session(6).operations == (HELLO,)


def kept_in(store: JournalStore) -> list[int]:
    return sorted(state.number for state in store.sessions.states.values() if state.kept)


def test_a_forgotten_session_leaves_nothing() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, HELLO), *birth(2), append(2, 0, HELLO)])
            store.write([drop(1)])
            store.write([drop(2)])
            assert not store.sessions.states and store.sessions.handles.get(bytes([1]) * 32) is None
            store.logs.roll()
            while store.remove_dead():
                pass
            assert not [one for one in store.logs.logs.values() if one.end > LOG_START]
        assert HELLO.item.text.encode() not in bytes_below(path / "journal")


def test_a_forgotten_session_stays_forgotten_while_an_older_log_has_its_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, HELLO), *birth(2), append(2, 0, HELLO)])
            store.logs.roll()
            store.write([*birth(3), drop(1)])
            newer = store.logs.active
            assert newer is not None
            store.logs.roll()
            monkeypatch.setattr(store_module, "DEAD_SHARE", -1.0)
            monkeypatch.setattr(store_module, "MOST_VICTIMS", 1)
            store.merge()
            assert newer not in store.logs.logs.values()
        with store_in(path) as store:
            assert sorted(store.sessions.states) == [2, 3]
            with pytest.raises(RecordDamaged, match="missing"):
                store.session(1)


def test_a_line_of_forks_longer_than_a_stack_is_deep_is_forgotten() -> None:
    length = sys.getrecursionlimit() + 200
    with folder() as path, store_in(path) as store:
        for number in range(1, length + 1):
            origin = Origin(session=number - 1, operations=1) if number > 1 else None
            record = replaced(record_of(number), origin=origin)
            store.write([put(number, record), append(number, 0, HELLO)])
        store.write([drop(number) for number in range(1, length)])
        assert store.statistics()["journal_sessions"] == length, "the last one follows on all of them"
        store.write([drop(length)])
        assert store.statistics()["journal_sessions"] == 0


def test_another_models_store_and_a_later_versions_are_refused() -> None:
    with folder() as path:
        with store_in(path):
            pass
        with pytest.raises(StoreForeign, match=str(path)), store_in(path, model=b"another"):
            pass
        (log,) = logs_of(path)
        rewrite_header(log, format=FORMAT + 1)
        with pytest.raises(StoreNewer, match=f"format {FORMAT + 1}"), store_in(path):
            pass


def test_another_models_store_is_ignored_with_one_line_and_left_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, HELLO)])
        (log,) = logs_of(path)
        before = log.read_bytes()
        for sessions in (0, 1):
            caplog.clear()
            other = open_for(path, b"another", SMALL)
            assert len(other.sessions.states) == sessions
            if not sessions:
                other.write([*birth(1), append(1, 0, EventReceived(event="another's"))])
            assert other.session(1).operations == (EventReceived(event="another's"),)
            other.close()
            (line,) = caplog.messages
            assert "another model" in line and "ignored" in line and str(path) in line
        assert log.read_bytes() == before
        caplog.clear()
        with store_in(path) as store:
            assert store.session(1).operations == (HELLO,)
        own = open_for(path, MODEL, SMALL)
        own.close()
        assert not caplog.messages


def test_a_later_versions_store_is_ignored_with_one_line_and_left_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, HELLO)])
        (log,) = logs_of(path)
        rewrite_header(log, format=FORMAT + 1)
        before = log.read_bytes()
        store = open_for(path, MODEL, SMALL)
        assert not store.sessions.states
        store.close()
        (line,) = caplog.messages
        assert f"format {FORMAT + 1}" in line and "ignored" in line
        assert log.read_bytes() == before


def test_a_log_that_was_cut_short_is_the_log_up_to_there(caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        with store_in(path) as store:
            ends = [LOG_START]
            for number in range(1, 9):
                store.write([*birth(number), append(number, 0, HELLO)])
                ends.append(store.logs.active.end)
        (log,) = logs_of(path)
        whole, told = log.read_bytes(), log.with_suffix(".index").read_bytes()
        for length in (0, 1, 4096, 8192, *range(ends[0], ends[-1], 77)):
            for stray in path.glob("journal/*"):
                stray.unlink()
            log.write_bytes(whole[:length])
            log.with_suffix(".index").write_bytes(told)
            caplog.clear()
            with store_in(path) as store:
                there = sum(end <= length for end in ends[1:])
                assert sorted(store.sessions.states) == list(range(1, there + 1))
                assert all(store.session(number).operations == (HELLO,) for number in range(1, there + 1))
                assert f"{log} lost its end" in caplog.text and not store.damaged()
                store.write([*birth(20), append(20, 0, HELLO)])
            with store_in(path) as store:
                assert store.session(20).operations == (HELLO,) and len(store.sessions.states) == there + 1


def test_a_file_that_is_no_log_is_put_aside_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write(birth(1))
        (log,) = logs_of(path)
        log.with_suffix(".index").unlink()
        log.write_bytes(b"\xff" * 20_000)
        with store_in(path) as store:
            store.write(birth(1))
        assert str(log) in caplog.text and "its sessions are lost" in caplog.text
        assert log.with_suffix(".unreadable").read_bytes() == b"\xff" * 20_000
        with store_in(path) as store:
            assert store.session(1).record == record_of(1)


def test_a_session_that_is_not_made_shorter_is_looked_at_again_when_it_has_grown() -> None:
    """As long as a reply runs nothing can be: each look reads it all."""
    looks: list[int] = []

    def decline(operations: Sequence[AnyOperation]) -> None:
        looks.append(len(operations))

    with folder() as path, store_in(path, replace(SMALL, snapshot_operations=16)) as store:
        store.write(birth(1))
        for index in range(64):
            store.write([append(1, index, HELLO)])
            for number in list(store.long):
                assert not store.condense(number, decline)
        assert looks == [16, 20, 25, 32, 40, 50, 63]
        store.write([drop(1), *birth(1)])
        for index in range(16):
            store.write([append(1, index, HELLO)])
        assert store.long == {1}, "what was dropped says nothing of another"


def test_a_condensed_session_is_checked_like_any_other(tmp_path: Path) -> None:
    said = [Inserted(item=Message(id=f"i{at}", role="user", text="words " * at)) for at in range(8)]
    with store_in(tmp_path / "store") as store:
        store.write([*birth(1), *(append(1, at, one) for at, one in enumerate([*said, Deleted(item="i3")]))])
        before = replay(store.session(1).operations, max_items=9)
        count = store.session(1).written
        assert store.condense(1, condensed)
        stored = store.session(1)
        assert (len(stored.operations), stored.written) == (1, count)
        assert replay(stored.operations, max_items=9).history.items() == before.history.items()
        assert not store.condense(1, condensed), "there is nothing to gain"
        store.write([append(1, count, EventReceived(event="e"))])
        assert len(store.session(1).operations) == 2
        location = store.sessions.location(1, Kind.SNAPSHOT, count - 1)
        size = RECORD_BYTES + len(store.logs.read(location).payload)
    log = max(logs_of(tmp_path / "store"))
    for at in range(0, size, 7):
        whole = log.read_bytes()
        spoil(log, offset_of(location) + at, 4)
        with store_in(tmp_path / "store") as store, pytest.raises(RecordDamaged):
            store.session(1)
        log.write_bytes(whole)


def test_the_second_server_waits_and_learns_which_process_holds_the_store() -> None:
    program = (
        "import sys; from pathlib import Path; from holdfast.sessions.journal.lock import StoreLock\n"
        "held = StoreLock(Path(sys.argv[1])).acquire(1.0); print('held', flush=True); sys.stdin.read()"
    )
    with folder() as path:
        holder = subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None and holder.stdin is not None
        with holder:
            assert holder.stdout.readline() == b"held\n"
            began = time.monotonic()
            with pytest.raises(StoreHeld, match=rf"process {holder.pid}\b"):
                StoreLock(path).acquire(0.2)
            assert time.monotonic() - began > 0.19, "it waited"
            holder.kill()
            holder.wait()
        with StoreLock(path).acquire(5.0):
            assert signed(path)


def test_on_a_full_disk_a_store_is_locked_whether_the_holder_can_be_written_or_not() -> None:
    """A server that is started again on a full disk must come up: it says what is the matter."""
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        (path / "lock").write_text("1234567890")

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "pwrite", full)
        with StoreLock(path).acquire(0.0):
            assert not (path / "lock").read_text(), "another's name would mislead"
            with pytest.raises(StoreHeld, match="held by another process"):
                StoreLock(path).acquire(0.0)
        patch.undo()
        with StoreLock(path).acquire(0.0):
            assert signed(path)


def signed(path: Path) -> bool:
    return (path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="file"):
        StoreLock(tmp_path / "file" / "store").acquire(0.0)


def logs_of(path: Path) -> list[Path]:
    return sorted((path / "journal").glob("*.log"))


def spoil(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def rewrite_header(log: Path, **changes: object) -> None:
    data = log.read_bytes()
    header = decoded_header(data[:HEADER_BYTES], LOG_MAGIC)
    assert header is not None
    log.write_bytes(encoded_header(replaced(header, **changes), LOG_MAGIC) * 2 + data[LOG_START:])


def test_a_group_that_fails_in_the_middle_is_not_there() -> None:
    with folder() as path, store_in(path) as store:
        store.write(birth(1))
        with pytest.raises(TypeError):
            store.write([append(1, 0, HELLO), put(2, object())])
        assert store.session(1).operations == ()


def test_what_comes_for_a_session_that_was_forgotten_counts_for_nothing() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), append(1, 0, EventReceived(event="one"))])
            store.write([*birth(2), append(2, 0, EventReceived(event="two"))])
            before = store.statistics()["journal_live_bytes"]
            store.erase([2])
            store.write([append(2, 1, EventReceived(event="late")), put(2, Keyring(fresh=(bytes(32),)))])
            assert list(store.sessions.states) == [1] and store.handle(bytes(32)) is None
            assert store.statistics()["journal_live_bytes"] < before
        with store_in(path) as store:
            assert list(store.sessions.states) == [1] and not store.damaged()
