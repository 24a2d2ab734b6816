"""The engine's process by its exit codes: the other end closed, a bad beginning, a step that hangs."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest

from holdfast.runtime.__main__ import EXIT_ORPHANED, EXIT_UNSERVABLE
from holdfast.runtime.errors import FrameInvalid, SettingsInvalid
from holdfast.runtime.link.child import DESCRIPTORS
from holdfast.runtime.link.crash_report import CrashReport
from holdfast.runtime.link.messages import AnyReport, Fatal, Hello, frame, report_reader
from holdfast.runtime.settings import EngineSettings

PLAIN = "from holdfast.runtime.__main__ import main; raise SystemExit(main())"

MADE_UP = """
import sys, threading, types
from holdfast.runtime import __main__ as child
from holdfast.runtime.link.messages import Hello
from holdfast.runtime.link.engine_end import LoadedEngine

class Engine:
    def step(self):
        {step}

hello = Hello("made up", "none", "none", 1, (), 1, 1, 1, 1, 0)
loaded = LoadedEngine(Engine(), hello)
made_up = types.SimpleNamespace(load_engine=lambda settings, progress, liveness, *lower: loaded)
sys.modules["holdfast.runtime.build"] = made_up  # no torch, no model
child.GRACE = {grace}
raise SystemExit(child.main())
"""
IDLES = MADE_UP.format(step="return None", grace=600)
HANGS = MADE_UP.format(step="print('hung', file=sys.stderr, flush=True); threading.Event().wait()", grace=0.1)
RAISES = MADE_UP.format(step="raise ZeroDivisionError('by chance')", grace=600)


class Child:
    """A child and the other end of its socket."""

    def __init__(self, code: str, first: bytes) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs, contextlib.closing(CrashReport.new()) as report:
            fds = [theirs.fileno(), report.fd]
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "--fd", str(fds[0]), "--crash-report", str(fds[1])],
                pass_fds=fds,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.sock.sendall(DESCRIPTORS + first if first else first)
        self.reports: list[AnyReport] = []

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def read(self, until: type | None = None) -> list[AnyReport]:
        """To the end, or until a report of a kind has come."""
        reader = report_reader()
        with contextlib.suppress(ConnectionResetError):  # a socket with unread bytes ends like this
            while data := self.sock.recv(1 << 16):
                self.reports += reader.feed(data)
                if until is not None and any(isinstance(report, until) for report in self.reports):
                    break
        return self.reports

    def end(self) -> tuple[int, str]:
        """Close our end; its exit code and what it wrote to stderr."""
        self.sock.close()
        _, errors = self.process.communicate()
        return self.process.returncode, errors


def settings(**changes: object) -> bytes:
    return frame(EngineSettings(model="pocket", **changes))  # type: ignore[arg-type]


def test_it_ends_quietly_when_the_other_end_closes() -> None:
    with Child(IDLES, settings()) as child:
        child.read(until=Hello)
        assert child.end() == (0, "")


def test_it_ends_quietly_if_no_settings_arrive() -> None:
    with Child(PLAIN, b"") as child:
        assert child.end() == (0, "")


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", FrameInvalid.code),
        (frame(Fatal("no", "settings")), FrameInvalid.code),
        (settings(blocks=1).replace(b"\xa6blocks\x01", b"\xa6blocks\x00"), SettingsInvalid.code),
    ],
    ids=["garbage", "another message", "settings out of bounds"],
)
def test_a_bad_first_frame_is_named(first: bytes, code: str) -> None:
    with Child(PLAIN, first) as child:
        (fatal,) = child.read()
        assert isinstance(fatal, Fatal) and fatal.code == code
        assert child.end() == (EXIT_UNSERVABLE, "")  # the parent says it, once


def test_an_orphan_exits_although_its_step_hangs() -> None:
    with Child(HANGS, settings()) as child:
        assert child.process.stderr is not None
        assert child.process.stderr.readline() == "hung\n"
        assert child.end() == (EXIT_ORPHANED, "")


def test_an_internal_fault_is_sent_and_its_traceback_is_on_stderr() -> None:
    with Child(RAISES, settings()) as child:
        fatal = child.read()[-1]
        assert isinstance(fatal, Fatal) and "by chance" in fatal.message
        code, errors = child.end()
        assert code == 1 and "Traceback" in errors and "ZeroDivisionError" in errors
