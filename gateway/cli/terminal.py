"""A terminal, or a pipe instead: messages are read from it, replies are written to it."""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
import termios
import unicodedata
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.cells import cell_len

from ...sdk.tools.running import in_thread

PROMPT = "you> "


class TerminalPrompt:
    """Reads messages from a terminal, with editing and the history ``lines``. Enter sends what is typed;
    Alt-Enter, and Enter behind a backslash, begin a new line; a paste is one text, its lines with it."""

    interactive = True

    def __init__(self, lines: History) -> None:
        self._screen = sys.stdout if sys.stdout.isatty() else sys.stderr
        output = Vt100_Output.from_pty(self._screen, os.environ.get("TERM"))
        output.enable_cpr = False  # nothing is shown below the prompt
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            history=lines,
            output=output,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=" " * len(PROMPT),
            reserve_space_for_menu=0,
        )

    async def read(self) -> str:
        """The next message. Raises ``EOFError`` at Ctrl-D, ``KeyboardInterrupt`` at Ctrl-C, both at an empty
        prompt."""
        return await self._session.prompt_async(handle_sigint=False)

    def pause(self) -> None:
        """Called when a reply begins: let the terminal mark a paste as one for the next prompt, too."""
        self._bracket("h")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside the block, the terminal shows what is typed only at the prompt; what is typed before waits for
        it."""
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        local = before[3] & ~(termios.ECHO | termios.ICANON)
        quiet = [before[0] & ~termios.ICRNL, *before[1:3], local, *before[4:]]
        termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
        try:
            yield
        finally:
            self._bracket("l")
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def _bracket(self, switch: str) -> None:
        self._screen.write(f"\x1b[?2004{switch}")
        self._screen.flush()

    def interrupt(self) -> None:
        """Do what the key Ctrl-C does: the signal came by other ways."""
        if self._session.app.is_running:
            self._session.app.key_processor.send_sigint()


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


class PlainLines:
    """Reads messages from a pipe, a file, or a terminal that can only show text: each line is one; a backslash
    at its end goes on in the next. ``prompt``: shown before each; "" unless it is a terminal."""

    def __init__(self, prompt: str) -> None:
        self.interactive = bool(prompt)
        self._prompt = prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._left = ""
        self._over = False
        self._reading: asyncio.Task[bytes] | None = None
        self._struck: asyncio.Future[None] | None = None

    async def read(self) -> str:
        """The next message. Raises ``EOFError`` at the end, ``KeyboardInterrupt`` after ``interrupt``."""
        message = ""
        sys.stdout.write(self._prompt)
        sys.stdout.flush()
        while True:
            while not self._over and "\n" not in self._left:
                await self._more()
            if self._over and not self._left:
                if message:
                    return message
                raise EOFError
            line, _, self._left = self._left.partition("\n")
            if not line.endswith("\\"):
                return message + line
            message += line[:-1] + "\n"

    async def _more(self) -> None:
        if self._reading is None:  # one that Ctrl-C has left still reads the next line
            self._reading = asyncio.ensure_future(in_thread(lambda: os.read(sys.stdin.fileno(), 1 << 16)))
        self._struck = asyncio.get_running_loop().create_future()
        either: list[asyncio.Future[Any]] = [self._reading, self._struck]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._struck.done():
            raise KeyboardInterrupt
        reading, self._reading = self._reading, None
        try:
            piece = reading.result()
        except OSError:  # the terminal is gone
            piece = b""
        self._over = not piece
        self._left += self._decoder.decode(piece, self._over)

    def pause(self) -> None:
        """Does nothing."""

    def opened(self) -> AbstractContextManager[None]:
        """Does nothing."""
        return nullcontext()

    def interrupt(self) -> None:
        """Let the present read raise ``KeyboardInterrupt``."""
        if self._struck is not None and not self._struck.done():
            self._struck.set_result(None)


class Output:
    """Writes replies, which come in pieces, to ``file``. On a terminal it breaks lines between words: a word
    that reaches the edge is taken back, by backspaces, and written on the next line. Control characters, which
    could move the cursor, are left out there. To a pipe or a file it writes the text as it is."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._wraps = file.isatty()
        self._column = 0
        self._word = ""  # that stands at the end of the line

    def write(self, piece: str) -> None:
        """Write more of the reply."""
        if self._wraps:
            # the last cell stays free: terminals differ in what follows it
            edge = max(3, os.get_terminal_size(self._file.fileno()).columns or 80) - 1
            piece = "".join(self._shown(character, edge) for character in printable(piece))
        elif piece:
            self._column = int(not piece.endswith("\n"))
        self._file.write(piece)
        self._file.flush()

    def end_line(self) -> None:
        """Begin a new line, unless nothing stands on this one."""
        if self._column:
            self._file.write("\n")
            self._file.flush()
        self._column, self._word = 0, ""

    def _shown(self, character: str, edge: int) -> str:
        """What to write for one more character of the reply."""
        cells, before = cell_len(character), ""
        if character == "\n":
            self._column, self._word = 0, ""
            return "\n"
        if character.isspace() or cells > 1:  # a line may break here
            self._word = ""
        if self._column + cells > edge:
            back = cell_len(self._word)
            if back == self._column:  # it is longer than a line
                back, self._word = 0, ""
            before = "\b" * back + " " * back + "\n" + self._word
            self._column = back
            if character.isspace():
                return before
        if not character.isspace():
            self._word += character
        self._column += cells
        return before + character


def printable(text: str) -> str:
    """The text without control characters but line ends; a tab is four blanks."""
    text = text.replace("\t", "    ")
    return "".join(one for one in text if one == "\n" or unicodedata.category(one) != "Cc")


def in_units(seconds: float) -> str:
    """A time in its largest unit: ``3 h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
