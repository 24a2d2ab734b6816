"""The black box: what the child wrote is there after it died, and nothing half-written accuses anybody."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.runtime.link.crash_report import ASK, MOST, CrashReport


@pytest.fixture
def box() -> Iterator[CrashReport]:
    box = CrashReport.new()
    yield box
    box.close()


def test_the_last_step_counts(box: CrashReport) -> None:
    assert box.sequences() == frozenset() and box.stacks() == ""
    box.record({1, 2**60, 7})
    box.record([5, 3])
    assert box.sequences() == {5, 3}
    box.record([])
    assert box.sequences() == frozenset()


def test_a_step_wider_than_the_box_is_cut_and_spares_the_stacks(box: CrashReport) -> None:
    box.record(range(MOST + 100))
    assert box.sequences() == set(range(MOST)) and box.stacks() == ""


def test_a_record_that_was_cut_off_accuses_nobody(box: CrashReport, monkeypatch: pytest.MonkeyPatch) -> None:
    box.record([1, 2])
    writes = 0

    def dying(*args: object) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            raise KeyboardInterrupt
        struct.pack_into(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("holdfast.runtime.link.crash_report.struct", type("S", (), {"pack_into": dying}))
    with pytest.raises(KeyboardInterrupt):
        box.record([8, 9])
    monkeypatch.undo()
    assert box.sequences() == frozenset()


CHILD = """
import sys, time
from holdfast.runtime.link.crash_report import CrashReport

def the_line_it_dies_in():
    {act}

box = CrashReport(int(sys.argv[1]))
box.take_stacks()
box.record([4, 2])
print(flush=True)
the_line_it_dies_in()
"""


def child(box: CrashReport, act: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(act=act), str(box.fd)],
        pass_fds=[box.fd],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_crash_leaves_its_stacks_and_its_step(box: CrashReport) -> None:
    with child(box, "import ctypes; ctypes.string_at(0)") as process:
        assert process.wait() == -signal.SIGSEGV
    assert "Segmentation fault" in box.stacks() and "the_line_it_dies_in" in box.stacks()
    assert box.sequences() == {4, 2}


def test_one_that_computes_without_end_tells_where_when_asked(box: CrashReport) -> None:
    with child(box, "sum(iter(int, 1))") as process:  # in C, and never lets the interpreter go
        try:
            while "the_line_it_dies_in" not in box.stacks():
                assert process.poll() is None
                process.send_signal(ASK)
        finally:
            process.kill()
    assert box.sequences() == {4, 2}
