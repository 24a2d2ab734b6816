"""The file of payloads: slots of one size, bytes that come as they were written, holes, and nothing waited
for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kvstore.disk.payload_file import FILE, STEP, PayloadFile, stride_of
from holdfast.kvstore.reserve import held_by

LENGTH = 60_000


def payload(number: int, length: int = LENGTH) -> bytes:
    return Random(number).randbytes(length)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[PayloadFile]:
    with closing(PayloadFile(tmp_path / FILE, LENGTH, writable=True)) as file:
        yield file


def read(file: PayloadFile, slot: int) -> bytes | None:
    into = memoryview(bytearray(file.length))
    return bytes(into) if file.read(slot, into) else None


@given(st.integers(1, 1 << 24))
def test_no_more_than_a_tenth_is_wasted(length: int) -> None:
    stride = stride_of(length)
    assert length <= stride <= 1.1 * length
    assert stride % STEP == 0 or stride == length < 10 * STEP


@pytest.mark.parametrize("length", [100, 4096, 5000, 60_000])
def test_each_slot_holds_what_was_written_there_last(tmp_path: Path, length: int) -> None:
    random, kept = Random(length), dict[int, int]()
    with closing(PayloadFile(tmp_path / FILE, length, writable=True)) as file:
        for number in range(200):
            slot = random.randrange(40)
            file.write(slot, memoryview(payload(number, length)))
            kept[slot] = number
        assert all(read(file, slot) == payload(number, length) for slot, number in kept.items())
        assert file.slots == max(kept) + 1 and read(file, 1000) is None


def test_holes_take_no_space_and_touch_no_other_slot(file: PayloadFile, tmp_path: Path) -> None:
    for slot in range(64):
        file.write(slot, memoryview(payload(slot)))
    before, gone = held_by(tmp_path / FILE), [0, 1, 2, 3, 9, 40, 41, 42, 43, 44, 63]
    assert file.punch(gone) >= 9 * LENGTH - 12 * 4096
    assert held_by(tmp_path / FILE) < before - 8 * LENGTH
    for slot in range(64):
        assert read(file, slot) == (bytes(LENGTH) if slot in gone else payload(slot))
    file.cut(10)
    assert file.slots == 10 and read(file, 8) == payload(8) and read(file, 10) is None
    file.cut(30)
    assert file.slots == 10, "it never grows"


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EIO])
def test_without_holes_bytes_are_overwritten(
    file: PayloadFile, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in range(4):
        file.write(slot, memoryview(payload(slot)))

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(PayloadFile, "punch", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            file.clear([1, 2])
        return
    file.clear([1, 2])
    assert [read(file, slot) for slot in range(4)] == [payload(0), bytes(LENGTH), bytes(LENGTH), payload(3)]


def test_what_is_brought_into_the_page_cache_is_read_from_there(file: PayloadFile, tmp_path: Path) -> None:
    for slot in range(8):
        file.write(slot, memoryview(payload(slot)))
    file.sync()
    with closing(PayloadFile(tmp_path / FILE, LENGTH)) as reader:
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for slot in (5, 0):
            assert file.cache(slot) and reader.is_cached(slot)
            parts = [memoryview(bytearray(20_000)), memoryview(bytearray(40_000))]
            assert reader.read_cached(slot, parts) == LENGTH and b"".join(parts) == payload(slot)
        assert not file.cache(99) and not reader.is_cached(1 << 20)


def test_what_is_not_in_the_page_cache_is_not_waited_for(
    file: PayloadFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def away(fd: int, into: object, offset: int, flags: int = 0) -> int:
        asked.append(flags)
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", away)
    with pytest.raises(BlockingIOError):
        file.read_cached(0, [memoryview(bytearray(LENGTH))])
    assert asked == [os.RWF_NOWAIT]


def test_a_file_that_is_only_read_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PayloadFile(tmp_path / FILE, LENGTH)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(1000))
    match kind:
        case "pipe":
            os.mkfifo(tmp_path / FILE)
        case "link":
            (tmp_path / FILE).symlink_to(other)
        case "folder":
            (tmp_path / FILE).mkdir()
    for writable in (True, False):
        with pytest.raises(OSError, match=r"not a file|symbolic links|directory"):
            PayloadFile(tmp_path / FILE, LENGTH, writable=writable)
    assert other.read_bytes() == bytes(1000)
