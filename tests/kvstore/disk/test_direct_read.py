"""Records read directly: as they were stored or not at all, and never by waiting for the medium."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk import direct_read
from holdfast.kvstore.disk.direct_read import FILE, SHARED, DirectRead, RecordAt
from holdfast.kvstore.disk.payload_offsets import in_memory

KEY, OTHER = b"k" * 16, b"o" * 16
OFFSET = 4096 + 16
DATA = Random(1).randbytes(10_000)
LYING = RecordAt(OFFSET, 3, xxh3_64_intdigest(DATA))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the record in its file, in memory whatever the machine is short of."""
    (tmp_path / FILE).write_bytes(bytes(OFFSET) + DATA)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset, flags=0: preadv(fd, parts, offset))
    monkeypatch.setattr(direct_read, "in_memory", lambda fd, offset: True)
    return tmp_path


def parts(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@pytest.mark.parametrize("sizes", [(10_000,), (4_000, 6_000)])
def test_a_record_fills_the_parts_of_a_block(folder: Path, sizes: tuple[int, ...]) -> None:
    near = DirectRead(folder, len(DATA))
    near.learn(KEY, LYING)
    into = parts(*sizes)
    assert KEY in near and near.has(KEY)
    assert near.read([KEY], [into].__getitem__) == [3] and b"".join(into) == DATA
    near.forget(KEY)
    assert KEY not in near and not near.has(KEY) and near.read([KEY], [into].__getitem__) == []
    near.learn(OTHER, RecordAt(0, 3, LYING.digest))
    assert OTHER not in near, "its offset is unknown"
    near.close()


def test_a_damaged_record_is_left_to_the_disk_process(folder: Path) -> None:
    near = DirectRead(folder, len(DATA))
    for number, changed in enumerate((OFFSET, OFFSET + 5_000, OFFSET + 9_999)):
        key = bytes([number]) * 16
        near.learn(key, LYING)
        whole = bytearray(bytes(OFFSET) + DATA)
        whole[changed] ^= 1
        (folder / FILE).write_bytes(whole)
        near.forget_all()
        near.learn(key, LYING)
        assert near.read([key], [parts(10_000)].__getitem__) == [] and key not in near, changed
    near.close()


@pytest.mark.parametrize("changed", [None, 0, 1, 37, 70, 79])
def test_many_are_read_up_to_the_first_that_is_not_sound(
    folder: Path, changed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two threads, several in one call where they lie one behind the other; two gaps are wider."""
    monkeypatch.setattr("holdfast.kvstore.disk.direct_read.RUN_BYTES", 4 * len(DATA))
    near, data = DirectRead(folder, len(DATA)), bytearray()
    keys = [number.to_bytes(16, "little") for number in range(80)]
    offsets = []
    for number, key in enumerate(keys):
        data += bytes(-len(data) % 4096 + (4096 if number in (3, 60) else 0) + 16)
        payload = Random(number).randbytes(len(DATA))
        offsets.append(len(data))
        near.learn(key, RecordAt(len(data), number % 5 + 1, xxh3_64_intdigest(payload)))
        data += payload
    if changed is not None:
        data[offsets[changed] + 77] ^= 4
    (folder / FILE).write_bytes(data)
    blocks = [parts(2_500, 7_500) for _ in keys]
    whole = len(keys) if changed is None else changed
    assert near.read(keys, blocks.__getitem__) == [number % 5 + 1 for number in range(whole)]
    for number in range(whole):
        assert b"".join(blocks[number]) == Random(number).randbytes(len(DATA))
    assert changed is None or keys[changed] not in near
    near.close()


@pytest.mark.parametrize("left", [OFFSET + 9_999, OFFSET, 10, None])
def test_a_file_that_is_cut_or_gone_does_no_harm(folder: Path, left: int | None) -> None:
    near = DirectRead(folder, len(DATA))
    near.learn(KEY, LYING)
    if left is None:
        (folder / FILE).unlink()
    else:
        os.truncate(folder / FILE, left)
    assert near.read([KEY], [parts(10_000)].__getitem__) == []
    near.close()


def test_what_is_not_in_memory_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def away(fd: int, into: object, offset: int, flags: int = 0) -> int:
        asked.append(flags)
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", away)
    near = DirectRead(folder, len(DATA))
    near.learn(KEY, LYING)
    assert near.read([KEY], [parts(10_000)].__getitem__) == []
    assert asked == [os.RWF_NOWAIT]
    near.close()


def test_whether_a_page_is_in_memory_is_asked_of_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(bytes(3 * 4096))
    with path.open("rb") as file:
        assert in_memory(file.fileno(), 4096 + 16)
        assert not in_memory(file.fileno(), 1 << 30)


def test_the_second_thread_is_not_on_the_core_that_the_engines_thread_is_bound_to(
    folder: Path, bound_beside: set[int]
) -> None:
    near, others = DirectRead(folder, len(DATA)), set(threading.enumerate())
    near.learn(KEY, LYING)
    assert near.read([KEY] * SHARED, lambda _: parts(10_000)) == [3] * SHARED
    (second,) = set(threading.enumerate()) - others
    assert os.sched_getaffinity(second.native_id or 0) == bound_beside
    near.close()
