"""Worker threads that are the first to decode a type, at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
sys.setswitchinterval(1e-6)
from holdfast.gateway.responses import frames
from holdfast.sessions.journal import replay
from holdfast.sessions.turn.request import TurnRequest
from holdfast.sessions.workers import Workers

request = TurnRequest.checked(max_output_tokens=3)
form = replay.request_form(request)
works = {
    "request": lambda: replay.request_from(form) == request,
    "body": lambda: frames.decoded(b'{"input": [{"role": "user", "content": "Hi"}]}', frames.CreateBody),
}
Workers()
together, done = threading.Barrier(8), []

def first():
    together.wait()
    done.append(bool(works[sys.argv[1]]()))

threads = [threading.Thread(target=first) for _ in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
assert done == [True] * 8
"""


@pytest.mark.more
@pytest.mark.parametrize("what", ["request", "body"])
def test_threads_that_decode_a_type_first_crash_nothing(what: str) -> None:
    """Without what `Workers` does when it is made, one such process in three dies of a segmentation fault."""
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM, what]) for _ in range(12)]
    assert [one.wait() for one in processes] == [0] * 12
