"""The engine's end and a real disk process: records go down and come up; slots come back only from a dead
one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from holdfast.kvstore.disk import client
from holdfast.kvstore.disk import process as process_module
from holdfast.kvstore.disk.admin import accounts, remove
from holdfast.kvstore.disk.client import DEADLINE, DiskTier
from holdfast.kvstore.disk.index import FILE as INDEX
from holdfast.kvstore.disk.messages import (
    PACKET_BYTES,
    Begin,
    Done,
    Down,
    Fetched,
    Known,
    RecordAt,
    Store,
    Up,
    down_decoder,
    encode,
    up_decoder,
)
from holdfast.kvstore.disk.payload_file import FILE
from holdfast.kvstore.disk.process import DiskProcess
from holdfast.kvstore.disk.server import DiskServer
from holdfast.kvstore.disk.store import RecordStore, held
from holdfast.kvstore.host.slots import SlotMemory, SlotState, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.tier import Presence, Record
from holdfast.kvstore.tiers import Tiers
from holdfast.tests.kvstore.host.records import audit, get, put

SIZE = 8192
SPACE = bytes(range(16))


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


class Stand:
    """Tiers with a disk tier, and what is asked of them; ``now`` is the test's."""

    tiers: Tiers
    now = 0.0

    def has(self, *numbers: int) -> list[bool]:
        """Which of these records are on disk."""
        return [self.tiers.found_below(key(number)) for number in numbers]

    def store(self, number: int) -> bool:
        """Whether this began to bring the record down."""
        before = self.tiers.stored(key(number))
        self.tiers.send([key(number)])
        self.tiers.send_down({}, lambda key: False, self.now)
        return self.tiers.stored(key(number)) and not before

    def fetch(self, number: int, *, direct: bool = False) -> bool:
        """Whether the record is on its way up."""
        return self.tiers.fetch(key(number), self.now, 0, direct=direct) is Presence.FOUND


class Stage(Stand):
    """A host tier of 40 slots, a disk process, and the disk below; ``now`` is the test's."""

    def __init__(self, folder: Path, space: bytes = SPACE, floor: int = 0) -> None:
        fd = make_memory(2 * 4096 + 41 * (SIZE + 64))
        memory = SlotMemory(fd, space, SIZE)
        self.host = HostTier(memory)
        self.disk_process = DiskProcess(fd)
        control = self.disk_process.theirs.dup()
        self.disk_process.start()
        begin = Begin(str(folder / space.hex()), space, SIZE, 1 << 22, floor=floor)
        self.blocks = [memoryview(bytearray(SIZE)) for _ in range(20)]
        client.ask(control)
        self.disk = DiskTier(control, begin)
        self.tiers = Tiers(self.host, (self.disk,), lambda block: self.blocks[block])
        self.file = Path(begin.folder) / FILE
        self._fd: int | None = fd

    def until(self, reached: Callable[[], object]) -> None:
        end = time.monotonic() + 240  # it is a Python process, and the machine may be busy
        while not reached():
            self.tiers.poll(self.now)
            time.sleep(0.0005)  # the core is the disk process's meanwhile
            assert time.monotonic() < end, "it never came"

    def until_lost(self) -> None:
        """Wait until the disk process is given up, by the test's clock."""

        def lost() -> int:
            self.now += 0.5
            return self.disk.statistics()["lost"]

        self.until(lost)
        assert not self.disk.ready

    def settled(self) -> bool:
        return self.disk.ready and not self.disk.waiting

    def keep(self, *numbers: int) -> None:
        for number in numbers:
            assert put(self.host, key(number), number % 4 + 1, memoryview(payload(number)))

    def down(self, *numbers: int) -> None:
        self.keep(*numbers)
        for number in numbers:
            self.until(lambda: self.tiers.room > 0)
            assert self.store(number)
        self.until(self.settled)

    def damage(self, number: int) -> None:
        at = self.file.read_bytes().index(payload(number))
        with self.file.open("r+b") as file:
            file.seek(at + 100)
            file.write(b"damaged")

    def check(self, number: int) -> None:
        record = get(self.host, key(number))
        assert (record[0], bytes(record[1])) == (number % 4 + 1, payload(number))

    def close(self) -> None:
        self.disk.close()
        self.disk_process.stop()
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    stage.until(stage.settled)
    yield stage
    audit(stage.host)
    stage.close()


