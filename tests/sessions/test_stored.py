"""Stored objects: found by tenant and name, also in the next server; a child keeps what it began with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from holdfast.sessions.errors import RecordDamaged
from holdfast.sessions.journal import admin
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.records import EventReceived, Keyring, SessionRecord
from holdfast.sessions.journal.segment import Fresh, Kind
from holdfast.sessions.journal.session_log import SessionLog
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.settings import JournalSettings, JournalShare
from holdfast.sessions.stored import StoredObjects
from holdfast.tests.stored_files import bytes_below

pytestmark = pytest.mark.anyio
SETTINGS = JournalSettings(reserve_bytes=0)
ONE, OTHER = b"one tenant", b"another"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def opened(
    folder: Path, settings: JournalSettings = SETTINGS
) -> AsyncIterator[tuple[StoredObjects, Journal]]:
    journal = await Journal.open(folder, b"model", settings)
    try:
        yield StoredObjects(journal), journal
    finally:
        await journal.aclose()


async def test_objects_are_found_in_the_next_server_by_their_tenant_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as (stored, _):
        first = stored.add("resp_1", ONE, b"a")
        second = stored.add("resp_2", ONE, b"b", parent=first)
        second = stored.append(second, b"c")
        assert (second.notes, second.own) == ((b"a", b"b", b"c"), 2)
        await stored.durable()
    async with opened(tmp_path) as (stored, _):
        found = await stored.find(ONE, "resp_2")
        assert found is not None and found.notes == (b"a", b"b", b"c") and found.own == 2
        third = stored.add("resp_3", ONE, b"d", parent=found)
        assert third.notes == (b"a", b"b", b"c", b"d")
        assert await stored.find(OTHER, "resp_2") is None
        assert await stored.find(ONE, "resp_9") is None
    async with opened(tmp_path) as (stored, _):
        found = await stored.find(ONE, "resp_3")
        assert found is not None and found.notes == (b"a", b"b", b"c", b"d")


async def test_a_dropped_object_is_gone_and_its_children_keep_its_notes(tmp_path: Path) -> None:
    async with opened(tmp_path) as (stored, _):
        first = stored.add("resp_1", ONE, b"a")
        stored.add("resp_2", ONE, b"b", parent=first)
        stored.drop(first)
        late = stored.add("resp_3", ONE, b"c", parent=first)  # its turn began before
        assert late.own == 2, "it does not begin with what the journal forgets"
        assert await stored.find(ONE, "resp_1") is None
        await stored.durable()
        assert stored.add("resp_4", ONE, b"d", parent=first).own == 2
    async with opened(tmp_path) as (stored, _):
        assert await stored.find(ONE, "resp_1") is None
        for name, notes in (("resp_2", (b"a", b"b")), ("resp_3", (b"a", b"c")), ("resp_4", (b"a", b"d"))):
            found = await stored.find(ONE, name)
            assert found is not None and found.notes == notes


async def test_retention_forgets_objects_and_the_cache_follows(tmp_path: Path) -> None:
    settings = replace(SETTINGS, tenants={ONE: JournalShare(sessions=2)})
    async with opened(tmp_path, settings) as (stored, journal):
        before = stored.add("resp_0", ONE, b"0")
        for number in range(1, 4):
            before = stored.add(f"resp_{number}", ONE, b"%d" % number, parent=before)
            await stored.durable()
        while await stored.find(ONE, "resp_0") is not None:
            await journal.read(lambda store: None)
        found = await stored.find(ONE, "resp_3")
        assert found is not None and found.notes == (b"0", b"1", b"2", b"3")


class SlowWrites:
    """Keeps the journal's thread from going on with a group: before it writes one that ``chosen`` is true of,
    or, ``after``, when it has written it. `arrived` waits for that; then ``go`` lets the thread go on."""

    def __init__(
        self, patch: pytest.MonkeyPatch, chosen: Callable[[Sequence[Fresh]], bool], *, after: bool = False
    ) -> None:
        self.go, self._there, whole = threading.Event(), threading.Event(), JournalStore.write

        def write(store: JournalStore, group: Sequence[Fresh]) -> None:
            if after:
                whole(store, group)
            if chosen(group):
                self._there.set()
                self.go.wait(20)
            if not after:
                whole(store, group)

        patch.setattr(JournalStore, "write", write)

    async def arrived(self) -> None:
        assert await asyncio.to_thread(self._there.wait, 20)


def begins_one(group: Sequence[Fresh]) -> bool:
    return any(one.kind == Kind.SESSION for one in group)


def drops_one(group: Sequence[Fresh]) -> bool:
    return any(one.kind == Kind.DROP for one in group)


FULL = replace(SETTINGS, tenants={ONE: JournalShare(sessions=1)})


@pytest.mark.parametrize("chosen", [begins_one, drops_one], ids=["before it chooses", "when it has chosen"])
async def test_what_is_acknowledged_is_not_lost_by_retention(
    chosen: Callable[[Sequence[Fresh]], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another object of the tenant fills its share, and the one that is appended to is the longest unused."""
    async with opened(tmp_path, FULL) as (stored, _):
        kept = stored.add("conv_1", ONE, b"a")
        await stored.durable()
        slow = SlowWrites(monkeypatch, chosen, after=chosen is begins_one)
        stored.add("resp_1", ONE, b"b")
        await slow.arrived()
        stored.append(kept, b"c")
        slow.go.set()
        await stored.durable()
        found = await stored.find(ONE, "conv_1")
        assert found is not None and found.notes == (b"a", b"c")
        stored.append(found, b"d")
        await stored.durable()
    async with opened(tmp_path) as (stored, _):
        found = await stored.find(ONE, "conv_1")
        assert found is not None and found.notes == (b"a", b"c", b"d")


