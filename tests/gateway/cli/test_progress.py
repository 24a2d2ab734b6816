"""What an operator reads while a model loads, on a terminal and in a file."""

from __future__ import annotations

import logging
from io import StringIO

import pytest
from rich.console import Console

from holdfast.gateway.cli.serve import Loading
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
        for beat in BEATS:
            loading.heard(beat)
        loading.loaded()
        loading.heard(Heartbeat(Phase.COMPILING, 9.0))  # its first step
    return console.file.getvalue()


def test_a_file_gets_a_line_for_each_phase_and_few_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert not told(Console(file=StringIO(), force_terminal=False)), "the log has it"
    assert caplog.messages == [
        "starting",
        "loading layers.0.weight (10%)",
        "loading layers.7.weight (80%)",
        "compiling linear",
    ]


def test_a_terminal_gets_a_bar_that_is_taken_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TERM", "xterm")
    shown = told(Console(file=StringIO(), force_terminal=True, width=200))
    assert "10%" in shown and not caplog.messages
    assert "\x1b[" in shown, "what is drawn anew goes over what was drawn"
