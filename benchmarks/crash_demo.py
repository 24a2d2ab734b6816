"""The second and third act of ``holdfast demo``: engine and server are killed in the middle of replies, and the
session goes on; then its KV is sent to disk, and it is asked again.

The server is a process of its own with a store of its own. The replies must equal those of an undisturbed
session. For Linux: the engine's process is found in ``/proc``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.gateway.settings import DEFAULT_HOST
from holdfast.sdk import Chat, connect

from .faults.server_faults import address_of
from .harness.servers import PROGRAM, children_of

STORY = "Tell me the story of the fox."
LINES = ("My name is Marisol.", STORY, STORY, "What is my name?")
LAST = "What is my name?"
PIECES_BEFORE = 12
"""The number of a reply's text pieces after which a process is killed."""
KILLED = ("the engine was killed in mid-reply", "the server was killed in mid-reply")

Kill = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DisturbedReply:
    """A reply that was interrupted by a crash: its text, and as ``gap`` the longest wait for a piece of it, in
    seconds."""

    text: str
    gap: float


class ServerProcess:
    """A process of ``holdfast serve`` that is killed and started again, always on the same port and with the
    same store."""

    def __init__(self, model: str, store: Path) -> None:
        with socket.create_server((DEFAULT_HOST, 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://{DEFAULT_HOST}:{port}"
        options = ["--port", str(port), "--store", str(store / "sessions"), "--dtype", "float32"]
        self._command = [sys.executable, "-c", PROGRAM, "serve", model, *options]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the server and wait until it is ready."""
        self._process = await asyncio.create_subprocess_exec(*self._command, stderr=asyncio.subprocess.PIPE)
        await address_of(self._process)

    async def kill_engine(self) -> None:
        """Kill the engine's process; the server starts another one."""
        assert self._process is not None, "the server runs"
        for pid in _engines(self._process.pid):
            os.kill(pid, signal.SIGKILL)

    async def kill_and_start(self) -> None:
        """Kill the server, and with it its child processes; then start another one."""
        await self.kill()
        await self.start()

    async def kill(self) -> None:
        """Kill the server and wait for its end."""
        if self._process is not None:
            self._process.kill()
            await self._process.communicate()


async def play_crashes(model: str, console: Console, longest: int | None = None) -> list[str]:
    """Play the second and the third act. ``longest``: the most tokens of a reply; None: the session's default.
    Returns what went wrong, a line for each fault."""
    limits: dict[str, Any] = {} if longest is None else {"max_output_tokens": longest}
    # The disk tier's process may write for a moment after its server was killed.
    kept = tempfile.TemporaryDirectory(prefix="holdfast-demo-", ignore_cleanup_errors=True)
    with kept as folder:
        async with _started(model, folder) as server, connect(server.url) as client:
            async with client.session(temperature=0, **limits) as calm:
                wanted = [await calm.say(line).text() for line in LINES]
                expected_last = await calm.say(LAST).text()
            async with client.session(temperature=0, **limits) as chat:
                kills: tuple[Kill | None, ...] = (None, server.kill_engine, server.kill_and_start, None)
                wrong = []
                for line, expected, kill, name in zip(LINES, wanted, kills, ("", *KILLED, ""), strict=True):
                    told = await _say(chat, line, kill)
                    _show(chat, line, told, name, model, console)
                    if told.text != expected:
                        wrong.append(f"{name or line}: {told.text!r} is not {expected!r}")
                console.print("[bold]Third act[/bold]: the session's KV is sent down to disk.\n")
                wrong += await _use_disk(chat, LAST, expected_last, model, console)
    return wrong


async def _use_disk(chat: Chat, line: str, expected: str, model: str, console: Console) -> list[str]:
    """Lease the session's KV, send it to disk and take a turn on it. ``expected``: the text that the reply must
    be. Returns what went wrong, a line for each fault."""
    receipt = await chat.lease(priority=1, ttl=60.0, returns_in=30.0)
    settled = await chat.settle("disk")
    told = await _say(chat, line, None)
    kept = f"lease {receipt.status}: {receipt.tokens} tokens"
    sent = f"{settled.tokens} tokens settled to {settled.tier} in {settled.ms:.0f} ms"
    _show(chat, line, told, f"{kept} · {sent}", model, console)
    wrong = [] if told.text == expected else [f"asked again: {told.text!r} is not {expected!r}"]
    kv = chat.last.kv
    if settled.tier != "disk" or kv is None or not kv.disk:
        wrong.append(f"nothing came back from disk: {settled.tier}, {kv}")
    elif kv.prefilled + kv.recomputed > kv.new:
        computed = f"{kv.prefilled + kv.recomputed} tokens were computed, {kv.new} are new"
        wrong.append(f"after the disk {computed} ({kv.miss_reason})")
    return wrong


@asynccontextmanager
async def _started(model: str, folder: str) -> AsyncIterator[ServerProcess]:
    server = ServerProcess(model, Path(folder))
    try:
        await server.start()
        yield server
    finally:
        await server.kill()


async def _say(chat: Chat, line: str, kill: Kill | None) -> DisturbedReply:
    pieces: list[str] = []
    gap, last = 0.0, time.perf_counter()
    killing: asyncio.Future[None] | None = None
    async for piece in chat.say(line):
        now = time.perf_counter()
        gap, last = max(gap, now - last), now
        pieces.append(piece)
        if kill is not None and len(pieces) == PIECES_BEFORE:
            killing = asyncio.ensure_future(kill())
    if killing is not None:
        await killing
    return DisturbedReply("".join(pieces), gap)


def _show(chat: Chat, line: str, told: DisturbedReply, name: str, model: str, console: Console) -> None:
    console.print(f"[bold]you[/bold]     {line}")
    shown = told.text if len(told.text) < 80 else _excerpt(told.text)
    console.print(f"[bold cyan]{model}[/bold cyan]  {shown}", soft_wrap=True)
    parts = [f"[bold]{name}[/bold]"] if name else []
    cause = " for a new process to start" if name in KILLED else ""
    parts.append(f"longest wait {told.gap * 1000:.0f} ms{cause}")
    if chat.last.ttft_ms is not None:
        parts.append(f"TTFT {chat.last.ttft_ms:.0f} ms")
    if (kv := chat.last.kv) is not None:
        parts.append(f"restored {kv.host} from host, {kv.disk} from disk · recomputed {kv.recomputed}")
    console.print(f"[dim]        {' · '.join(parts)}[/dim]\n", soft_wrap=True)


def _excerpt(text: str) -> str:
    """The beginning and the end of a long text, whole words of each, with dots between."""
    return f"{text[:60].rsplit(None, 1)[0]} … {text[-16:].split(None, 1)[-1]}"


def _engines(server: int) -> list[int]:
    """Ids of the engine processes of a server. ``server``: its process id."""
    command_lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(server)}
    return [pid for pid, words in command_lines.items() if b"holdfast.runtime\0" in words]