def test_records_go_down_and_come_up_as_they_were(stage: Stage) -> None:
    stage.down(*range(30))
    for number in range(30):
        stage.host.drop(key(number))
        assert stage.fetch(number) and stage.tiers.fetching(key(number))
    assert not any(key(number) in stage.host for number in range(30)), "not before it has come"
    stage.until(stage.settled)
    for number in range(30):
        stage.check(number)
    statistics = stage.disk.statistics()
    assert (statistics["stored"], statistics["fetched"], statistics["lost"]) == (30, 30, 0)


def test_a_record_that_is_gone_fails_alone_in_its_piece(stage: Stage) -> None:
    stage.down(*range(20))
    stage.damage(7)
    for number in range(20):
        stage.host.drop(key(number))
        assert stage.fetch(number)
    stage.until(stage.settled)
    for number in range(20):
        if number != 7:
            stage.check(number)
    assert key(7) not in stage.host and not all(stage.has(7))
    assert (stage.disk.statistics()["fetched"], stage.disk.statistics()["failed"]) == (19, 1)


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    return tmpfs("16m")


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def test_a_disk_that_another_fills_gets_the_space_of_kv_and_returns_it(small_disk: Path) -> None:
    """The disk process sees it by itself, gives up KV of other models first, and tells the engine what went."""
    floor = 8 << 20
    other = Stage(small_disk, bytes(16))
    other.until(other.settled)
    other.down(*range(30))
    other.close()
    stage = Stage(small_disk, floor=floor)
    stage.until(stage.settled)
    stage.down(*range(30))
    assert stage.disk.statistics()["budget"] == 1 << 22
    ballast = small_disk / "ballast"
    taken = held(small_disk / bytes(16).hex())
    ballast.write_bytes(bytes(free(small_disk) - floor + taken // 2))
    stage.until(lambda: free(small_disk) >= floor and not (small_disk / bytes(16).hex()).exists())
    assert len(stage.disk) == 30
    with ballast.open("ab") as file:
        file.write(bytes(free(small_disk) - floor + 5 * SIZE))
    stage.until(lambda: len(stage.disk) < 30)
    stage.until(lambda: free(small_disk) >= floor)
    assert len(stage.disk) > 5 and all(stage.has(29)) and not all(stage.has(0))
    with ballast.open("ab") as file:
        file.write(bytes(free(small_disk) - 1024))
    stage.until(lambda: len(stage.disk) == 0 and stage.disk.statistics()["budget"] < 1 << 20)
    assert stage.disk.full
    ballast.unlink()
    stage.until(lambda: stage.disk.statistics()["budget"] == 1 << 22)
    stage.down(*range(40, 60))
    stage.host.drop(key(45))
    assert stage.fetch(45)
    stage.until(stage.settled)
    stage.check(45)
    stage.close()


def test_a_socket_that_found_no_descriptor_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel drops it without a word: the disk tier would stay without a process."""
    lost = [1]

    def received(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int], int, object]:
        found = socket.socket.recvmsg(sock, size, socket.CMSG_LEN(4 * most))
        fds = [int.from_bytes(data[:4], "little") for _, _, data in found[1]]
        if lost and fds:
            lost.clear()
            os.close(fds.pop())
        return found[0], fds, 0, None

    monkeypatch.setattr(client.socket, "recv_fds", received)
    stage = Stage(tmp_path)
    stage.until(stage.settled)
    assert not lost and "RLIMIT_NOFILE" in caplog.text
    stage.down(1)
    stage.close()


def known(*numbers: int, last: bool = True) -> Known:
    """These records, each in the slot of its number."""
    return Known({key(number): RecordAt(number, 1, 4) for number in numbers}, last)


class Scripted(Stand):
    """A disk tier whose disk processes are the test."""

    def __init__(self) -> None:
        self._memory = make_memory(2 * 4096 + 41 * (SIZE + 64))
        self.host = HostTier(SlotMemory(self._memory, SPACE, SIZE))
        control, self._control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.ask(control)
        self.disk = DiskTier(control, Begin("", SPACE, SIZE, 1 << 22))
        self.tiers = Tiers(self.host, (self.disk,))
        self._sock: socket.socket | None = None

    def begin(self, *numbers: int, last: bool = True) -> None:
        """Be the next disk process, with these records; the one before is gone."""
        if self._sock is not None:
            self._sock.close()
            self.tiers.poll(0.0)
        engine, self._sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with engine:
            socket.send_fds(self._control, [b"disk"], [engine.fileno()])
        self.tell(known(*numbers, last=last))
        self.tiers.poll(0.0)
        assert isinstance(self.asked(), Begin)

    def tell(self, *answers: Up) -> None:
        assert self._sock is not None
        for answer in answers:
            self._sock.send(encode(answer))

    def asked(self) -> Down:
        assert self._sock is not None
        return down_decoder.decode(self._sock.recv(PACKET_BYTES))

    def close(self) -> None:
        self.disk.close()
        self._control.close()
        if self._sock is not None:
            self._sock.close()
        os.close(self._memory)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


def test_one_look_takes_up_few_pieces_and_what_may_have_come_during_a_step(scripted: Scripted) -> None:
    """However long the step was: no disk process is given up for answers that the engine did not look at."""
    scripted.begin(*range(30))
    for number in range(30):
        assert scripted.fetch(number)
        scripted.tiers.poll(0.0)  # a piece each
    scripted.tell(*(Fetched(scripted.asked().ticket, [0], []) for _ in range(30)))
    waiting = []
    for now in (0.0, 0.0, 0.001, 60 * DEADLINE):
        scripted.tiers.poll(now)
        waiting.append(scripted.disk.statistics()["waiting"])
    assert waiting == [26, 22, 8, 0] and scripted.disk.statistics()["lost"] == 0


def test_records_count_when_they_can_be_fetched(scripted: Scripted) -> None:
    """A disk process may be stopped between two packets of keys: the figure must not promise what no turn
    can get.
    """
    scripted.begin(1, last=False)
    assert not scripted.fetch(1)
    assert (scripted.disk.statistics()["records"], len(scripted.disk)) == (0, 0)
    scripted.tell(known(2))
    scripted.tiers.poll(0.0)
    assert (scripted.disk.statistics()["records"], len(scripted.disk)) == (2, 2)
    assert all(scripted.has(1)) and all(scripted.has(2))


def test_the_disk_process_is_told_once_which_records_leases_cover(scripted: Scripted) -> None:
    """The leases are those of the host tier; another disk process is told all of them again."""

    def told(number: int) -> tuple[set[bytes], set[bytes]]:
        put(scripted.host, key(number), 1, payload(number))
        assert scripted.store(number)
        store = scripted.asked()
        return set(store.leased), set(store.released)

    scripted.begin()
    scripted.tiers.lease(1, [key(1), key(2)], 5.0)
    assert told(10) == ({key(1), key(2)}, set())
    assert told(11) == (set(), set())
    scripted.tiers.lease(2, [key(2)], 5.0)
    scripted.tiers.lease(1, [], 0.0)
    assert told(12) == (set(), {key(1)})
    scripted.begin()
    assert told(13) == ({key(2)}, set())


def test_what_is_fetched_bare_takes_no_slot_and_is_read_where_it_lies(stage: Stage, tmp_path: Path) -> None:
    """After another start, too; at once, if it is in memory."""
    stage.down(*range(20))
    stage.close()
    again = Stage(tmp_path)
    again.until(again.settled)
    keys = [key(number) for number in range(20)]
    free = again.host.room
    assert again.tiers.read(keys, range(20)) == [number % 4 + 1 for number in range(20)]
    for number in range(20):
        assert again.fetch(number, direct=True) and again.tiers.fetching(key(number))
    assert again.fetch(3) and not again.fetch(99, direct=True)
    again.until(again.settled)
    assert again.host.room == free - 1 and not any(map(again.tiers.fetching, keys))
    assert again.tiers.read(keys, range(20)) == [number % 4 + 1 for number in range(20)]
    assert [bytes(block) == payload(number) for number, block in enumerate(again.blocks)] == [True] * 20
    audit(again.host)
    again.close()


def test_what_is_gone_or_damaged_is_not_read_from_memory(stage: Stage) -> None:
    stage.down(*range(6))
    stage.damage(2)
    for number in (1, 2, 4):
        stage.host.drop(key(number))
        assert stage.fetch(number, direct=True)
    stage.disk.drop(key(4))
    stage.keep(30)
    assert stage.store(30)
    while payload(30) not in stage.file.read_bytes():
        pass  # 4 is gone before the engine asks for the others
    stage.until(stage.settled)
    assert [stage.tiers.read([key(number)], [0]) for number in (1, 2, 4)] == [[2], [], []]
    assert stage.fetch(2)
    stage.until(stage.settled)
    for number in (2, 4):
        assert key(number) not in stage.host and not all(stage.has(number)), "the disk process finds out"


def test_a_direct_fetch_from_a_process_that_dies_can_be_asked_of_the_next(stage: Stage) -> None:
    stage.down(*range(8))
    pid = stage.disk_process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert all(stage.fetch(number, direct=True) for number in range(8))
    os.kill(pid, signal.SIGKILL)
    stage.until(lambda: not stage.disk.ready)
    assert not any(stage.tiers.fetching(key(number)) for number in range(8))
    stage.until(stage.settled)
    assert not any(stage.tiers.fetching(key(number)) for number in range(8))
    assert all(stage.fetch(number, direct=True) for number in range(8))
    stage.until(stage.settled)
    assert all(stage.disk.readable(key(number)) for number in range(8))


def test_another_start_knows_what_is_there(stage: Stage, tmp_path: Path) -> None:
    stage.down(*range(10))
    stage.close()
    again = Stage(tmp_path)
    again.until(again.settled)
    assert len(again.disk) == 10 and again.fetch(4)
    again.until(again.settled)
    again.check(4)
    again.close()
    (account,) = accounts(tmp_path, "verify")
    assert (account.records, account.damaged) == (10, 0)
    assert [one.records for one in accounts(tmp_path, "stat")] == [10]
    assert remove(tmp_path) == 1 and not list(accounts(tmp_path, "stat"))
    stage.__init__(tmp_path)  # for the fixture to close
    stage.until(stage.settled)


def test_records_of_another_namespace_are_ignored_with_one_line(
    stage: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.down(1)
    stage.close()
    other = Stage(tmp_path, bytes(16))
    other.until(other.settled)
    assert not len(other.disk) and not other.fetch(1)
    other.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert "KV of 1 other models or settings: ignored" in line
    stage.__init__(tmp_path)  # for the fixture to close
    stage.until(stage.settled)
    assert all(stage.has(1))


def test_kv_of_an_older_form_and_a_damaged_index_are_removed_with_one_line(
    stage: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.down(1)
    folder = next(tmp_path.glob(f"*/{INDEX}")).parent
    stage.close()
    older = tmp_path / bytes(16).hex()
    older.mkdir()
    (older / INDEX).write_bytes((folder / INDEX).read_bytes())
    (folder / INDEX).write_bytes(bytes(9000))
    stage.__init__(tmp_path)  # for the fixture to close
    stage.until(stage.settled)
    assert not len(stage.disk) and not older.exists()
    said = capfd.readouterr().err
    assert "is of an older form, and removed" in said and "all KV in the folder is given up" in said


@pytest.mark.parametrize("when", ["before its keys are known", "while it is lost", "before its answer"])
def test_what_is_erased_is_gone_whatever_the_disk_process_does(
    stage: Stage, tmp_path: Path, when: str
) -> None:
    """It dies, is new, or has just begun to bring the record up: the record comes back to no tier."""
    stage.down(*range(4))
    if when == "before its keys are known":
        stage.close()
        stage.__init__(tmp_path)
        stage.disk.drop(key(1), erase=True)
    elif when == "while it is lost":
        pid = stage.disk_process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        stage.disk.drop(key(1), erase=True)
        stage.tiers.poll(stage.now)  # it is asked, and never does it
        os.kill(pid, signal.SIGKILL)
        stage.until(lambda: not stage.disk.ready)
        stage.disk.drop(key(2), erase=True)
    else:
        stage.host.drop(key(1))
        assert stage.fetch(1)
        stage.disk.drop(key(1), erase=True)
    stage.until(stage.settled)
    erased = (1, 2) if when == "while it is lost" else (1,)
    assert not any(all(stage.has(number)) or stage.fetch(number) for number in erased)
    assert when != "before its answer" or key(1) not in stage.host
    assert all(all(stage.has(number)) for number in range(4) if number not in erased)
    stage.down(9)
    stage.close()
    (account,) = accounts(tmp_path, "verify")
    assert account.records == 5 - len(erased)
    stage.__init__(tmp_path)  # for the fixture to close
    stage.until(stage.settled)
    stage.down(1)
    assert all(stage.has(1)), "written again, it is a record as others"


def test_a_dropped_record_is_removed_without_another_store(stage: Stage, tmp_path: Path) -> None:
    stage.down(*range(4))
    stage.disk.drop(key(1))
    stage.disk.drop(key(2), erase=True)
    stage.tiers.poll(stage.now)
    stage.close()
    (account,) = accounts(tmp_path, "verify")
    assert account.records == 2
    stage.__init__(tmp_path)  # for the fixture to close
    stage.until(stage.settled)


def test_a_record_that_is_not_there_is_not_fetched(stage: Stage) -> None:
    assert not stage.fetch(1) and not stage.store(1)
    stage.keep(1)
    assert stage.store(1) and not stage.store(1)
    stage.until(stage.settled)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_slots_of_a_process_that_is_lost_come_back_when_it_is_dead(stage: Stage, how: signal.Signals) -> None:
    stage.down(1, 2)
    stage.host.drop(key(1))
    first = stage.disk_process.pid
    assert first is not None
    os.kill(first, how)
    assert stage.fetch(1)
    stage.keep(3)
    storing = stage.store(3)
    stage.until_lost()
    filling = [slot for slot in range(40) if stage.host.memory.state(slot) is SlotState.FILLING]
    assert storing or how is signal.SIGKILL, (
        "a stopped one takes what comes, a dead one may be noticed at once"
    )
    assert len(filling) == 1, "the slot is the lost one's until that is dead"
    stage.until(stage.settled)
    assert stage.disk_process.pid != first
    assert stage.host.memory.state(filling[0]) is SlotState.FREE
    assert stage.fetch(1)
    stage.until(stage.settled)
    stage.check(1)
    assert stage.disk.statistics()["lost"] == 1


def test_a_process_that_stops_before_it_sends_its_keys_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned = process_module.subprocess.Popen

    def stopped(*args: object, **fields: object) -> object:
        process = spawned(*args, **fields)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(process_module.subprocess, "Popen", stopped)
    stage = Stage(tmp_path)
    try:
        stage.until(lambda: stage.disk_process.pid is not None)
        monkeypatch.setattr(process_module.subprocess, "Popen", spawned)
        stage.until_lost()
        stage.until(stage.settled)
        stage.down(1)
    finally:
        stage.close()


def test_kills_at_any_moment_lose_and_mix_up_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        process_module, "LONGEST", 0.01
    )  # starts that fail in a row are not further and further apart
    random = Random(5)
    for _ in range(12):
        numbers = random.sample(range(60), 8)
        for number in numbers:
            if key(number) not in stage.host and not stage.fetch(number):
                put(stage.host, key(number), number % 4 + 1, memoryview(payload(number)))
            stage.store(number)
        for _ in range(random.randrange(200)):
            stage.tiers.poll(stage.now)
        if (pid := stage.disk_process.pid) is not None:
            with contextlib.suppress(ProcessLookupError):  # that of the round before, being replaced
                os.kill(pid, signal.SIGKILL)
        stage.until(stage.settled)
        for number in numbers:
            if key(number) in stage.host:
                stage.check(number)
    assert stage.disk.statistics()["lost"] > 0


def test_the_disk_process_ends_with_the_engine(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.until(stage.settled)
    pid = stage.disk_process.pid
    assert pid is not None
    stage.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_disk_that_refuses_is_logged_once_and_once_more_when_it_takes_records_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory_fd = make_memory(1 << 20)
    memory = SlotMemory(memory_fd, SPACE, SIZE)
    os.close(memory_fd)
    engine, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store = RecordStore(Begin(str(tmp_path / "kv"), SPACE, SIZE, 1 << 20))
    thread = threading.Thread(target=DiskServer(server, memory, store).run)
    thread.start()

    def stored(number: int) -> bool:
        engine.send(encode(Store(number, 0, Record(key(number), 4, 0))))
        while not isinstance(answer := up_decoder.decode(engine.recv(PACKET_BYTES)), Done):
            continue
        assert answer.ticket == number
        return answer.at is not None

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "no")

    try:
        assert stored(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            assert not stored(1) and not stored(2)
        assert stored(3) and stored(4)
    finally:
        engine.close()
        thread.join()
        store.close()
        server.close()
    told = [record.message for record in caplog.records]
    assert len([line for line in told if "the disk refuses" in line]) == 1
    assert told[-1:] == ["the disk takes records again"] and told.count(told[-1]) == 1
