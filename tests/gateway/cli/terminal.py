"""`holdfast chat` in a pseudo-terminal, for tests."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


class Terminal:
    """The other end of a chat's terminal."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self.process = process
        self.raw = ""
        self.shown = ""
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    @staticmethod
    def plain(raw: str) -> str:
        """The text without what moves the cursor or sets colours."""
        return re.sub(r"\x1b\[[?>]?[\d;]*[a-zA-Z]|\x1b\][^\x07]*\x07|\r", "", raw)

    async def leave(self) -> int:
        """Press Ctrl-C twice at the empty prompt. Returns the exit code."""
        self.type("\x03")
        await self.until("Ctrl-C again, or Ctrl-D, leaves")
        await self.until("you>")
        self.type("\x03")
        return await asyncio.to_thread(self.process.wait)

    async def until(self, text: str) -> str:
        """What is shown from the last call on, up to this text."""
        loop = asyncio.get_running_loop()
        while text not in self.shown[self._seen :]:
            readable = asyncio.Event()
            loop.add_reader(self._master, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._master)
            self.raw += os.read(self._master, 65536).decode(errors="replace")
            self.shown = self.plain(self.raw)
        begin, self._seen = self._seen, self.shown.index(text, self._seen) + len(text)
        return self.shown[begin : self._seen]


@asynccontextmanager
async def chatting(
    url: str, state: Path, *words: str, columns: int = 200, term: str = "xterm"
) -> AsyncIterator[Terminal]:
    """A chat on a terminal of its own. ``url``: "": none is given."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    # A shell may have started the tests with SIGINT ignored, which a child inherits. Ctrl-C is a signal only at
    # the terminal that controls the process.
    program = (
        "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "  signal.signal(signal.SIGINT, signal.default_int_handler);"
        " from holdfast.gateway.cli.main import main; main()"
    )
    process = subprocess.Popen(  # noqa: ASYNC220 - it is only started here
        [sys.executable, "-c", program, "chat", *([url] if url else []), *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**inherited, "XDG_STATE_HOME": str(state), "TERM": term},
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)
