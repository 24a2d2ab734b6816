"""The terminal chat: what is typed is said, what comes is printed with its cost, Ctrl-C cuts it short."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from holdfast.gateway.cli import chat
from holdfast.sdk.errors import ConnectionFailed, ResponseFailed
from holdfast.sdk.frames.response import KVReceipt
from holdfast.sdk.responses import Finished


def finished(**changes: object) -> Finished:
    kv = KVReceipt(new=7, prefilled=7, resident=20, recomputed=0, host=0, disk=0, restore_ms=0.0)
    response = SimpleNamespace(status="completed", kv=kv, usage=SimpleNamespace(output_tokens=3))
    for name, value in changes.items():
        setattr(response, name, value)
    return Finished(response, 12.3, 45.6)


class Scripted:
    """A chat with given replies; the word `boom` fails."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(model="pocket")
        self.heard: list[str] = []
        self.cancelled = 0
        self.last = finished()

    async def say(self, text: str) -> AsyncIterator[str]:
        self.heard.append(text)
        if text == "boom":
            raise ResponseFailed("it broke", code="turn_failed")
        for piece in ("to", " ", text):
            yield piece

    async def cancel(self) -> None:
        self.cancelled += 1


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    talk = Scripted()

    @asynccontextmanager
    async def session(**fields: object) -> AsyncIterator[Scripted]:
        yield talk

    @asynccontextmanager
    async def connect(url: str, api_key: str | None = None) -> AsyncIterator[SimpleNamespace]:
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
    assert "TTFT 12 ms" in shown and "prefilled 7 = new 7" in shown


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
    class Interrupted(queue.SimpleQueue):
        struck = False

        def get(self, block: bool = True, timeout: float | None = None) -> object:
            if not Interrupted.struck:
                Interrupted.struck = True
                raise KeyboardInterrupt
            return super().get(block, timeout)

    monkeypatch.setattr(chat.queue, "SimpleQueue", Interrupted)
    typing(monkeypatch, "one")
    assert chat.run("ws://here", "", None) == 0
    assert scripted.cancelled == 1
    assert "to one" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_line_and_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def connect(url: str, api_key: str | None = None) -> AsyncIterator[None]:
        raise ConnectionFailed("nothing listens")
        yield

    monkeypatch.setattr(chat, "connect", connect)
    assert chat.run("ws://here", "", None) == 2
    assert capsys.readouterr().err == "holdfast: nothing listens\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"status": "cancelled"}, "cancelled · "),
        (
            {"kv": KVReceipt(new=7, prefilled=9, resident=0, recomputed=1, host=0, disk=0, restore_ms=0.0)},
            "10 ≠ new 7",
        ),
    ],
)
def test_the_cost_line_shows_what_is_unusual(change: dict, told: str) -> None:
    assert told in chat.cost(finished(**change))
