"""The time limit of a test ends it, though hypothesis runs it: what took too long is no example to shrink."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = """
import gc
import signal
import time

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, rule

STRUCK = []


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


@pytest.mark.parametrize("name", ["test_property", "TestMachine", "test_alone", "test_in_a_callback"])
def test_a_limit_ends_the_test_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    options = "-q -s -p no:cacheprovider -p no:xdist -p holdfast.tests.conftest --timeout 100 --rootdir"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), tmp_path, f"test_slow.py::{name}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("struck\n") == 1, done.stdout
    assert "Timeout" in done.stdout
