"""The terminal chat: what is typed is said, what comes is printed with its cost, commands, Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.gateway.cli import chat
from holdfast.sdk.connection.responses import Finished
from holdfast.sdk.errors import ConnectionFailed, ResponseFailed
from holdfast.sdk.frames.response import KVReceipt


def finished(**changes: object) -> Finished:
    kv = KVReceipt(new=7, prefilled=7, resident=20, recomputed=0, host=0, disk=0, restore_ms=0.0)
    usage = SimpleNamespace(output_tokens=3)
    response = SimpleNamespace(status="completed", kv=kv, usage=usage, status_details=None, output=[])
    for name, value in changes.items():
        setattr(response, name, value)
    return Finished(response, 12.3, 45.6)


class Scripted:
    """A chat with given replies; the word `boom` fails, and `stop` is cut by a Ctrl-C after its first piece."""

    def __init__(self, name: str = "main") -> None:
        self.session = SimpleNamespace(model="pocket")
        self.name = name
        self.heard: list[str] = []
        self.rewound: list[str] = []
        self.cancelled = 0
        self.closed = False
        self.forks: list[Scripted] = []

    @property
    def last(self) -> Finished:
        return finished(output=[SimpleNamespace(id=f"{self.name}-{len(self.heard)}")])

    def say(self, text: str) -> Iterator[str]:
        self.heard.append(text)
        return Pieces(text)

    def cancel(self) -> None:
        self.cancelled += 1

    def rewind(self, to: str) -> None:
        self.rewound.append(to)

    def fork(self) -> list[Scripted]:
        self.forks.append(Scripted("fork"))
        return self.forks[-1:]

    def close(self) -> None:
        self.closed = True


class Pieces:
    """The reply `to TEXT`."""

    def __init__(self, text: str) -> None:
        self._struck = text != "stop"
        self._left = ["to", " ", text]
        self._text = text

    def __iter__(self) -> Pieces:
        return self

    def __next__(self) -> str:
        if self._text == "boom":
            raise ResponseFailed("it broke", code="turn_failed")
        if len(self._left) == 2 and not self._struck:
            self._struck = True
            raise KeyboardInterrupt
        if not self._left:
            raise StopIteration
        return self._left.pop(0)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    talk = Scripted()

    @contextmanager
    def session(**fields: object) -> Iterator[Scripted]:
        yield talk

    @contextmanager
    def connect(url: str, api_key: str | None = None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(session=session)

    monkeypatch.setattr(chat, "connect", connect)
    return talk


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str, end: type[BaseException] = EOFError) -> None:
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise end
        return line

    monkeypatch.setattr("builtins.input", read)


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_lines_are_said_and_replies_printed_with_their_cost(
    scripted: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    end: type[BaseException],
) -> None:
    typing(monkeypatch, "one", "  ", "two", end=end)
    assert chat.run("ws://here", "", None) == 0
    shown = capsys.readouterr().out
    assert scripted.heard == ["one", "two"]
    assert "to one\n" in shown and "to two\n" in shown
    assert "first text after 12 ms · 3 tokens in 46 ms · 7 tokens read, 20 known before" in shown


def test_a_failed_reply_is_told_and_the_chat_goes_on(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "boom", "again")
    assert chat.run("ws://here", "", None) == 0
    shown = capsys.readouterr().out
    assert "turn_failed: it broke" in shown and "to again" in shown


def test_ctrl_c_while_a_reply_comes_cancels_it_and_prints_the_rest(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "stop")
    assert chat.run("ws://here", "", None) == 0
    assert scripted.cancelled == 1
    assert "to stop" in capsys.readouterr().out


def test_ctrl_c_when_a_reply_has_just_ended_changes_nothing(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strikes = [True, False]

    def cost(last: Finished) -> str:
        if strikes.pop(0):
            raise KeyboardInterrupt
        return "its cost"

    monkeypatch.setattr(chat, "cost", cost)
    typing(monkeypatch, "one", "two", "/rewind 2")
    assert chat.run("ws://here", "", None) == 0
    assert scripted.heard == ["one", "two"] and scripted.rewound == ["root"]
    assert "its cost" in capsys.readouterr().out


def test_rewind_takes_turns_back(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "one", "two", "three", "/rewind", "/rewind 2", "/rewind", "/rewind x")
    chat.run("ws://here", "", None)
    assert scripted.rewound == ["main-2", "root"]
    shown = capsys.readouterr().out
    assert "1 turn taken back; the last line was: two" in shown
    assert "2 turns taken back; the last line was: none" in shown
    assert shown.count("/rewind takes a number from 1 to 0") == 2


def test_a_fork_goes_on_and_back_returns(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "one", "/back", "/fork", "two", "/rewind 2", "/back", "three", "/quit", "never")
    assert chat.run("ws://here", "", None) == 0
    (fork,) = scripted.forks
    assert (scripted.heard, fork.heard, fork.rewound) == (["one", "three"], ["two"], ["root"])
    assert fork.closed and not scripted.closed
    assert "this is no copy" in capsys.readouterr().out


def test_a_conversation_is_saved(
    scripted: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    text, data = tmp_path / "talk.txt", tmp_path / "talk.json"
    nowhere = tmp_path / "no" / "folder"
    typing(monkeypatch, "one", "//two", f"/save {text}", f"/save {data}", f"/save {nowhere}", "/save")
    chat.run("ws://here", "", None)
    assert text.read_text() == "you> one\nto one\n\nyou> /two\nto /two\n\n"
    assert [line["text"] for line in json.loads(data.read_text())] == ["one", "to one", "/two", "to /two"]
    shown = capsys.readouterr().out
    assert f"2 turns written to {text}" in shown and "cannot be written: No such file" in shown
    assert "/save takes a file's name" in shown


def test_an_unknown_command_is_not_said(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "/hlep", "/help")
    chat.run("ws://here", "", None)
    assert not scripted.heard
    shown = capsys.readouterr().out
    assert "there is no command /hlep: /help lists them" in shown and "/save FILE" in shown


def test_a_server_that_is_not_there_is_one_line_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def connect(url: str, api_key: str | None = None) -> Iterator[None]:
        raise ConnectionFailed("nothing listens")
        yield

    monkeypatch.setattr(chat, "connect", connect)
    assert chat.run("ws://here", "", None) == 2
    assert capsys.readouterr().err == "holdfast: nothing listens\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"kv": KVReceipt(new=7, prefilled=7, resident=1, recomputed=0, host=2, disk=3, restore_ms=1.0)},
            "7 tokens read, 6 known before (2 from host, 3 from disk)",
        ),
        ({"status": "cancelled"}, "cancelled · first text"),
        (
            {"kv": KVReceipt(new=7, prefilled=9, resident=0, recomputed=1, host=0, disk=0, restore_ms=0.0)},
            "10 tokens read, 0 known before; 3 of those read were known once",
        ),
    ],
)
def test_the_cost_line_shows_what_is_unusual(change: dict, told: str) -> None:
    assert told in chat.cost(finished(**change))
