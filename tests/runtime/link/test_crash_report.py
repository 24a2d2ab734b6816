"""The crash report: what the child wrote is there after its death; a half-written record blames no sequence."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.runtime.link.crash_report import ASK, MOST, CrashReport


@pytest.fixture
def report() -> Iterator[CrashReport]:
    report = CrashReport.new()
    yield report
    report.close()


def test_the_last_step_counts(report: CrashReport) -> None:
    assert report.sequences() == frozenset() and report.stacks() == ""
    report.record({1, 2**60, 7})
    report.record([5, 3])
    assert report.sequences() == {5, 3}
    report.record([])
    assert report.sequences() == frozenset()


def test_a_step_wider_than_the_report_is_cut_and_spares_the_stacks(report: CrashReport) -> None:
    report.record(range(MOST + 100))
    assert report.sequences() == set(range(MOST)) and report.stacks() == ""


def test_a_half_written_record_blames_no_sequence(
    report: CrashReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    report.record([1, 2])
    writes = 0

    def dying(*args: object) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            raise KeyboardInterrupt
        struct.pack_into(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("holdfast.runtime.link.crash_report.struct", type("S", (), {"pack_into": dying}))
    with pytest.raises(KeyboardInterrupt):
        report.record([8, 9])
    monkeypatch.undo()
    assert report.sequences() == frozenset()


CHILD = """
import sys, time
from holdfast.runtime.link.crash_report import CrashReport

def the_line_it_dies_in():
    {act}

report = CrashReport(int(sys.argv[1]))
report.take_stacks()
report.record([4, 2])
print(flush=True)
the_line_it_dies_in()
"""


def child(report: CrashReport, act: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(act=act), str(report.fd)],
        pass_fds=[report.fd],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_crash_leaves_its_stacks_and_its_step(report: CrashReport) -> None:
    with child(report, "import ctypes; ctypes.string_at(0)") as process:
        assert process.wait() == -signal.SIGSEGV
    assert "Segmentation fault" in report.stacks() and "the_line_it_dies_in" in report.stacks()
    assert report.sequences() == {4, 2}


def test_a_child_in_an_endless_loop_writes_its_stacks_when_asked(report: CrashReport) -> None:
    with child(report, "sum(iter(int, 1))") as process:  # in C, and never lets the interpreter go
        try:
            while "the_line_it_dies_in" not in report.stacks():
                assert process.poll() is None
                process.send_signal(ASK)
        finally:
            process.kill()
    assert report.sequences() == {4, 2}
