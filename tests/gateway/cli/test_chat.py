"""The terminal chat: what is read is said, what comes is printed with its cost, commands, what is kept."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from holdfast.gateway.cli import chat, chat_state
from holdfast.gateway.cli.chat_state import LONGEST_LINE, MOST_SESSIONS, ChatState, KeptSession
from holdfast.gateway.cli.main import main
from holdfast.gateway.cli.terminal import Output
from holdfast.sdk.connection.responses import Finished
from holdfast.sdk.errors import ResponseFailed
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.response import KVReceipt

anyio_mark = pytest.mark.anyio


def finished(**changes: object) -> Finished:
    kv = KVReceipt(new=7, prefilled=7, resident=20, recomputed=0, host=0, disk=0, restore_ms=0.0)
    usage = SimpleNamespace(output_tokens=3)
    response = SimpleNamespace(status="completed", kv=kv, usage=usage, status_details=None, output=[])
    for name, value in changes.items():
        setattr(response, name, value)
    return Finished(response, 12.3, 45.6)


class Scripted:
    """A chat with the replies `to TEXT`; the word `boom` fails, and `stop` is cut by a Ctrl-C after its first
    piece."""

    def __init__(self, name: str = "main") -> None:
        self.session = SimpleNamespace(id=name, model="pocket")
        self.handle = f"hold_{name}"
        self.name = name
        self.heard: list[str] = []
        self.rewound: list[str] = []
        self.cancelled = asyncio.Event()
        self.closed = False
        self.forks: list[Scripted] = []
        self.items: list[MessageItem] = []

    async def history(self, most: int | None = None) -> list[MessageItem]:
        return self.items[-most:] if most else self.items

    @property
    def last(self) -> Finished:
        return finished(output=[SimpleNamespace(id=f"{self.name}-{len(self.heard)}")])

    async def say(self, text: str) -> AsyncIterator[str]:
        if text == "boom":
            raise ResponseFailed("it broke", code="turn_failed")
        self.heard.append(text)
        for piece in ("to", " ", text):
            if piece == " " and text == "stop":
                signal.raise_signal(signal.SIGINT)
                await self.cancelled.wait()
            yield piece
        self.items += [MessageItem.of("user", text), MessageItem.of("assistant", f"to {text}")]

    async def cancel(self) -> None:
        self.cancelled.set()

    async def rewind(self, to: str) -> None:
        self.rewound.append(to)
        turns = 0 if to == "root" else int(to.rpartition("-")[2])
        del self.items[2 * turns :]

    async def fork(self) -> list[Scripted]:
        self.forks.append(Scripted("fork"))
        return self.forks[-1:]

    async def aclose(self) -> None:
        self.closed = True


class Typed:
    """A reader of these lines, then of the end."""

    interactive = True

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    async def read(self) -> str:
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)

    def pause(self) -> None:
        pass

    def interrupt(self) -> None:
        pass


async def talked(talk: Scripted, folder: Path, *lines: str, resume: bool = False) -> str:
    """What is shown of a chat in which these lines are typed. ``resume``: the one that was kept last."""
    shown = io.StringIO()
    kept = KeptSession(talk.session.id, "", "ws://here", head="root")
    if resume:
        kept = ChatState(folder).read().sessions[0]
    console, out = Console(file=shown, width=200, highlight=False), Output(shown)
    assert await chat.TerminalChat(talk, console, out, Typed(*lines), ChatState(folder), kept).talk() == 0
    return shown.getvalue()


@anyio_mark
async def test_lines_are_said_and_replies_printed_with_their_cost(tmp_path: Path) -> None:
    talk = Scripted()
    shown = await talked(talk, tmp_path, "one", "  ", "two")
    assert talk.heard == ["one", "two"]
    assert "to one\n" in shown and "to two\n" in shown
    assert "first text after 12 ms · 3 tokens in 46 ms · 7 tokens read, 20 known before" in shown


@anyio_mark
async def test_a_failed_reply_is_told_and_the_chat_goes_on(tmp_path: Path) -> None:
    shown = await talked(Scripted(), tmp_path, "boom", "again")
    assert "turn_failed: it broke" in shown and "to again" in shown


@anyio_mark
async def test_ctrl_c_while_a_reply_comes_cancels_it_and_prints_the_rest(tmp_path: Path) -> None:
    talk = Scripted()
    assert "to stop" in await talked(talk, tmp_path, "stop", "on")
    assert talk.heard == ["stop", "on"] and talk.cancelled.is_set()


@anyio_mark
async def test_rewind_takes_turns_back(tmp_path: Path) -> None:
    talk = Scripted()
    shown = await talked(
        talk, tmp_path, "one", "two", "three", "/rewind", "/rewind 2", "/rewind", "/rewind x"
    )
    assert talk.rewound == ["main-2", "root"]
    assert "1 turn taken back; the last line was: two" in shown
    assert "2 turns taken back; the last line was: none" in shown
    assert shown.count("/rewind takes a number from 1 to 0") == 2


@anyio_mark
async def test_a_fork_goes_on_and_back_returns(tmp_path: Path) -> None:
    talk = Scripted()
    lines = ("one", "/back", "/fork", "two", "/rewind 2", "/back", "three", "/quit", "never")
    shown = await talked(talk, tmp_path, *lines)
    (fork,) = talk.forks
    assert (talk.heard, fork.heard, fork.rewound) == (["one", "three"], ["two"], ["root"])
    assert fork.closed and not talk.closed
    assert "this is no copy" in shown
    assert [one.handle for one in ChatState(tmp_path).read().sessions] == ["hold_main", "hold_fork"]


@anyio_mark
async def test_a_conversation_is_saved_to_a_new_file(tmp_path: Path) -> None:
    text, data = tmp_path / "talk.txt", tmp_path / "talk.json"
    nowhere = tmp_path / "no" / "folder"
    lines = ("one", "//two", f"/save {text}", f"/save {data}", f"/save {nowhere}", "/save")
    shown = await talked(Scripted(), tmp_path, *lines)
    assert text.read_text() == "you> one\nto one\n\nyou> /two\nto /two\n\n"
    assert [line["text"] for line in json.loads(data.read_text())] == ["one", "to one", "/two", "to /two"]
    assert f"2 turns written to {text}" in shown and "cannot be written: No such file" in shown
    assert "/save takes a file's name" in shown


@anyio_mark
async def test_save_leaves_a_file_that_exists_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("mine")
    shown = await talked(Scripted(), tmp_path, "one", f"/save {file}")
    assert file.read_text() == "mine" and "exists and stays as it is" in shown


@anyio_mark
async def test_save_writes_also_what_was_said_before_the_session_was_resumed(tmp_path: Path) -> None:
    talk, file = Scripted(), tmp_path / "talk.txt"
    await talked(talk, tmp_path, "one", "two")
    shown = await talked(talk, tmp_path, "three", f"/save {file}", resume=True)
    assert file.read_text() == "".join(f"you> {one}\nto {one}\n\n" for one in ("one", "two", "three"))
    assert f"3 turns written to {file}" in shown


@anyio_mark
async def test_what_a_resumed_session_said_last_is_marked_as_past(tmp_path: Path) -> None:
    talk = Scripted()
    await talked(talk, tmp_path, "one", "two", "three")
    shown = await talked(talk, tmp_path, "/rewind", resume=True)
    assert "said before (the last turn, 2 turns before it left out):\n    you> three\n    to three\n" in shown
    assert "1 turn taken back; the last line was: two" in shown


@anyio_mark
async def test_sessions_that_began_alike_are_told_apart(tmp_path: Path) -> None:
    await talked(Scripted(), tmp_path, "one", "two", "/fork", "three")
    await talked(Scripted("other"), tmp_path, "one", "four")
    shown = await talked(Scripted("new"), tmp_path, "/sessions")
    listed = [line.partition(" at ws://here  ")[2] for line in shown.splitlines() if "ws://here" in line]
    assert listed == ["one … four", "fork of one … three", "one … two"]


@anyio_mark
async def test_an_unknown_command_is_not_said(tmp_path: Path) -> None:
    talk = Scripted()
    shown = await talked(talk, tmp_path, "/hlep", "/help")
    assert not talk.heard
    assert "there is no command /hlep: /help lists them" in shown and "/save FILE" in shown


@anyio_mark
async def test_the_turns_of_a_resumed_session_can_be_taken_back(tmp_path: Path) -> None:
    await talked(Scripted(), tmp_path, "one", "two")
    (kept,) = ChatState(tmp_path).read().sessions
    assert (kept.marks, kept.head) == (["root", "main-1"], "main-2")


def test_a_server_that_is_not_there_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert chat.run("ws://127.0.0.1:1", None, None, {}) == 2
    told = capsys.readouterr().err
    assert told.startswith("holdfast: Cannot connect to ws://127.0.0.1:1/v1/realtime: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "resume", "url"),
    [
        (["--resume"], "last", None),
        (["--resume", "hold_1"], "hold_1", None),
        (["--resume", "--system", "x"], "last", None),
        (["--resume", "ws://here:1"], "last", "ws://here:1"),
        (["ws://here:1", "--resume"], "last", "ws://here:1"),
        ([], None, None),
    ],
)
def test_resume_may_stand_alone(
    monkeypatch: pytest.MonkeyPatch, words: list[str], resume: str | None, url: str | None
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(chat, "run", lambda *given: asked.append(given[:3]) or 0)
    monkeypatch.setattr("sys.argv", ["holdfast", "chat", *words])
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    monkeypatch.delenv("HOLDFAST_API_KEY", raising=False)
    with pytest.raises(SystemExit):
        main()
    assert asked == [(url, None, resume)]


def test_what_is_kept_is_bounded_and_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_state, "MOST_LINES", 20)
    state = ChatState(tmp_path / "new")
    for number in range(MOST_SESSIONS + 5):
        state.keep(KeptSession(str(number), f"hold_{number}", "ws://here"))
    state.keep(KeptSession("7", "hold_again", "ws://here"))
    kept = state.read().sessions
    assert len(kept) == MOST_SESSIONS and [one.id for one in kept[:2]] == ["7", str(MOST_SESSIONS + 4)]
    assert kept[0].handle == "hold_again" and sum(one.id == "7" for one in kept) == 1
    state.forget("hold_again")
    assert len(state.read().sessions) == MOST_SESSIONS - 1
    for line in ("x" * (LONGEST_LINE + 1), *map(str, range(25))):
        state.typed(line)
    assert state.read().lines == [str(number) for number in range(5, 25)]
    assert state.file.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in state.file.parent.iterdir()] == [state.file.name]


def test_a_damaged_or_forbidden_file_stops_nothing(tmp_path: Path) -> None:
    state = ChatState(tmp_path)
    state.file.write_text("{damaged")
    assert state.read().sessions == []
    state.typed("line")
    assert state.read().lines == ["line"]
    ChatState(state.file / "below").typed("nowhere")


def test_the_cost_line_tells_no_tokens_that_are_not_known() -> None:
    unknown = KVReceipt(
        new=7, prefilled=0, resident=0, recomputed=0, host=0, disk=0, restore_ms=0.0, miss_reason="unreported"
    )
    assert "read" not in chat.cost(finished(kv=unknown))


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
