"""The store file: what is written is there again, what is damaged is noticed, and who may open it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import lmdb
import pytest
from journal_stage import MODEL, SMALL, birth, folder, record_of, store_in
from msgspec.structs import replace as replaced

from holdfast.sessions.errors import (
    RecordDamaged,
    StorageUnavailable,
    StoreForeign,
    StoreHeld,
    StoreNewer,
    StoreUnusable,
)
from holdfast.sessions.items import Message
from holdfast.sessions.journal.changes import Append, Drop, Put
from holdfast.sessions.journal.lock import StoreLock
from holdfast.sessions.journal.opening import open_for
from holdfast.sessions.journal.records import (
    FORMAT,
    AnyOperation,
    Heard,
    Inserted,
    Origin,
    Snapshot,
    StoreRecord,
    seal,
    unseal,
)
from holdfast.sessions.journal.replay import condensed, replay
from holdfast.sessions.journal.store import STORE_KEY, Table, key_of

FIXTURE = Path(__file__).parent / "stores" / "format_1"
HELLO = Inserted(item=Message(id="item_1", role="user", text="hello"))


def test_what_is_written_is_there_after_a_restart() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), Append(1, 0, HELLO), Append(1, 1, Heard(event="e"))])
        with store_in(path) as store:
            stored = store.session(1)
            assert stored.record == record_of(1) and stored.operations == (HELLO, Heard(event="e"))
            found = store.handle(stored.keyring.fresh[0])
            assert found is not None and found.session == 1
            assert store.next_number() == 2 and store.handle(b"x" * 32) is None


@pytest.mark.parametrize("table", [Table.LOG, Table.SESSIONS, Table.KEYRINGS, Table.TAILS])
def test_every_flipped_bit_of_a_record_is_noticed(table: Table) -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), Append(1, 0, HELLO), *birth(2), Append(2, 0, HELLO)])
        key = key_of(1, 0) if table is Table.LOG else key_of(1)
        for bit in range(0, 8 * len(value_of(path, table, key)), 5):
            whole = value_of(path, table, key)
            spoilt = bytearray(whole)
            spoilt[bit // 8] ^= 1 << bit % 8
            put(path, table, key, bytes(spoilt))
            with store_in(path) as store:
                with pytest.raises(RecordDamaged):
                    store.session(1)
                assert store.damaged == 1 and store.session(2).operations == (HELLO,)
            put(path, table, key, whole)
        with store_in(path) as store:
            assert store.session(1).operations == (HELLO,)


def test_a_record_in_anothers_place_or_a_missing_one_is_noticed() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), Append(1, 0, HELLO), Append(1, 1, Heard(event="e"))])
        first, second = (value_of(path, Table.LOG, key_of(1, index)) for index in (0, 1))
        put(path, Table.LOG, key_of(1, 0), second)
        with store_in(path) as store, pytest.raises(RecordDamaged):
            store.session(1)
        put(path, Table.LOG, key_of(1, 0), first)
        put(path, Table.LOG, key_of(1, 1), None)
        with store_in(path) as store, pytest.raises(RecordDamaged, match="1 operations of 2"):
            store.session(1)


def test_a_flipped_handle_opens_nothing() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write(birth(1))
            digest = store.session(1).keyring.fresh[0]
        spoilt = bytearray(value_of(path, Table.HANDLES, digest))
        spoilt[-1] ^= 1
        put(path, Table.HANDLES, digest, bytes(spoilt))
        with store_in(path) as store:
            assert store.handle(digest) is None and store.damaged == 1


def test_the_map_grows_until_its_limit_and_then_the_oldest_go() -> None:
    settings = replace(SMALL, map_bytes=256 << 10, max_bytes=1 << 20)
    big = Inserted(item=Message(id="item_1", role="user", text="x" * 100_000))
    with folder() as path, store_in(path, settings) as store:
        number = 0
        with pytest.raises(StorageUnavailable, match="may have no more"):  # noqa: PT012
            for number in range(1, 30):
                store.write([*birth(number), Append(number, 0, big)])
        assert store.full
        assert number > 4, "it had grown"
        store.session(number - 1)
        assert store.make_room(frozenset({number - 1}))
        store.write([*birth(number), Append(number, 0, big)])
        assert store.session(number).operations == store.session(number - 1).operations == (big,)
        with pytest.raises(RecordDamaged):
            store.session(1)


def test_retention_lets_the_oldest_go_and_keeps_the_live() -> None:
    with folder() as path, store_in(path, replace(SMALL, max_sessions=3)) as store:
        for number in range(1, 7):
            store.write([*birth(number), Append(number, 0, HELLO)])
        digest = store.session(2).keyring.fresh[0]
        assert store.sweep(frozenset({1})) == 2
        assert store.session(1).operations == (HELLO,)
        assert store.statistics()["journal_sessions"] == 4
        assert store.handle(digest) is None
    with folder() as path, store_in(path, replace(SMALL, max_age_seconds=60)) as store:
        store.write(birth(1))
        assert store.sweep(frozenset()) == 0
    with folder() as path, store_in(path, replace(SMALL, max_age_seconds=-1)) as store:
        store.write(birth(1))
        assert store.sweep(frozenset(), aged=False) == 0, "by a clock that may be wrong"
        assert store.sweep(frozenset()) == 1


def test_a_forgotten_session_leaves_nothing() -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), Append(1, 0, HELLO), *birth(2), Append(2, 0, HELLO)])
            store.write([Drop(1)])
            store.write([Drop(2)])
        for table in set(Table) - {Table.META}:
            with lmdb.open(str(path), max_dbs=6) as environment:
                named = environment.open_db(table.encode())
                with environment.begin() as transaction:
                    assert transaction.stat(named)["entries"] == 0, table


def test_a_line_of_forks_longer_than_a_stack_is_deep_is_forgotten() -> None:
    length = sys.getrecursionlimit() + 200
    with folder() as path, store_in(path) as store:
        for number in range(1, length + 1):
            origin = Origin(session=number - 1, operations=1) if number > 1 else None
            record = replaced(record_of(number), origin=origin)
            store.write([Put(Table.SESSIONS, key_of(number), record), Append(number, 0, HELLO)])
        store.write([Drop(number) for number in range(1, length)])
        assert store.statistics()["journal_sessions"] == length, "the last one follows on all of them"
        store.write([Drop(length)])
        assert store.statistics()["journal_sessions"] == 0


def test_another_models_store_and_a_later_versions_are_refused() -> None:
    with folder() as path:
        with store_in(path):
            pass
        with pytest.raises(StoreForeign, match=str(path)), store_in(path, model=b"another"):
            pass
        later = seal(STORE_KEY, StoreRecord(format=FORMAT + 1, model=MODEL))
        put(path, Table.META, STORE_KEY, later)
        with pytest.raises(StoreNewer, match=f"format {FORMAT + 1}"), store_in(path):
            pass


def test_another_models_store_is_ignored_with_one_line_and_left_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with folder() as path:
        with store_in(path) as store:
            store.write([*birth(1), Append(1, 0, HELLO)])
        before = (path / "data.mdb").read_bytes()
        for sessions in (0, 1):
            caplog.clear()
            other = open_for(path, b"another", SMALL)
            assert other.next_number() == 1 + sessions
            if not sessions:
                other.write([*birth(1), Append(1, 0, Heard(event="another's"))])
            assert other.session(1).operations == (Heard(event="another's"),)
            other.close()
            (line,) = caplog.messages
            assert "another model" in line and "ignored" in line and str(path) in line
        assert (path / "data.mdb").read_bytes() == before
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
            store.write([*birth(1), Append(1, 0, HELLO)])
        put(path, Table.META, STORE_KEY, seal(STORE_KEY, StoreRecord(format=FORMAT + 1, model=MODEL)))
        before = (path / "data.mdb").read_bytes()
        store = open_for(path, MODEL, SMALL)
        assert store.next_number() == 1
        store.close()
        (line,) = caplog.messages
        assert f"format {FORMAT + 1}" in line and "ignored" in line
        assert (path / "data.mdb").read_bytes() == before


@pytest.mark.parametrize("length", [1, 4096, 8192, 20_000])
def test_a_file_that_was_cut_short_is_refused(length: int) -> None:
    with folder() as path:
        with store_in(path) as store:
            for number in range(1, 9):
                store.write([*birth(number), Append(number, 0, HELLO)])
        os.truncate(path / "data.mdb", length)
        with pytest.raises(StoreUnusable, match="cut short"), store_in(path):
            pass


def test_a_file_that_is_no_store_is_refused() -> None:
    with folder() as path:
        (path / "data.mdb").write_bytes(b"\xff" * 20_000)
        with pytest.raises(StoreUnusable, match=str(path)), store_in(path):
            pass


def test_the_first_formats_store_opens(tmp_path: Path) -> None:
    """Written by format 1, never again: later versions must read it."""
    shutil.copytree(FIXTURE, tmp_path / "store")
    with store_in(tmp_path / "store") as store:
        stored = store.session(1)
        kinds = [type(operation).__name__ for operation in stored.operations]
        assert kinds == ["Heard", "Inserted", "Heard", "Begun", "Said", "Ended", "Configured", "Deleted"]
        assert stored.record.id == "sess_1" and store.handle(stored.keyring.fresh[0]) is not None
        store.write([Append(1, len(stored.operations), HELLO)])
        assert store.session(1).operations[-1] == HELLO
        assert store.condense(1, partial(condensed, max_items=9)) and isinstance(
            store.session(1).operations[0], Snapshot
        )
    with store_in(tmp_path / "store") as store:
        again = replay(store.session(1).operations, max_items=9)
        assert again.history.items()[-1].text == "hello" and again.responses == 1
    found = unseal(STORE_KEY, value_of(tmp_path / "store", Table.META, STORE_KEY), StoreRecord)
    assert found.format == FORMAT, "an older version would not find its operations"


def test_a_session_that_is_not_made_shorter_is_looked_at_again_when_it_has_grown() -> None:
    """As long as a reply runs nothing can be: each look reads it all."""
    looks: list[int] = []

    def decline(operations: Sequence[AnyOperation]) -> None:
        looks.append(len(operations))

    with folder() as path, store_in(path, replace(SMALL, snapshot_operations=16)) as store:
        store.write(birth(1))
        for index in range(64):
            store.write([Append(1, index, HELLO)])
            for number in list(store.long):
                assert not store.condense(number, decline)
        assert looks == [16, 20, 25, 32, 40, 50, 63]
        store.write([Drop(1), *birth(1)])
        for index in range(16):
            store.write([Append(1, index, HELLO)])
        assert store.long == {1}, "what was dropped says nothing of another"


def test_a_condensed_session_is_checked_like_any_other(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "store")
    with store_in(tmp_path / "store") as store:
        before = replay(store.session(1).operations, max_items=9)
        count = store.session(1).written
        assert store.condense(1, partial(condensed, max_items=9))
        stored = store.session(1)
        assert (len(stored.operations), stored.written) == (1, count)
        assert replay(stored.operations, max_items=9).history.items() == before.history.items()
        assert not store.condense(1, partial(condensed, max_items=9)), "there is nothing to gain"
        store.write([Append(1, count, Heard(event="e"))])
        assert len(store.session(1).operations) == 2
    key = key_of(1, count - 1)
    whole = value_of(tmp_path / "store", Table.LOG, key)
    for at in range(0, len(whole), 7):
        put(tmp_path / "store", Table.LOG, key, whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with store_in(tmp_path / "store") as store, pytest.raises(RecordDamaged):
            store.session(1)


def test_the_second_server_waits_and_is_told_who_holds_the_store() -> None:
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
            assert (path / "lock").read_text() == str(os.getpid())


def test_on_a_full_disk_a_store_is_locked_by_whoever_can_name_himself_or_not() -> None:
    """A server that is started again on a full disk must come up: it says what is the matter."""
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        (path / "lock").write_text("1234567890")

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "pwrite", full)
        with StoreLock(path).acquire(0.0):
            assert not (path / "lock").read_text(), "another's name would mislead"
            with pytest.raises(StoreHeld, match="process unknown"):
                StoreLock(path).acquire(0.0)
        patch.undo()
        with StoreLock(path).acquire(0.0):
            assert (path / "lock").read_text() == str(os.getpid())


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="file"):
        StoreLock(tmp_path / "file" / "store").acquire(0.0)


def value_of(path: Path, table: Table, key: bytes) -> bytes:
    with lmdb.open(str(path), max_dbs=6) as environment:
        named = environment.open_db(table.encode())
        with environment.begin() as transaction:
            return bytes(transaction.get(key, db=named))


def put(path: Path, table: Table, key: bytes, value: bytes | None) -> None:
    with lmdb.open(str(path), max_dbs=6) as environment:
        named = environment.open_db(table.encode())
        with environment.begin(write=True) as transaction:
            if value is None:
                transaction.delete(key, db=named)
            else:
                transaction.put(key, value, db=named)


class Dead:
    """What is left of an environment whose meta page could not be written."""

    def __init__(self, environment: lmdb.Environment) -> None:
        self.close = environment.close

    def begin(self, **_: object) -> None:
        raise lmdb.PanicError("Update of meta page failed or environment had fatal error")


@pytest.mark.parametrize("first", ["write", "read"])
def test_an_environment_that_refuses_everything_is_opened_anew(first: str) -> None:
    with folder() as path, store_in(path) as store:
        store.write([*birth(1), Append(1, 0, HELLO)])
        store._environment = Dead(store._environment)  # type: ignore[assignment]
        with pytest.raises(StorageUnavailable, match="meta page"):
            store.write([Append(1, 1, HELLO)]) if first == "write" else store.session(1)
        store.write([Append(1, 1, HELLO)])
        assert store.session(1).operations == (HELLO, HELLO) and not store.damaged


def test_a_group_that_fails_in_the_middle_is_not_there() -> None:
    with folder() as path, store_in(path) as store:
        store.write(birth(1))
        with pytest.raises(TypeError):
            store.write([Append(1, 0, HELLO), Put(Table.SESSIONS, key_of(2), object())])
        assert store.session(1).operations == ()
