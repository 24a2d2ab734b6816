"""The KV file gives space back to its disk: only free pages become holes, and KV makes room for others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import lmdb
import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk import free_pages
from holdfast.kvstore.disk.admin import give_back, write_about
from holdfast.kvstore.disk.free_pages import ListUnreadable, free_runs, punch_free_pages
from holdfast.kvstore.disk.store import NewRecord, RecordStore, StoreFailed
from holdfast.kvstore.errors import RecordMissing

MIB = 1 << 20
SPACE = bytes(range(16))
SIZE = 60_000
ROOM = 61_440  # bytes that one takes
FLOOR = 8 * MIB


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def given(number: int) -> NewRecord:
    data = payload(number)
    return NewRecord(key(number), 1, xxh3_64_intdigest(data), memoryview(data))


def holds(store: RecordStore, number: int) -> bool:
    """Whether it is there; what is there must be what was stored."""
    into = memoryview(bytearray(SIZE))
    try:
        store.get(key(number), into)
    except RecordMissing:
        return False
    return into == payload(number) or pytest.fail(f"record {number} is another")


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def fill(disk: Path, leave: int) -> Path:
    """Another program's file, which takes all but ``leave`` bytes."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(max(0, free(disk) - leave)))
    return ballast


@pytest.fixture
def disk(tmpfs: Callable[[str], Path]) -> Path:
    return tmpfs("24m")


@pytest.fixture
def store(disk: Path) -> Iterator[RecordStore]:
    store = RecordStore(disk / "kv", SPACE, SIZE, 1 << 30, floor=FLOOR)
    yield store
    store.close()


@pytest.mark.parametrize("seed", range(6))
def test_only_pages_that_nothing_reads_become_holes(tmp_path: Path, seed: int) -> None:
    """Against a plain dict, with punches between the transactions and a fresh start now and then."""
    random, kept = Random(seed), dict[bytes, bytes]()

    def begun() -> tuple[lmdb.Environment, object]:
        made = lmdb.open(str(tmp_path), map_size=256 * MIB, max_dbs=1, sync=False)
        return made, made.open_db(b"records")

    env, records = begun()
    punched = number = 0
    for step in range(120):
        with env.begin(write=True) as txn:
            for _ in range(random.randrange(10)):
                number += 1
                kept[key(number)] = random.randbytes(random.choice((40, 900, 5000, 40_000)))
                txn.put(key(number), kept[key(number)], db=records)
            for gone in random.sample(sorted(kept), min(len(kept) // 2, random.choice((0, 3, 8, 60)))):
                txn.delete(gone, db=records)
                del kept[gone]
        with (tmp_path / "data.mdb").open("r+b") as file:
            punched += punch_free_pages(file.fileno())
        if step % 20 == 19:
            env.close()
            env, records = begun()
            with env.begin(db=records) as txn:
                assert {bytes(one): bytes(data) for one, data in txn.cursor()} == kept
    assert punched > MIB
    copy = tmp_path / "copy"
    copy.mkdir()
    env.copy(str(copy), compact=True)  # LMDB itself counts its free pages here
    env.close()


def test_the_list_of_another_file_is_none(tmp_path: Path) -> None:
    for data in (b"", Random(1).randbytes(40_000), bytes(40_000)):
        path = tmp_path / "data.mdb"
        path.write_bytes(data)
        with path.open("r+b") as file, pytest.raises(ListUnreadable):
            free_runs(file.fileno())


def test_space_goes_back_to_the_disk_when_another_fills_it(store: RecordStore, disk: Path) -> None:
    for number in range(0, 160, 4):
        store.put([given(one) for one in range(number, number + 4)])
    kept = store.file_bytes
    assert kept > 9 * MIB
    fill(disk, FLOOR - 4 * MIB)
    assert store.relieve() >= 4 * MIB
    assert free(disk) >= FLOOR and store.file_bytes <= kept - 4 * MIB
    gone = [number for number in range(160) if not holds(store, number)]
    assert set(store.given_up) >= {key(number) for number in gone} and 60 < len(gone) < 160
    assert not any(holds(store, number) for number in range(60)), "the longest unused go first"


def test_a_disk_near_its_floor_takes_records_for_others(store: RecordStore, disk: Path) -> None:
    for number in range(600):
        store.put([given(number)])
        assert free(disk) >= FLOOR - ROOM
    assert 100 < len(store) < 300 and holds(store, 599) and not holds(store, 0)
    assert store.room < 16 * MIB


def test_a_batch_that_does_not_fit_loses_its_first(store: RecordStore, disk: Path) -> None:
    ballast = fill(disk, FLOOR + 10 * ROOM)
    refused = store.put([given(number) for number in range(40)])
    assert refused == [key(number) for number in range(40 - len(store))] and 2 < len(store) <= 10
    assert holds(store, 39)
    ballast.unlink()
    fill(disk, FLOOR // 2)
    store.relieve()
    with pytest.raises(StoreFailed, match="no space for KV"):
        store.put([given(50)])
    (disk / "ballast").unlink()
    assert store.put([given(51)]) == [] and holds(store, 51), "it grows again when there is room"


def test_a_disk_filled_to_the_last_byte_gets_the_file_back(store: RecordStore, disk: Path) -> None:
    for number in range(0, 160, 4):
        store.put([given(one) for one in range(number, number + 4)])
    fill(disk, 0)
    while store.relieve():
        pass
    assert free(disk) >= FLOOR
    (disk / "ballast").unlink()
    store.put([given(200)])
    assert holds(store, 200)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_holes_gets_the_whole_file(
    store: RecordStore, disk: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, start: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    store.put([given(one) for one in range(100)])
    with (disk / "kv" / "data.mdb").open("rb") as reader:  # the engine's, which has it open
        monkeypatch.setattr(free_pages, "punch", refuse)
        fill(disk, FLOOR // 2)
        store.relieve()
        assert len(store) == 0 and len(store.given_up) == 100
        assert free(disk) >= FLOOR
        assert reader.read() == b"", "and what is not there is not read"
    (disk / "ballast").unlink()
    store.put([given(200)])
    assert holds(store, 200)


def test_a_start_on_a_disk_that_kv_has_filled_begins_with_room(disk: Path, tmp_path: Path) -> None:
    """Before anything else is opened there; what is damaged or held is left alone."""
    store = RecordStore(disk / SPACE.hex(), SPACE, SIZE, 1 << 30)
    for number in range(0, 240, 4):
        store.put([given(one) for one in range(number, number + 4)])
    store.close()
    write_about(disk / SPACE.hex(), SIZE)
    rubbish = disk / "rubbish"
    rubbish.mkdir()
    (rubbish / "data.mdb").write_bytes(bytes(4096))
    fill(disk, 1 << 20)
    give_back(disk, FLOOR)
    assert free(disk) >= FLOOR
    store = RecordStore(disk / SPACE.hex(), SPACE, SIZE, 1 << 30)
    assert 60 < len(store) < 200 and holds(store, 239)
    store.close()