async def test_a_conversation_stays_while_what_begins_with_it_is_only_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is appended to meanwhile, which ends sooner."""
    async with opened(tmp_path, FULL) as (stored, _):
        kept = stored.add("conv_1", ONE, b"a")
        await stored.durable()
        slow = SlowWrites(monkeypatch, begins_one, after=True)
        stored.add("resp_1", ONE, b"b")
        await slow.arrived()
        stored.add("resp_2", ONE, b"c", parent=kept)
        stored.append(kept, b"d")
        slow.go.set()
        await stored.durable()
    async with opened(tmp_path) as (stored, _):
        found = await stored.find(ONE, "resp_2") or await stored.find(ONE, "conv_1")
        assert found is not None and found.notes in ((b"a", b"c"), (b"a", b"d"))


async def test_a_session_stays_while_its_fork_is_only_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, FULL) as (stored, journal):
        record = SessionRecord(id="sess_1", owner=b"", salt=ONE, clock="2025-03-01T00:00:00+00:00")
        log = SessionLog.begin(journal, record)
        log.keep(Keyring(fresh=(bytes(32),)))
        log.append(EventReceived(event="said"))
        await log.sync()
        slow = SlowWrites(monkeypatch, begins_one, after=True)
        stored.add("resp_1", ONE, b"b")
        await slow.arrived()
        fork = SessionLog.begin(journal, msgspec.structs.replace(record, id="sess_2", origin=log.position()))
        fork.keep(Keyring(fresh=(b"1" * 32,)))
        log.close()
        slow.go.set()
        await fork.sync()
        found = await journal.read(lambda store: store.session(fork.number))
        assert found.operations == (EventReceived(event="said"),)


async def test_long_objects_are_not_condensed(tmp_path: Path) -> None:
    settings = replace(SETTINGS, snapshot_operations=4)
    async with opened(tmp_path, settings) as (stored, journal):
        kept = stored.add("conv_1", ONE, b"0")
        for number in range(1, 20):
            kept = stored.append(kept, b"%d" % number)
            await stored.durable()
        while await journal.read(lambda store: bool(store.long)):  # noqa: ASYNC110 - its thread works
            await asyncio.sleep(0)
    async with opened(tmp_path, settings) as (stored, _):
        found = await stored.find(ONE, "conv_1")
        assert found is not None and found.notes == tuple(b"%d" % number for number in range(20))


async def test_the_cache_is_bounded_and_the_largest_tenant_loses() -> None:
    stored = StoredObjects(None, most=4096)
    small = stored.add("resp_0", OTHER, b"small")
    for number in range(50):
        stored.add(f"resp_{number}", ONE, b"%d" % number * 128)
    assert len(stored) < 15
    assert await stored.find(ONE, "resp_0") is None and await stored.find(ONE, "resp_49") is not None
    assert await stored.find(OTHER, "resp_0") == small


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def damage_in(path: Path) -> bool:
    """Change one byte of a note, if the file has it."""
    data = path.read_bytes()
    at = data.find(b"the note that is damaged")
    if at >= 0:
        path.write_bytes(data[:at] + b"T" + data[at + 1 :])
    return at >= 0


async def test_an_operators_work_holds_for_stored_objects(tmp_path: Path) -> None:
    root, copy = tmp_path / "store", tmp_path / "copy"
    async with opened(root) as (stored, _):
        first = stored.add("resp_1", ONE, b"a note of the first")
        stored.add("resp_2", ONE, b"b", parent=first)
        stored.add("resp_3", OTHER, b"c")
        stored.drop(first)
    damage: list[str] = []
    list(admin.verify(root, damage))
    assert not damage
    list(admin.backup(root, copy))
    async with opened(copy) as (stored, _):
        found = await stored.find(ONE, "resp_2")
        assert found is not None and found.notes == (b"a note of the first", b"b")
    list(admin.erase(root, admin.of_tenant(ONE)))
    async with opened(root) as (stored, _):
        assert await stored.find(ONE, "resp_2") is None
        assert await stored.find(OTHER, "resp_3") is not None
    assert b"a note of the first" not in bytes_below(root)


async def test_damage_costs_an_object_and_what_begins_with_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (stored, _):
        whole = stored.add("resp_0", ONE, b"the note that stays whole")
        first = stored.add("resp_1", ONE, b"the note that is damaged", parent=whole)
        stored.add("resp_2", ONE, b"b", parent=first)
        stored.add("resp_3", ONE, b"c", parent=whole)
    assert sum(map(damage_in, files_in(tmp_path))) == 1
    async with opened(tmp_path) as (stored, _):
        for name in ("resp_1", "resp_2"):
            with pytest.raises(RecordDamaged):
                await stored.find(ONE, name)
        for name in ("resp_0", "resp_3"):
            assert await stored.find(ONE, name) is not None
