"""``holdfast chat``: a conversation in a terminal with a running server.

The event loop has a thread of its own (`sdk.sync`), so that pings are answered while the prompt waits. Ctrl-C
reaches the main thread and cuts a reply short. What is typed while a reply comes is shown at the next prompt.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ...sdk.connection.responses import Finished
from ...sdk.errors import SDKError
from ...sdk.sync import SyncChat, connect

PROMPT = "you> "
MOST_HISTORY = 1000
HELP = """\
/rewind [N]  take the last turn back, or the last N
/fork        go on in a copy of this conversation; /back returns to where it was copied
/save FILE   write the conversation to a file: JSON for a name that ends in .json, else text
/quit        leave, as Ctrl-D does; Ctrl-C cuts a reply short
//TEXT       say a text that begins with a slash"""


def run(url: str, instructions: str, api_key: str | None) -> int:
    """Open a session on the server and talk until /quit, Ctrl-D, or Ctrl-C at the prompt. ``url``: of the
    server. ``api_key``: None if the server has no keys. Returns the exit code: 0, or 2 with the cause on stderr
    if no session could be opened."""
    try:
        with (
            connect(url, api_key=api_key) as client,
            client.session(instructions=instructions or None) as chat,
            _history(),
        ):
            return TerminalChat(chat, Console(highlight=False)).talk()
    except SDKError as error:
        print(f"holdfast: {error.message}", file=sys.stderr)
        return 2


class ShownBranch:
    """A conversation, or a fork of it, with what the terminal has shown. ``chat``: its session. ``said``: for
    each turn, the user's text and the reply. ``marks``: for each turn, the id of the item before it (``root``
    before the first), which a rewind of that turn goes back to."""

    def __init__(self, chat: SyncChat, said: list[tuple[str, str]], marks: list[str]) -> None:
        self.chat = chat
        self.said = said
        self.marks = marks
        self.head = "root"
        """The id of the conversation's last item; ``root`` if it is empty."""


