"""``holdfast store`` on a store that is not what it was: one line, and nothing is dropped by guesswork."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from itertools import cycle
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk import payload_file
from holdfast.kvstore.disk.admin import write_about
from holdfast.kvstore.disk.index import FILE
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.store import RecordStore, hold
from holdfast.kvstore.tier import Record
from holdfast.runtime.errors import SettingsInvalid
from holdfast.runtime.kv_placement.store_admin import tend

SPACE = bytes(range(16))
KEY, SIZE = b"one of sixteen b", 5000


def records(store: Path) -> Path:
    """A folder with one record."""
    folder = store / "kv" / SPACE.hex()
    kept = RecordStore(Begin(str(folder), SPACE, SIZE, 1 << 20))
    payload = bytes(SIZE)
    kept.put([(Record(KEY, 4, xxh3_64_intdigest(payload)), memoryview(payload))])
    kept.close()
    write_about(folder, SIZE)
    return folder


UNREADABLE = (
    "",
    "[]",
    "{}",
    '{"block_bytes": null}',
    '{"block_bytes": "x"}',
    '{"block_bytes": -1}',
    '{"block_bytes": 0}',
    '{"block_bytes": 1e30}',
    '{"block_bytes": Infinity}',
    "[" * 9999,
)


@pytest.mark.parametrize(("act", "about"), [*zip(cycle(["stat", "verify", "gc"]), UNREADABLE)])
def test_what_cannot_be_known_is_said_and_nothing_dropped(tmp_path: Path, act: str, about: str) -> None:
    folder = records(tmp_path)
    (folder / "about.json").write_text(about)
    with pytest.raises(SettingsInvalid, match=r"about.json cannot be read: .* clear"):
        list(tend(act, tmp_path))
    write_about(folder, SIZE)
    first, *_ = tend(act, tmp_path)
    assert " 1 records" in first
    (folder / "about.json").write_text(about)
    assert list(tend("clear", tmp_path)) == ["1 kinds of records removed"]


@pytest.mark.parametrize("what", ["the version of LMDB", "an entry"])
def test_a_damaged_index_is_told_and_only_thrown_away_by_acts_that_drop(tmp_path: Path, what: str) -> None:
    file = records(tmp_path) / FILE
    whole = bytearray(file.read_bytes())
    for at in [20] if what != "an entry" else [found.end() for found in re.finditer(KEY, whole)]:
        whole[at] ^= 8
    file.write_bytes(whole)
    for _ in range(2):
        with pytest.raises(SettingsInvalid, match=r"is damaged.*gc` throws it away"):
            list(tend("stat", tmp_path))
    with pytest.raises(SettingsInvalid, match=r"is damaged.*it is thrown away"):
        list(tend("verify", tmp_path))
    assert [line.partition(": ")[2][:9] for line in tend("stat", tmp_path)] == ["0 records"]


def test_a_folder_of_nothing_but_damage_is_tidied_away(tmp_path: Path) -> None:
    folder = records(tmp_path)
    file = folder / payload_file.FILE
    whole = bytearray(file.read_bytes())
    whole[7] ^= 1
    file.write_bytes(whole)
    first, *_ = tend("gc", tmp_path)
    assert " 0 records" in first and "1 damaged and dropped" in first
    assert not folder.exists()


@pytest.mark.parametrize("act", ["stat", "verify", "gc"])
def test_records_dropped_for_their_length_are_told(tmp_path: Path, act: str) -> None:
    write_about(records(tmp_path), SIZE + 1)
    with pytest.raises(SettingsInvalid, match="its records have another layout"):
        list(tend(act, tmp_path))


def test_what_is_said_of_records_survives_a_server_s_start_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = records(tmp_path)

    def full(path: Path, *_: object, **__: object) -> int:
        path.open("w").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    with contextlib.suppress(OSError):
        write_about(folder, SIZE)
    first, *_ = tend("stat", tmp_path)
    assert " 1 records" in first


def test_clear_leaves_records_that_are_held_and_tell_nothing_of_themselves(tmp_path: Path) -> None:
    folder = records(tmp_path)
    (folder / "about.json").unlink()
    lock = hold(folder)
    try:
        with pytest.raises(SettingsInvalid, match=f"is held by process {os.getpid()}"):
            list(tend("clear", tmp_path))
        assert (folder / FILE).exists()
    finally:
        lock.release()
    assert list(tend("clear", tmp_path)) == ["1 kinds of records removed"]
    assert not folder.exists()


def test_clear_removes_what_lies_behind_a_link_to_another_disk(tmp_path: Path) -> None:
    store, disk = tmp_path / "store", tmp_path / "disk"
    folder = records(store)
    (store / "kv").rename(disk)
    (store / "kv").symlink_to(disk)
    assert list(tend("clear", store)) == ["1 kinds of records removed"]
    assert not (disk / folder.name).exists() and (store / "kv").is_dir()


def test_clear_says_what_it_could_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = records(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(SettingsInvalid, match=os.strerror(errno.EROFS)):
        list(tend("clear", tmp_path))
    assert (folder / FILE).exists()


def pages_of(file: Path) -> int:
    return file.stat().st_size // 4096


def refused(act: str, store: Path) -> str:
    """What it says that it cannot do, if anything."""
    try:
        list(tend(act, store))
    except SettingsInvalid as error:
        return error.message
    return ""


@pytest.mark.timeout(300)
def test_a_file_that_kills_its_reader_is_named_and_thrown_away(tmp_path: Path) -> None:
    """A zeroed page of a tree aborts LMDB: in a process that is there for it, never in this one."""
    folder = tmp_path / "kv" / SPACE.hex()
    kept = RecordStore(Begin(str(folder), SPACE, SIZE, 1 << 30))
    payload = bytes(SIZE)
    for number in range(300):
        given = Record(number.to_bytes(16, "little"), 4, xxh3_64_intdigest(payload)), memoryview(payload)
        kept.put([given])
    kept.close()
    write_about(folder, SIZE)
    beside = tmp_path / "kv" / ("ff" * 16)
    RecordStore(Begin(str(beside), bytes([255]) * 16, SIZE, 1 << 20)).close()
    write_about(beside, SIZE)
    whole = (folder / FILE).read_bytes()
    trees = [at for at in range(2, pages_of(folder / FILE)) if whole[at * 4096 + 10] & 3]
    for page in reversed(trees):
        spoilt = bytearray(whole)
        spoilt[page * 4096 : (page + 1) * 4096] = bytes(4096)
        (folder / FILE).write_bytes(spoilt)
        told = refused("stat", tmp_path)
        if "ended by SIG" in told:
            break
    killed = f"{folder / FILE} is damaged: the process that read it ended by SIGABRT"
    assert told == f"{killed}; `holdfast store gc` throws it away"
    for act in ("verify", "gc"):
        (folder / FILE).write_bytes(spoilt)
        assert refused(act, tmp_path) == f"{killed}; it is thrown away"
        assert not (folder / FILE).exists()
    assert next(iter(tend("stat", tmp_path))).startswith(f"{SPACE.hex()}: 0 records")
