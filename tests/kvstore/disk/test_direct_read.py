"""Records read directly: as they were stored or not at all, and never by waiting for the medium."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk.direct_read import SHARED, DirectRead
from holdfast.kvstore.disk.messages import RecordAt
from holdfast.kvstore.disk.payload_file import FILE, PayloadFile

LENGTH = 10_000
DATA = Random(1).randbytes(LENGTH)
LYING = RecordAt(1, xxh3_64_intdigest(DATA), 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the record in its file, in memory whatever the machine is short of."""
    with closing(PayloadFile(tmp_path / FILE, LENGTH, writable=True)) as file:
        file.write(1, memoryview(DATA))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset, flags=0: preadv(fd, parts, offset))
    return tmp_path


def room() -> memoryview:
    return memoryview(bytearray(LENGTH))


def test_a_record_fills_a_block(folder: Path) -> None:
    with closing(DirectRead(folder, LENGTH)) as near:
        into = room()
        assert near.has(LYING) and not near.has(LYING._replace(slot=1 << 30))
        assert near.read([LYING], [into]) == 1 and into == DATA
        near.leave()
        assert near.read([LYING], [into]) == 1, "the file is opened again"


def test_a_damaged_record_is_left_to_the_disk_process(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    with closing(DirectRead(folder, LENGTH)) as near:
        for changed in (0, 5_000, 9_999):
            damaged = bytearray(whole)
            damaged[len(whole) - LENGTH + changed] ^= 1
            (folder / FILE).write_bytes(damaged)
            assert near.read([LYING], [room()]) == 0, changed


@pytest.mark.parametrize("changed", [None, 0, 1, 37, 70, 79])
def test_many_are_read_up_to_the_first_that_is_not_sound(
    folder: Path, changed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two threads, several in one call where they lie one behind the other; two gaps are between them."""
    monkeypatch.setattr("holdfast.kvstore.disk.direct_read.RUN_BYTES", 4 * LENGTH)
    records = []
    with closing(PayloadFile(folder / FILE, LENGTH, writable=True)) as file:
        for number in range(80):
            payload, slot = Random(number).randbytes(LENGTH), number + (number >= 3) + (number >= 60)
            records.append(RecordAt(slot, xxh3_64_intdigest(payload), number % 5 + 1))
            written = bytearray(payload)
            if number == changed:
                written[77] ^= 4
            file.write(slot, memoryview(written))
    blocks = [room() for _ in records]
    whole = len(records) if changed is None else changed
    with closing(DirectRead(folder, LENGTH)) as near:
        assert near.read(records, blocks) == whole
    for number in range(whole):
        assert blocks[number] == Random(number).randbytes(LENGTH)


@pytest.mark.parametrize("left", [LENGTH + 9_999, LENGTH, 10, None])
def test_a_file_that_is_cut_or_gone_does_no_harm(folder: Path, left: int | None) -> None:
    if left is None:
        (folder / FILE).unlink()
    else:
        os.truncate(folder / FILE, left)
    with closing(DirectRead(folder, LENGTH)) as near:
        assert near.read([LYING], [room()]) == 0
        assert left is not None or not near.has(LYING)


def test_the_second_thread_is_not_on_the_core_that_the_engines_thread_is_bound_to(
    folder: Path, bound_beside: set[int]
) -> None:
    others = set(threading.enumerate())
    with closing(DirectRead(folder, LENGTH)) as near:
        assert near.read([LYING] * SHARED, [room()] * SHARED) == SHARED
        (second,) = set(threading.enumerate()) - others
        assert os.sched_getaffinity(second.native_id or 0) == bound_beside
