"""`holdfast chat` in a pseudo-terminal, as a user has it: editing, history, typing ahead, Ctrl-C."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path

import pytest

from holdfast.gateway.server import Serving, serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.build import load_engine
from holdfast.runtime.execution.runner import TorchRunner
from holdfast.runtime.plan import Handle, Plan
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.thread import ThreadEngine
from holdfast.runtime.verbs import SequenceState

from ..gateway.cli.terminal import chatting

pytestmark = pytest.mark.anyio
UP, LEFT = "\x1b[A", "\x1b[D"


async def test_a_conversation_on_a_terminal(server: Serving, tmp_path: Path) -> None:
    async with chatting(server.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type(f"My name is Mariso{LEFT}{LEFT}{LEFT}\x05l.\n")  # to the end again
        told = await terminal.until("known before")
        assert re.search(r"first text after \d+ ms · \d+ tokens in \d+ ms · \d+ tokens read, 0 kno", told), (
            told
        )
        await terminal.until("you>")
        terminal.type("What is my name?\n")
        assert "Marisol" in (await terminal.until("first text after"))
        await terminal.until("you>")
        terminal.type("/rewind 2\n")
        assert "2 turns taken back" in await terminal.until("the beginning")
        await terminal.until("you>")
        terminal.type("/quit\n")
        assert await asyncio.to_thread(terminal.process.wait) == 0
    async with chatting(server.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type(f"{UP}{UP}{UP}{UP}\n")  # the history of the chat before
        reply = (await terminal.until("first text after")).split("\n")[-2]
        assert "Marisol" in reply, "the first line was said again"


async def test_what_is_typed_during_a_reply_stands_at_the_next_prompt(
    server: Serving, tmp_path: Path
) -> None:
    async with chatting(server.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type("Tell me the story of the fox.\n")
        began = await terminal.until("fox.\n")
        first = await terminal.until(" ")
        terminal.type("XYZ what is next?")
        reply = first + await terminal.until("first text after")
        assert "XYZ" not in reply, (began, reply)
        assert "XYZ what is next?" in await terminal.until("XYZ what is next?")
        terminal.type("\x03")  # which clears it
        assert await terminal.leave() == 0


@pytest.fixture
async def held(pocket: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serving]:
    """A server that pauses in the middle of its first reply, until it is told to stop that."""
    go_on, launch, left = threading.Event(), TorchRunner.launch, inf

    def held_back(runner: TorchRunner, plan: Plan) -> Handle:
        nonlocal left
        left -= 1
        if left < 0:
            go_on.wait()
        return launch(runner, plan)

    def load(settings, progress, liveness):
        nonlocal left
        loaded = load_engine(settings, progress, liveness)
        left = 30
        return loaded

    monkeypatch.setattr(TorchRunner, "launch", held_back)
    engine = ThreadEngine(pocket, load=load)
    stop = engine.link.stop

    async def told_to_stop(seq: int, keep: int | None = None) -> SequenceState:
        go_on.set()
        return await stop(seq, keep)

    engine.link.stop = told_to_stop
    try:
        async with serving(GatewaySettings(port=0), pocket, engine=engine) as running:
            yield running
    finally:
        go_on.set()


async def test_ctrl_c_cuts_the_reply_and_the_chat_goes_on(held: Serving, tmp_path: Path) -> None:
    async with chatting(held.url, tmp_path) as terminal:
        await terminal.until("you>")
        terminal.type("Count from 1 to 60.\n")
        await terminal.until("1, 2, 3")
        terminal.process.send_signal(signal.SIGINT)
        assert "cancelled: client_cancelled" in await terminal.until("known before")
        await terminal.until("you>")
        terminal.type("My name is Marisol.\n")
        await terminal.until("first text after")
