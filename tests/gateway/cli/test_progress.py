"""What an operator reads while a model loads, on a terminal and in a file."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from holdfast.gateway.cli.progress import Loading
from holdfast.runtime.link.messages import Heartbeat, Phase

BEATS = (
    Heartbeat(Phase.LOADING, 9.0, "starting"),
    Heartbeat(Phase.LOADING, 9.0, "loading layers.0.weight", 0.1),
    Heartbeat(Phase.LOADING, 9.0, "loading layers.1.weight", 0.2),
    Heartbeat(Phase.LOADING, 9.0, "loading layers.7.weight", 0.8),
    Heartbeat(Phase.LOADING, 9.0, "loading layers.8.weight", 0.9),
    Heartbeat(Phase.COMPILING, 9.0, "compiling linear", 0.0),
    Heartbeat(Phase.COMPILING, 9.0, "compiling norm", 0.1),
    Heartbeat(Phase.STEPPING, 9.0),
)


def told(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    with Loading(console) as loading:
        loading.begun("holdfast: starting it")
        for beat in BEATS:
            loading.heard(beat)
        loading.loaded("holdfast: it at http://there")
        loading.heard(Heartbeat(Phase.COMPILING, 9.0))  # its first step
    return console.file.getvalue()


def test_a_file_gets_a_line_for_each_phase_and_few_more() -> None:
    assert told(Console(file=StringIO(), force_terminal=False)).splitlines() == [
        "holdfast: starting it",
        "holdfast: starting",
        "holdfast: loading layers.0.weight (10%)",
        "holdfast: loading layers.7.weight (80%)",
        "holdfast: compiling linear",
        "holdfast: it at http://there",
    ]


def test_a_terminal_gets_a_bar_that_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = told(Console(file=StringIO(), force_terminal=True, width=200))
    assert "holdfast: starting it" in shown and "holdfast: it at http://there" in shown
    assert "holdfast: loading" not in shown and "holdfast: compiling" not in shown
    assert "\x1b[" in shown, "what is drawn anew goes over what was drawn"
