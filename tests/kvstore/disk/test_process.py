"""Disk processes are started: one whenever it is asked for, however often that fails, none for an engine
that left.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from holdfast.kvstore.disk import process
from holdfast.kvstore.disk.process import FIRST, LONGEST, STEADY, DiskProcess
from holdfast.kvstore.host.slots import make_memory


class Watched(DiskProcess):
    """A `DiskProcess` that starts no processes, with the test's clock: what it did, in order."""

    def __init__(self, memory: int) -> None:
        super().__init__(memory)
        self.failing = 0
        self.now = 0.0
        self.waits: list[float] = []
        self._leaving.wait = self._waited  # type: ignore[method-assign]

    def _waited(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return False

    def _spawn(self) -> None:
        if self.failing:
            self.failing -= 1
            raise OSError(24, "Too many open files")
        socket.send_fds(self._ours, [b"disk"], [self._ours.fileno()])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watched, socket.socket]]:
    memory = make_memory(1 << 16)
    watched = Watched(memory)
    monkeypatch.setattr(process.time, "monotonic", lambda: watched.now)
    engine = watched.theirs.dup()
    watched.start()
    yield watched, engine
    engine.close()
    watched.stop()
    os.close(memory)


def disk_process(engine: socket.socket) -> None:
    """Ask for one, and have it."""
    engine.send(b"?")
    engine.settimeout(60)
    _, fds, _, _ = socket.recv_fds(engine, 16, 1)
    assert len(fds) == 1
    os.close(fds[0])


def test_a_process_that_could_not_be_started_is_started_later(
    watched: tuple[Watched, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine asks once."""
    here, engine = watched
    here.failing = 3
    disk_process(engine)
    assert here.waits[0] == 0.0 and [wait for wait in here.waits if wait] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert (
        len(caplog.records) == 3
        and "the disk process cannot get a file descriptor: RLIMIT_NOFILE is" in caplog.text
    )


def test_deaths_far_apart_are_no_failed_starts(watched: tuple[Watched, socket.socket]) -> None:
    here, engine = watched
    for _ in range(12):
        disk_process(engine)
        here.now += STEADY + 1
    assert set(here.waits) == {0.0, FIRST}


def test_one_that_dies_at_once_is_started_ever_more_rarely(watched: tuple[Watched, socket.socket]) -> None:
    here, engine = watched
    for _ in range(15):
        disk_process(engine)
        here.now += 0.05
    assert here.waits == [0.0, *(min(LONGEST, FIRST * 2**at) for at in range(14))]
    assert here.waits[-1] == LONGEST


def test_no_process_is_started_for_an_engine_that_has_left(
    watched: tuple[Watched, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    here, engine = watched
    here.failing = 10**9
    engine.send(b"?")
    thread = [one for one in threading.enumerate() if one.name == "holdfast-disk-process"][-1]
    engine.close()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", [signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGKILL, 2])
def test_what_a_process_crashed_of_is_not_met_by_the_next(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Ended:
        """A process that has ended, by a signal or else with this code."""

        pid = 1
        returncode = -int(end) if isinstance(end, signal.Signals) else end

        def __init__(self, command: list[str], **_: object) -> None:
            commands.append(command)

        def kill(self) -> None:
            """Too late."""

        def wait(self, timeout: float | None = None) -> int:
            return self.returncode

    monkeypatch.setattr(process.subprocess, "Popen", Ended)
    monkeypatch.setattr(process, "FIRST", 0.0)
    memory = make_memory(1 << 16)
    here = DiskProcess(memory)
    engine = here.theirs.dup()
    here.start()
    disk_process(engine)
    disk_process(engine)
    engine.close()
    here.stop()
    os.close(memory)
    assert [command[-1] == "true" for command in commands] == [False, end in process.CRASHES]
