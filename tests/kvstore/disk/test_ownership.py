"""A KV file has one process, whatever was done to its lock or its name, and is for its user's eyes alone."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.kvstore.disk import admin, index
from holdfast.kvstore.disk import server as server_module
from holdfast.kvstore.disk.index import StoreFailed
from holdfast.kvstore.disk.messages import Drop, encode
from holdfast.kvstore.disk.payload_file import FILE, PayloadFile
from holdfast.kvstore.disk.server import DiskServer
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.errors import FolderHeld
from holdfast.kvstore.host.slots import SlotMemory, make_memory

from . import test_store
from .test_store import given, key, opened, payload, read


def test_a_removed_lock_file_lets_no_second_process_in(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        store.put([given(1)])
        (tmp_path / "holder").unlink()
        with pytest.raises(FolderHeld):
            opened(tmp_path)
        with pytest.raises(FolderHeld):
            admin.remove(tmp_path.parent)
        assert read(store, 1)


def test_a_file_that_is_linked_into_another_folder_has_one_process(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with closing(opened(here)) as store:
        store.put([given(1)])
        there.mkdir()
        for name in (FILE, index.FILE):
            os.link(here / name, there / name)
        with pytest.raises(FolderHeld, match="linked"):
            opened(there)
        store.put([given(2)])
        assert read(store, 1) and read(store, 2)
    with closing(opened(there)) as other:
        assert read(other, 1) and read(other, 2)
        with pytest.raises(FolderHeld):
            opened(here)


def test_a_folder_that_was_renamed_and_replaced_gives_no_wrong_byte(tmp_path: Path) -> None:
    """Its process goes on in the renamed one, and another has the new one."""
    path = tmp_path / "kv"
    with closing(opened(path)) as store:
        store.put([given(1)])
        path.rename(tmp_path / "aside")
        with closing(opened(path)) as other:
            other.put([given(2)])
            for number in range(3, 30):
                store.put([given(number)])
                assert read(store, number) and read(other, 2)
            with pytest.raises(FolderHeld):
                opened(tmp_path / "aside")


@contextmanager
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]}


@pytest.mark.parametrize("wide", [False, True], ids=["new", "with wider modes before"])
def test_files_are_for_their_user_alone(tmp_path: Path, wide: bool) -> None:
    folder = tmp_path / "kv"
    with open_umask():
        if wide:
            opened(folder).close()
            (folder / "costs.json").write_text("{}")
            for path in [folder, *folder.iterdir()]:
                path.chmod(0o777)
        with closing(opened(folder)) as store:
            store.put([given(1)])
            admin.write_about(folder, test_store.SIZE)
            found = modes(folder)
            assert found.pop("kv") == 0o700
            assert {*found} >= {FILE, index.FILE, "holder", admin.ABOUT} and set(found.values()) == {0o600}


def test_files_that_are_not_a_stores_keep_their_modes(tmp_path: Path) -> None:
    """The folder was given by mistake."""
    script = tmp_path / "run.sh"
    script.touch()
    for path in (script, tmp_path):
        path.chmod(0o755)
    for _ in range(2):
        opened(tmp_path).close()
        assert script.stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o777 == 0o755


def holds(folder: Path, number: int) -> bool:
    return payload(number)[:4096] in (folder / FILE).read_bytes()


@pytest.mark.parametrize("how", ["dropped", "evicted"])
@pytest.mark.parametrize("holes", [True, False], ids=["holes", "no holes"])
def test_the_bytes_of_a_record_that_is_gone_leave_the_file(
    tmp_path: Path, how: str, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not holes:
        monkeypatch.setattr(PayloadFile, "punch", unsupported)
    with closing(opened(tmp_path, budget=4 * test_store.ROOM)) as store:
        store.put([given(number) for number in range(1, 5)])
        if how == "evicted":
            store.put([given(5), given(6)])  # others lie in their slots then
        else:
            store.drop([key(1), key(2)])
            assert store.stained and holds(tmp_path, 1) and holds(tmp_path, 2)
        store.scrub()
        assert not store.stained
        assert not holds(tmp_path, 1) and not holds(tmp_path, 2)
        assert read(store, 3) and read(store, 4)
        store.put([given(9)])
        assert read(store, 9)
    with closing(opened(tmp_path)) as store:
        assert read(store, 9)


def test_what_was_dropped_just_before_a_restart_leaves_the_file(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        store.put([given(1), given(2)])
        store.drop([key(1)])
    with closing(opened(tmp_path)) as store:
        assert holds(tmp_path, 1) and store.stained
        store.scrub()
        assert not holds(tmp_path, 1) and read(store, 2)


def test_the_disk_process_erases_what_the_engine_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "SCRUB_SECONDS", 0.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = SlotMemory(make_memory(2 * 4096 + 4 * (test_store.SIZE + 64)), test_store.SPACE, test_store.SIZE)
    with closing(opened(tmp_path)) as store, ours, theirs:
        store.put([given(1), given(2)])
        server = threading.Thread(target=DiskServer(theirs, memory, store).run)
        server.start()
        ours.send(encode(Drop([key(1)])))
        while holds(tmp_path, 1):
            pass
        assert holds(tmp_path, 2)
        ours.shutdown(socket.SHUT_WR)
        server.join()


def test_what_cannot_be_erased_now_is_said_once_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try costs a transaction and a flush."""
    seconds = itertools.count()
    tried: list[int] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = SlotMemory(make_memory(2 * 4096 + 4 * (test_store.SIZE + 64)), test_store.SPACE, test_store.SIZE)

    def scrub(_: RecordStore) -> None:
        tried.append(next(seconds))
        if len(tried) == 3:
            ours.shutdown(socket.SHUT_WR)
        raise StoreFailed("no")

    monkeypatch.setattr(server_module, "SCRUB_SECONDS", 100.0)
    monkeypatch.setattr(RecordStore, "scrub", scrub)
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with closing(opened(tmp_path)) as store, ours, theirs:
        store.put([given(1)])
        store.drop([key(1)])
        DiskServer(theirs, memory, store).run()
    assert all(later - first >= 100 for first, later in itertools.pairwise(tried))
    (line,) = caplog.messages
    assert str(tmp_path) in line and "deleted KV" in line


def unsupported(*_: object) -> None:
    raise OSError(95, "Operation not supported")