class TerminalChat:
    """Reads lines from the terminal, sends them to the model or runs them as commands, and prints the
    replies."""

    def __init__(self, chat: SyncChat, console: Console) -> None:
        self._console = console
        self._branches = [ShownBranch(chat, [], [])]

    @property
    def _branch(self) -> ShownBranch:
        return self._branches[-1]

    def talk(self) -> int:
        """Serve the terminal until /quit, Ctrl-D, or Ctrl-C at the prompt. Returns the exit code."""
        model = escape(self._branch.chat.session.model)
        self._console.print(f"[dim]{model} · Ctrl-C cuts a reply short, Ctrl-D leaves, /help[/dim]")
        while True:
            try:
                line = input(PROMPT).strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return 0
            if line == "/quit":
                return 0
            try:
                if line.startswith("/") and not line.startswith("//"):
                    self._command(*line.split(maxsplit=1))
                elif line:
                    self._turn(line.removeprefix("/") if line.startswith("//") else line)
            except KeyboardInterrupt:  # the reply had just ended, or a command was waited for
                self._console.print()

    def _command(self, name: str, rest: str = "") -> None:
        commands = {"/rewind": self._rewind, "/fork": self._fork, "/back": self._back, "/save": self._save}
        if name == "/help":
            self._tell(HELP)
        elif name not in commands:
            self._tell(f"there is no command {name}: /help lists them")
        else:
            try:
                commands[name](rest)
            except SDKError as error:
                self._refuse(error)

    # --- what is said ---------------------------------------------------------------------------------------

    def _turn(self, text: str) -> None:
        branch = self._branch
        reply = branch.chat.say(text)
        spoken: list[str] = []
        cut = False
        with quiet_terminal():
            while True:
                try:
                    if cut:
                        branch.chat.cancel()
                        cut = False
                    for piece in reply:
                        spoken.append(piece)
                        sys.stdout.write(piece)
                        sys.stdout.flush()
                    break
                except KeyboardInterrupt:
                    cut = True
                except SDKError as error:
                    print()
                    self._refuse(error)
                    return
            print()
        last = branch.chat.last
        branch.said.append((text, "".join(spoken)))
        branch.marks.append(branch.head)
        items = [item.id for item in last.response.output if item.id]
        branch.head = items[-1] if items else branch.head
        self._console.print(f"[dim]{escape(cost(last))}[/dim]")

    # --- commands -------------------------------------------------------------------------------------------

    def _rewind(self, rest: str) -> None:
        branch = self._branch
        turns = int(rest) if rest.isdecimal() else 1 if not rest else 0
        if not 1 <= turns <= len(branch.marks):
            self._tell(f"/rewind takes a number from 1 to {len(branch.marks)}, the turns so far")
            return
        mark = branch.marks[-turns]
        branch.chat.rewind(mark)
        branch.head = mark
        del branch.marks[-turns:], branch.said[-turns:]
        self._tell(f"{turns} {_plural('turn', turns)} taken back; the last line was: {self._last_said()}")

    def _last_said(self) -> str:
        return self._branch.said[-1][0] if self._branch.said else "none, this is the beginning"

    def _fork(self, rest: str) -> None:
        branch = self._branch
        (copy,) = branch.chat.fork()
        fork = ShownBranch(copy, list(branch.said), list(branch.marks))
        fork.head = branch.head
        self._branches.append(fork)
        self._tell("this is a copy of the conversation; /back returns to where it was copied")

    def _back(self, rest: str) -> None:
        if len(self._branches) == 1:
            self._tell("this is no copy: /fork makes one")
            return
        self._branches.pop().chat.close()
        self._tell(f"back where the copy was made; the last line was: {self._last_said()}")

    def _save(self, rest: str) -> None:
        if not rest:
            self._tell("/save takes a file's name")
            return
        said, file = self._branch.said, Path(rest).expanduser()
        if file.suffix == ".json":
            turns = [[{"role": "user", "text": one}, {"role": "assistant", "text": two}] for one, two in said]
            text = json.dumps([line for turn in turns for line in turn], ensure_ascii=False, indent=1) + "\n"
        else:
            text = "".join(f"{PROMPT}{one}\n{two}\n\n" for one, two in said)
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            self._tell(f"{file} cannot be written: {error.strerror}")
        else:
            self._tell(f"{len(said)} {_plural('turn', len(said))} written to {file}")

    def _tell(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)

    def _refuse(self, error: SDKError) -> None:
        self._console.print(f"[red]{escape(f'{error.code}: {error.message}')}[/red]", soft_wrap=True)


def cost(finished: Finished) -> str:
    """One line about a finished response: the time to the first text, the reply's tokens, and how many tokens
    of the prompt were computed and how many had cached KV."""
    parts = []
    if finished.status != "completed":
        details = finished.response.status_details
        reason = None if details is None else details.reason
        parts.append(f"{finished.status}: {reason}" if reason else finished.status)
    if finished.ttft_ms is not None:
        parts.append(f"first text after {finished.ttft_ms:.0f} ms")
    if finished.usage is not None:
        tokens = finished.usage.output_tokens
        parts.append(f"{tokens} {_plural('token', tokens)} in {finished.total_ms:.0f} ms")
    if finished.kv is not None:
        kv = finished.kv
        computed, known = kv.prefilled + kv.recomputed, kv.resident + kv.host + kv.disk
        read = f"{computed} {_plural('token', computed)} read, {known} known before"
        back = [f"{count} from {where}" for count, where in ((kv.host, "host"), (kv.disk, "disk")) if count]
        read += f" ({', '.join(back)})" if back else ""
        again = computed - kv.new
        parts.append(read + (f"; {again} of those read were known once" if again > 0 else ""))
    return " · ".join(parts)


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Inside the block, the terminal does not show what is typed; it appears at the next prompt. Does nothing
    if stdin is not a terminal."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Inside the block, the lines at the prompt can be edited, and are saved for the next chat: in
    ``chat_history`` in the user's state folder. Does nothing if stdin is not a terminal, or Python has no
    ``readline``."""
    try:
        import readline
    except ImportError:  # a Python without readline
        yield
        return
    state = os.environ.get("XDG_STATE_HOME", "")
    root = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    file = root / "holdfast" / "chat_history"
    if not sys.stdin.isatty():
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(MOST_HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
