"""The time limit of a test ends it, though hypothesis runs it: what took too long is no example to shrink."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SLOW = """
import gc
import signal
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, rule

STRUCK = []


@pytest.fixture(autouse=True)
def unstruck():
    STRUCK.clear()


def take_too_long():
    STRUCK.append(1)
    print("struck")
    if len(STRUCK) < 9:
        signal.raise_signal(signal.SIGALRM)


@given(st.integers())
def test_property(number):
    take_too_long()


class Machine(RuleBasedStateMachine):
    @rule(number=st.integers())
    def step(self, number):
        take_too_long()


TestMachine = Machine.TestCase


def test_alone():
    take_too_long()


def test_in_a_callback():
    def gc_callback(phase, info):
        if not STRUCK:
            take_too_long()

    gc.callbacks.append(gc_callback)
    gc.collect()
    gc.callbacks.remove(gc_callback)
    time.sleep(60)
"""


def test_a_limit_ends_each_test_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    options = "-q -s -p no:cacheprovider -p no:xdist -p holdfast.tests.conftest --timeout 100 --rootdir"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), tmp_path, "test_slow.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("struck\n") == 4 and "4 failed" in done.stdout, done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert len(failed) == 4 and all("conftest.TimeLimit" in line for line in failed), done.stdout
