"""Sessions that are the first to be replayed, on several threads at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
sys.setswitchinterval(1e-6)
from holdfast.sessions.journal import replay
from holdfast.sessions.turn.request import TurnRequest

request = TurnRequest.checked(max_output_tokens=3)
form = replay.request_form(request)
together, read = threading.Barrier(8), []

def first():
    together.wait()
    read.append(replay.request_from(form) == request)

threads = [threading.Thread(target=first) for _ in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
assert read == [True] * 8
"""


@pytest.mark.more
def test_the_first_requests_that_threads_read_at_once_crash_nothing() -> None:
    """Without what `replay` does at its import, one such process in three dies of a segmentation fault."""
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM]) for _ in range(12)]
    assert [one.wait() for one in processes] == [0] * 12
