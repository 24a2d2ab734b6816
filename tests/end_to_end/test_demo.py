"""The demo's own claims: what does not hold is noticed. The whole of it runs in `tests/test_wheel.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rich.console import Console

from holdfast.gateway.cli import demo
from holdfast.sdk.connection.responses import Finished
from holdfast.sdk.frames.response import KVReceipt


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
def test_a_fault_is_printed_and_is_exit_1(faults: list[str], code: int) -> None:
    console = Console(record=True, width=200)
    assert demo.verdict(faults, console) == code
    shown = console.export_text()
    assert all(fault in shown for fault in faults)


def test_its_script_is_long_enough_to_show_recall_and_a_tool() -> None:
    assert len(demo.SCRIPT) >= 6
    assert any(line.tool for line in demo.SCRIPT)
