"""Records in their file: budget, order of use, what is dropped, and every way a file goes bad."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import lmdb
import pytest
from hypothesis import given as given_values
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk import index
from holdfast.kvstore.disk.index import RecordEntry, StoreFailed
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.payload_file import FILE
from holdfast.kvstore.disk.process import CRASHES
from holdfast.kvstore.disk.store import RecordStore, clear
from holdfast.kvstore.errors import FolderHeld, RecordCorrupt, RecordMissing
from holdfast.kvstore.tier import Record

SPACE = bytes(range(16))
SIZE = 60_000
ROOM = 60_416  # bytes that one takes


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def given(number: int, tenant: int = 0) -> tuple[Record, memoryview]:
    data = payload(number)
    return Record(key(number), 4 + number % 12, xxh3_64_intdigest(data), tenant), memoryview(data)


def opened(
    folder: Path,
    budget: int = 100 * ROOM,
    space: bytes = SPACE,
    size: int = SIZE,
    caps: Mapping[int, int] | None = None,
    *,
    anew: bool = False,
) -> RecordStore:
    return RecordStore(Begin(str(folder), space, size, budget, caps or {}), anew=anew)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    store = opened(tmp_path / "kv")
    yield store
    store.close()


def read(store: RecordStore, number: int) -> RecordEntry:
    into = memoryview(bytearray(SIZE))
    entry = store.get(key(number), into)
    assert bytes(into) == payload(number)
    return entry


def test_records_outlive_the_store_that_wrote_them(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.put([given(n) for n in range(8)]) == []
    store.sync()
    store.close()
    again = opened(tmp_path)
    assert [read(again, n).tokens for n in range(8)] == [4 + n for n in range(8)]
    with pytest.raises(RecordMissing):
        read(again, 9)
    again.close()


def test_the_files_grow_to_the_budget_and_no_further(tmp_path: Path) -> None:
    store = opened(tmp_path, budget=400 * ROOM)
    for n in range(0, 600, 20):
        store.put([given(m) for m in range(n, n + 20)])
        assert store.size <= store.budget
    assert len(store) == 400 and key(199) not in store.entries and key(200) in store.entries
    read(store, 599)
    assert (tmp_path / FILE).stat().st_size <= store.budget and store.file_bytes < 1.01 * store.budget
    store.close()


def test_what_was_read_goes_first_until_it_is_touched(tmp_path: Path) -> None:
    """A record that is read is on a tier above; when it leaves that tier, that is a use."""
    store = opened(tmp_path, budget=3 * ROOM)
    store.put([given(n) for n in range(3)])
    read(store, 2)
    assert store.put([given(3)]) == [key(2)]
    read(store, 1)
    assert store.put([given(4)], touched=[key(1)]) == [key(0)]
    store.close()


def test_the_longest_unused_goes_first_and_a_use_is_remembered(tmp_path: Path) -> None:
    store = opened(tmp_path, budget=5 * ROOM)
    store.put([given(n) for n in range(5)])
    assert store.put([given(5)], touched=[key(0)]) == [key(1)]
    store.close()
    again = opened(tmp_path, budget=5 * ROOM)
    assert again.put([given(6), given(7)]) == [key(2), key(3)]
    assert key(0) in again.entries
    again.close()


def test_what_is_dropped_is_gone_after_a_restart_too(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([given(1), given(2)])
    store.drop([key(1), key(77)])
    assert set(store.entries) == {key(2)}
    with pytest.raises(RecordMissing):
        read(store, 1)
    store.close()
    again = opened(tmp_path)
    assert set(again.entries) == {key(2)}
    again.close()


def test_a_tenant_with_a_cap_gives_up_its_own(tmp_path: Path) -> None:
    store = opened(tmp_path, caps={7: 3 * ROOM + 1})
    store.put([given(n) for n in range(4)])
    assert store.put([given(n, 7) for n in range(10, 13)]) == []
    assert store.put([given(13, 7), given(4)]) == [key(10)]
    store.order.lease([key(11)], on=True)
    assert store.put([given(14, 7)]) == [key(12)], "what a lease covers goes last"
    assert set(store.put([given(n, 7) for n in range(20, 25)])) == {*map(key, (11, 13, 14, 20, 21))}
    assert store.order.held() == {0: 5, 7: 3} and read(store, 24)
    store.drop([key(24)])
    assert store.put([given(25, 7)]) == []
    store.close()
    again = opened(tmp_path, caps={7: 2 * ROOM})
    assert again.order.held() == {0: 5, 7: 2} and key(25) in again.entries, "a smaller cap counts at once"
    again.close()


@given_values(st.data())
def test_caps_hold_whatever_comes_and_cost_no_other_tenant(data: st.DataObject) -> None:
    """Against a plain list: a tenant below its cap loses nothing while the store as a whole has room."""
    caps = {tenant: data.draw(st.integers(1, 5)) for tenant in (1, 2)}
    sizes = {tenant: cap * 64 for tenant, cap in caps.items()}
    with TemporaryDirectory() as name, closing(opened(Path(name), 100 * 64, size=64, caps=sizes)) as store:
        kept: list[tuple[int, bytes]] = []  # tenants and keys, the longest unused first
        for turn in range(data.draw(st.integers(1, 6))):
            batch = data.draw(st.lists(st.integers(0, 3), max_size=7))
            coming = [(tenant, key(100 * turn + at)) for at, tenant in enumerate(batch)]
            gone = set(
                store.put([(Record(one, 1, 0, tenant), memoryview(bytes(64))) for tenant, one in coming])
            )
            kept += coming
            for tenant, most in caps.items():
                theirs = [one for holder, one in kept if holder == tenant]
                surplus = set(theirs[: max(0, len(theirs) - most)])
                assert surplus <= gone
                gone -= surplus
                kept = [pair for pair in kept if pair[1] not in surplus]
            assert not gone
            assert set(store.entries) == {one for _, one in kept}


def test_more_than_the_budget_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, budget=2 * ROOM)
    store.put([given(1)])
    with pytest.raises(StoreFailed, match="do not fit"):
        store.put([given(2), given(3), given(4)])
    assert [*store.entries] == [key(1)] and read(store, 1)
    store.close()


def test_a_store_is_one_process_s(store: RecordStore, tmp_path: Path) -> None:
    with pytest.raises(FolderHeld, match=f"held by process {os.getpid()}"):
        opened(tmp_path / "kv")
    with pytest.raises(FolderHeld):
        clear(tmp_path / "kv")


def test_records_of_another_block_size_are_ignored_and_dropped(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([given(1), given(2)])
    store.close()
    other = opened(tmp_path, size=SIZE // 2)
    assert len(other) == 0
    other.close()


def test_every_bit_flip_in_a_value_is_found(tmp_path: Path) -> None:
    """The file itself does not notice: whatever is read is what was stored, or nothing."""
    store = opened(tmp_path)
    store.put([given(n) for n in range(40)])
    store.sync()
    store.close()
    path, random = tmp_path / FILE, Random(3)
    data = bytearray(path.read_bytes())
    hit = set()
    for number in range(0, 40, 2):
        at = data.find(payload(number)[:64])
        assert at >= 0
        data[at + random.randrange(SIZE // 2)] ^= 1 << random.randrange(8)
        hit.add(number)
    path.write_bytes(data)
    store = opened(tmp_path)
    for number in range(40):
        if number in hit:
            with pytest.raises(RecordCorrupt):
                read(store, number)
            assert key(number) not in store.entries
        else:
            read(store, number)
    store.close()


@pytest.mark.parametrize("file", [FILE, index.FILE])
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.97])
def test_a_truncated_file_costs_what_is_cut_off(tmp_path: Path, kept: float, file: str) -> None:
    """Of the index all records."""
    store = opened(tmp_path)
    store.put([given(n) for n in range(30)])
    store.sync()
    store.close()
    path = tmp_path / file
    os.truncate(path, int(path.stat().st_size * kept))
    store = opened(tmp_path)
    assert file == FILE or len(store) == 0
    for number in range(30):
        if file == FILE and number < int(30 * kept):
            read(store, number)
        elif key(number) in store.entries:
            with pytest.raises(RecordCorrupt):
                read(store, number)
    store.put([given(1)])
    read(store, 1)
    store.close()


def test_rubbish_in_place_of_a_file_is_begun_anew(tmp_path: Path) -> None:
    for name in (FILE, index.FILE):
        (tmp_path / name).write_bytes(Random(1).randbytes(100_000))
    store = opened(tmp_path)
    store.put([given(1)])
    read(store, 1)
    store.close()


def test_a_record_that_could_not_be_removed_gives_way_to_the_next_in_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The medium refused to forget it. Its slot is free, and another record is there now."""
    store = opened(tmp_path)
    store.put([given(n) for n in range(4)])

    def refuse(*_: object) -> None:
        raise StoreFailed("no")

    with monkeypatch.context() as patch:
        patch.setattr(index.RecordIndex, "write", refuse)
        store.drop([key(1)])
    store.put([given(9)])
    store.close()
    store = opened(tmp_path)
    assert set(store.entries) == {key(0), key(2), key(3), key(9)} and read(store, 9)
    store.close()


