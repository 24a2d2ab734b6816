"""The KV file gives space back to its disk: only free slots become holes, and KV makes room for others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk.admin import give_back, write_about
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.payload_file import FILE, PayloadFile, stride_of
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.errors import RecordMissing
from holdfast.kvstore.tier import Record

from .test_store import ROOM, SIZE, SPACE, given, key, payload

MIB = 1 << 20
FLOOR = 8 * MIB


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
    store = RecordStore(Begin(str(disk / "kv"), SPACE, SIZE, 1 << 30, floor=FLOOR))
    yield store
    store.close()


@pytest.mark.parametrize("length", [100, 5000, SIZE])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_and_goes_records_are_what_was_stored(tmp_path: Path, seed: int, length: int) -> None:
    """Against a plain dict, with bytes erased between the batches and a fresh start now and then."""
    random, kept = Random(seed), dict[bytes, bytes]()
    store, number, into = (
        RecordStore(Begin(str(tmp_path), SPACE, length, 1 << 30)),
        0,
        memoryview(bytearray(length)),
    )
    for step in range(120):
        fresh = []
        for _ in range(random.randrange(10)):
            number += 1
            kept[key(number)] = random.randbytes(length)
            fresh.append(key(number))
        old = sorted(kept.keys() - set(fresh))
        gone = random.sample(old, min(len(old) // 2, random.choice((0, 3, 8, 20))))
        records = [(Record(one, 1, xxh3_64_intdigest(kept[one])), memoryview(kept[one])) for one in fresh]
        store.drop(gone[::2])
        assert store.put(records) == []
        store.drop(gone[1::2])
        for one in gone:
            del kept[one]
        if step % 7 == 6:
            store.scrub()
            data = (tmp_path / FILE).read_bytes()
            assert data.count(0) >= len(data) - len(kept) * length
        if step % 20 == 19:
            store.close()
            store = RecordStore(Begin(str(tmp_path), SPACE, length, 1 << 30))
        assert set(store.entries) == kept.keys()
        for one in random.sample(sorted(kept), min(5, len(kept))):
            store.get(one, into)
            assert bytes(into) == kept[one]
    assert (tmp_path / FILE).stat().st_size <= number * stride_of(length) // 2, "slots are used again"
    store.close()


def test_space_goes_back_to_the_disk_when_another_fills_it(store: RecordStore, disk: Path) -> None:
    for number in range(0, 160, 4):
        store.put([given(one) for one in range(number, number + 4)])
    kept = store.file_bytes
    assert kept > 9 * MIB
    fill(disk, FLOOR - 4 * MIB)
    store.relieve()
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
    assert store.put([given(50)]) == [key(50)] and not holds(store, 50), "there is no room for any"
    (disk / "ballast").unlink()
    assert store.put([given(51)]) == [] and holds(store, 51), "it grows again when there is room"


def test_a_disk_filled_to_the_last_byte_gets_the_file_back(store: RecordStore, disk: Path) -> None:
    for number in range(0, 160, 4):
        store.put([given(one) for one in range(number, number + 4)])
    fill(disk, 0)
    while free(disk) < FLOOR:
        store.relieve()
    assert free(disk) >= FLOOR
    (disk / "ballast").unlink()
    store.put([given(200)])
    assert holds(store, 200)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_holes_gets_the_whole_file(
    store: RecordStore, disk: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    store.put([given(one) for one in range(100)])
    with (disk / "kv" / FILE).open("rb") as reader:  # the engine's, which has it open
        monkeypatch.setattr(PayloadFile, "punch", refuse)
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
    store = RecordStore(Begin(str(disk / SPACE.hex()), SPACE, SIZE, 1 << 30))
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
    store = RecordStore(Begin(str(disk / SPACE.hex()), SPACE, SIZE, 1 << 30))
    assert 60 < len(store) < 200 and holds(store, 239)
    store.close()
