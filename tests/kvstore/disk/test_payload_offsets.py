"""Where payloads lie in the file: right for what is kept, unknown for what is not, never believed blindly."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk import payload_offsets
from holdfast.kvstore.disk.payload_offsets import PayloadOffsets
from holdfast.kvstore.disk.record import RecordHeader
from holdfast.kvstore.disk.store import NewRecord, RecordStore, StoreFailed

SPACE = bytes(range(16))
SIZE = 60_000
ROOM = 61_440


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def put(store: RecordStore, *numbers: int) -> None:
    records = [payload(number) for number in numbers]
    store.put(
        [
            NewRecord(key(number), 1, xxh3_64_intdigest(data), memoryview(data))
            for number, data in zip(numbers, records, strict=True)
        ]
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    store = RecordStore(tmp_path / "kv", SPACE, SIZE, 1000 * ROOM)
    yield store
    store.close()


@pytest.fixture
def misplaced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Wrong offsets for the payloads that are learned next."""
    wrong, learned = list[int](), payload_offsets.PayloadAt
    monkeypatch.setattr(
        payload_offsets,
        "PayloadAt",
        lambda offset, header: learned(wrong.pop(0) if wrong else offset, header),
    )
    return wrong


def holds(into: memoryview, number: int) -> bool:
    """Answered here, not in an assert: on a CI machine pytest would diff random bytes for minutes."""
    return into == payload(number)


def lies_there(store: RecordStore, folder: Path, number: int) -> bool:
    data = (folder / "kv" / "data.mdb").read_bytes()
    at = store.offset_of(key(number))
    return data[at : at + SIZE] == payload(number)


def test_each_payload_lies_where_it_was_put_while_the_file_grows_and_others_go(
    store: RecordStore, tmp_path: Path
) -> None:
    for number in range(0, 400, 20):  # beyond the first map, so that it moves
        put(store, *range(number, number + 20))
        if number % 60 == 0:
            store.drop(key(gone) for gone in range(number, number + 10))
    store.sync()
    kept = [number for number in range(400) if key(number) in store]
    assert len(kept) == 400 - 70
    assert all(lies_there(store, tmp_path, number) for number in kept[::7])
    assert all(store.offset_of(key(number)) for number in kept)
    assert not any(store.offset_of(key(gone)) for gone in range(400) if gone not in kept)


def test_what_another_process_left_is_found_when_it_is_read(tmp_path: Path) -> None:
    first = RecordStore(tmp_path / "kv", SPACE, SIZE, 1000 * ROOM)
    put(first, *range(8))
    first.close()
    again = RecordStore(tmp_path / "kv", SPACE, SIZE, 1000 * ROOM)
    assert not again.offset_of(key(3))
    into = memoryview(bytearray(SIZE))
    again.get(key(3), into)
    assert holds(into, 3) and lies_there(again, tmp_path, 3)
    again.close()


def test_a_wrong_place_costs_time_and_no_byte(
    store: RecordStore, tmp_path: Path, misplaced: list[int]
) -> None:
    put(store, 0, 3)
    misplaced[:] = [1 << 40, store.offset_of(key(3))]
    put(store, 1, 2)
    into = memoryview(bytearray(SIZE))
    for number in (1, 2, 3):
        store.get(key(number), into)
        assert holds(into, number) and lies_there(store, tmp_path, number)


def test_a_medium_that_refuses_is_said_to(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(StoreFailed):
            store.get(key(1), memoryview(bytearray(SIZE)))
    into = memoryview(bytearray(SIZE))
    store.get(key(1), into)
    assert holds(into, 1)


def test_a_file_that_is_not_mapped_has_no_places(tmp_path: Path) -> None:
    places = PayloadOffsets(tmp_path / "none")
    places.mapped()
    places.learn(key(1), memoryview(bytes(100)), RecordHeader(SPACE, key(1), 1, 100, 0, 1))
    assert key(1) not in places
    assert places.read(key(1), memoryview(bytearray(100))) is None
    places.close()


def test_what_is_brought_into_memory_is_there_and_copied_nowhere(store: RecordStore, tmp_path: Path) -> None:
    put(store, *range(4))
    store.sync()
    with (tmp_path / "kv" / "data.mdb").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for number in (2, 0):
            header = store.load_pages(key(number))
            assert header is not None and header.digest == xxh3_64_intdigest(payload(number))
            into = memoryview(bytearray(SIZE))
            assert os.preadv(file.fileno(), [into], store.offset_of(key(number)), os.RWF_NOWAIT) == SIZE
            assert holds(into, number)
    assert store.load_pages(key(99)) is None


def test_what_cannot_be_brought_is_for_get_to_judge(
    store: RecordStore, monkeypatch: pytest.MonkeyPatch, misplaced: list[int]
) -> None:
    put(store, 0)
    misplaced.append(1 << 40)
    put(store, 1)
    assert store.load_pages(key(1)) is None, "the file ends before"

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "sendfile", refuse)
    with pytest.raises(StoreFailed, match="Input/output error"):
        store.load_pages(key(0))
    monkeypatch.undo()
    assert store.load_pages(key(0)) is not None
