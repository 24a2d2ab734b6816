"""The demo: a real server, socket and engine process; it ends well only if its own claims hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from holdfast.gateway import demo
from holdfast.sdk.frames.response import KVReceipt
from holdfast.sdk.reply import Finished


@pytest.mark.timeout(600)
def test_the_demo_recalls_calls_and_counts(tmp_path: Path) -> None:
    program = "from holdfast.gateway.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "demo"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"TTFT \d+ ms · prefilled (\d+) (.) new (\d+)", done.stdout)
    assert len(counts) >= 6 and all(computed == new and sign == "=" for computed, sign, new in counts)
    assert "called get_weather(" in done.stdout
    assert "the engine was killed in mid-reply" in done.stdout
    assert "the server was killed in mid-reply" in done.stdout
    assert "tokens settled to disk in" in done.stdout
    assert not list(tmp_path.iterdir())


def finished(prefilled: int, new: int, recomputed: int = 0) -> Finished:
    kv = KVReceipt(
        new=new, prefilled=prefilled, resident=0, recomputed=recomputed, host=0, disk=0, restore_ms=0.0
    )
    return Finished(SimpleNamespace(kv=kv), 1.0, 2.0)


@pytest.mark.parametrize(
    ("response", "wrong"),
    [
        (finished(7, 7), False),
        (finished(8, 7), True),
        (finished(6, 7), True),
        (finished(7, 7, recomputed=1), True),
        (Finished(SimpleNamespace(kv=None), 1.0, 2.0), True),
    ],
)
def test_tokens_that_do_not_add_up_are_noticed(response: Finished, wrong: bool) -> None:
    assert (demo._miscounted(response) is not None) is wrong


@pytest.mark.parametrize(("faults", "code"), [([], 0), (["turn 8: the reply lacks 'Marisol'"], 1)])
def test_what_went_wrong_is_told_and_is_exit_1(faults: list[str], code: int) -> None:
    console = Console(record=True, width=200)
    assert demo._verdict(faults, console) == code
    shown = console.export_text()
    assert all(fault in shown for fault in faults)


def test_its_script_is_long_enough_to_show_recall_and_a_tool() -> None:
    assert len(demo.SCRIPT) >= 6
    assert any(line.tool for line in demo.SCRIPT)