def test_an_index_without_a_layout_is_thrown_away(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        database = env.open_db(b"records")
        with env.begin(db=database, write=True) as txn:
            for number in range(5):
                txn.put(key(number), bytes(80))
    store = opened(tmp_path)
    assert len(store) == 0
    store.put([given(1)])
    store.close()
    store = opened(tmp_path)
    assert len(store) == 1 and read(store, 1)
    store.close()


PAGE = 4096
HEADER = 16  # bytes of a page's header
LEAF = 2  # flag of a page: it has values; else a branch, which has numbers of pages
SUBTREE = 2  # flag of a value: it describes the tree of a named database


@pytest.mark.parametrize("at", range(0, 44, 4))
def test_a_damaged_entry_of_the_index_is_found(tmp_path: Path, at: int) -> None:
    """Wherever it is hit: its tokens would be wrong, its age would be the last that there can be."""
    one = int.from_bytes(b"found in a file.")
    store = opened(tmp_path)
    store.put([given(n) for n in (one, 1, 2)])
    store.close()
    whole = (tmp_path / index.FILE).read_bytes()
    begins = whole.index(key(one)) + len(key(one)) + at
    (tmp_path / index.FILE).write_bytes(whole[:begins] + b"\xff" * 4 + whole[begins + 4 :])
    store = opened(tmp_path)
    assert key(one) not in store.entries
    store.put([given(one)])
    assert read(store, one).tokens == given(one)[0].tokens
    store.close()


NONE = 2**64 - 1  # in place of the number of a root: the tree is empty


def tree_pages(file: bytes) -> list[int]:
    """Numbers of the pages in which LMDB finds its records now, from the root of the tree down.

    The layout is that of LMDB 0.9's `mdb.c`: ``MDB_page``, ``MDB_node``, ``MDB_db``, ``MDB_meta``.
    """

    def number(at: int, size: int) -> int:
        return int.from_bytes(file[at : at + size], "little")

    def below(page: int) -> Iterator[int]:
        yield page
        start = page * PAGE
        for entry in range((number(start + 12, 2) - HEADER) // 2):
            node = start + number(start + HEADER + 2 * entry, 2)
            if not number(start + 10, 2) & LEAF:
                yield from below(number(node, 6))
            elif number(node + 4, 2) & SUBTREE:
                root = number(node + 8 + number(node + 6, 2) + 40, 8)
                yield from below(root) if root != NONE else ()

    meta = max(0, PAGE, key=lambda at: number(at + HEADER + 128, 8))  # of two the one of the last transaction
    return list(below(number(meta + HEADER + 24 + 48 + 40, 8)))


LATER = """
import sys
from pathlib import Path
from holdfast.kvstore.errors import RecordUnavailable
from holdfast.kvstore.disk.index import StoreTorn
from holdfast.tests.kvstore.disk.test_store import given, opened, read
store = opened(Path(sys.argv[1]), anew=sys.argv[2] == "anew")
found = 0
try:
    for number in range(40):
        try:
            read(store, number)
            found += 1
        except RecordUnavailable:
            pass
    for number in range(100, 140):
        store.put([given(number)])
    for number in range(100, 140):
        try:
            read(store, number)
        except RecordUnavailable:  # known by its digest; too many of them, and the file is thrown away
            pass
except StoreTorn as torn:
    assert "thrown away" in str(torn)
    sys.exit(3)
store.close()
print(found)
"""


def test_a_file_with_damaged_pages_is_thrown_away_and_not_met_again(tmp_path: Path) -> None:
    """Else it refused all from then on, or killed each process that opened it. A process each: it may abort."""
    first = tmp_path / "first"
    store = opened(first)
    for number in range(40):
        store.put([given(number)])
    store.close()
    whole = (first / index.FILE).read_bytes()
    random, found = Random(3), list[int]()
    for page in tree_pages(whole):
        folder = tmp_path / str(page)
        folder.mkdir()
        spoilt = bytearray(whole)
        spoilt[page * PAGE + 16 : (page + 1) * PAGE] = random.randbytes(PAGE - 16)
        (folder / index.FILE).write_bytes(spoilt)
        shutil.copy(first / FILE, folder)
        anew = "as it is"
        for _ in range(2):
            command = [sys.executable, "-c", LATER, str(folder), anew]
            process = subprocess.run(command, capture_output=True, check=False)
            if (ended := process.returncode) == 0:
                found.append(int(process.stdout))
                break
            assert ended == 3 or -ended in CRASHES, "known to the process that starts the next"
            anew = "anew" if -ended in CRASHES else anew
        else:
            pytest.fail(f"page {page}: {ended} once more")
    assert found
    assert min(found) < 40, "none of the damaged pages was read"


@pytest.mark.parametrize("last", [1 << 34, 1 << 50, NONE])
def test_an_index_that_asks_for_too_much_memory_is_thrown_away(tmp_path: Path, last: int) -> None:
    """``last``: the number of the last page, as the first pages say; so much is mapped."""
    store = opened(tmp_path)
    store.put([given(1)])
    store.close()
    whole = bytearray((tmp_path / index.FILE).read_bytes())
    for page in (0, PAGE):
        whole[page + HEADER + 120 : page + HEADER + 128] = last.to_bytes(8, "little")
    (tmp_path / index.FILE).write_bytes(whole)
    store = opened(tmp_path)
    store.put([given(2)])
    read(store, 2)
    store.close()


def test_a_tree_of_pages_that_has_no_end_is_thrown_away(tmp_path: Path) -> None:
    """Each read failed, after every restart."""
    store = opened(tmp_path, 200 * ROOM)
    for number in range(150):
        store.put([given(number)])
    store.close()
    whole = bytearray((tmp_path / index.FILE).read_bytes())
    _, root, *leaves = tree_pages(whole)
    for page in leaves:
        whole[page * PAGE + 8 : (page + 1) * PAGE] = whole[root * PAGE + 8 : (root + 1) * PAGE]
    (tmp_path / index.FILE).write_bytes(whole)
    store = opened(tmp_path)
    store.put([given(2)])
    read(store, 2)
    store.close()


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    return tmpfs("2m")


def test_a_full_disk_refuses_and_heals(small_disk: Path) -> None:
    store = opened(small_disk / "kv", budget=1 << 30)
    kept: list[int] = []
    with pytest.raises(StoreFailed):
        kept += [n for n in range(100) if store.put([given(n)]) == []]
    kept = [n for n in range(100) if key(n) in store.entries]
    assert kept
    for n in kept:
        read(store, n)
    with pytest.raises(StoreFailed):
        store.put([given(200)])
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    store.put([given(200)])
    read(store, 200)
    store.close()


def test_a_refused_write_gives_its_slots_back_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie between those that hold records, and behind them."""
    with closing(opened(tmp_path)) as store:
        store.put([given(n) for n in range(6)])
        store.drop([key(1), key(3)])

        def refuse(*_: object) -> int:
            raise OSError(errno.EIO, "no")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            with pytest.raises(StoreFailed):
                store.put([given(n) for n in range(10, 15)])
        assert store.put([given(n) for n in range(20, 25)]) == []
        assert all(read(store, n) for n in (0, 2, 4, 5, *range(20, 25)))
        assert (tmp_path / FILE).stat().st_size <= 9 * ROOM, "no slot is lost"


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_kill_between_any_two_writes_costs_the_records_in_flight_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is full, so that each batch evicts others first, and takes their slots."""
    left = [0]

    def counted(work: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return work(*given)

        return call

    monkeypatch.setattr(os, "pwrite", counted(os.pwrite))
    monkeypatch.setattr(index.RecordIndex, "write", counted(index.RecordIndex.write))
    for calls in range(1, 40):
        folder, there = tmp_path / str(calls), set[int]()
        store = opened(folder, budget=6 * ROOM)
        left[0] = calls
        batch: list[int] = []
        try:
            for first in range(2, 14, 2):
                batch = [first, first + 1]
                store.drop([key(first - 2)])
                evicted = store.put([given(n) for n in batch])
                there = {n for n in there | set(batch) if key(n) not in evicted} - {first - 2}
        except Killed:
            going = [*sorted(there)[: len(batch)], batch[0] - 2]  # were to be evicted, or dropped
        else:
            going = []
        whole, left[0] = left[0] > 0, 0
        with closing(store):
            pass  # what stands in the files is all that the next one has
        with closing(opened(folder, budget=6 * ROOM)) as store:
            found = {n for n in range(14) if key(n) in store.entries}
            assert there - set(going) <= found <= there | set(batch)
            assert all(read(store, n) for n in found)
            assert store.put([given(50)]) == [] or len(store) == 6
        if whole:
            return
    pytest.fail("it never came to an end")
