"""What ``holdfast chat`` keeps for the next time: handles of sessions, and lines that were typed.

It is one small file in the user's state folder, which only that user can read: a handle opens its session.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
from prompt_toolkit.history import History

from .options import state_folder

MOST_SESSIONS = 50
MOST_LINES = 1000
MOST_MARKS = 100
LONGEST_LINE = 4096  # characters; a longer one is not kept
LONGEST_TITLE = 60


class KeptSession(msgspec.Struct):
    """A session that was talked with. ``handle``: opens it at the server ``url``. ``title``: how its first
    message begins; ``last``: how its last one does. ``used``: when it was last, in seconds since the epoch.
    ``marks``: for each turn, the id of the item before it; ``head``: the id of the last item; "": not known."""

    id: str
    handle: str
    url: str
    model: str = ""
    title: str = ""
    last: str = ""
    used: float = 0.0
    marks: list[str] = []
    head: str = ""


class Kept(msgspec.Struct):
    """The file: sessions, the last used one first, and lines, the last one last."""

    sessions: list[KeptSession] = []
    lines: list[str] = []


class ChatState:
    """Reads and changes the file ``chat.json`` in ``folder``: by default `state_folder`. A file that cannot be
    read counts as empty; one that cannot be written stays as it is."""

    def __init__(self, folder: Path | None = None) -> None:
        self.file = (folder or state_folder()) / "chat.json"

    def read(self) -> Kept:
        """What the file holds now."""
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=Kept)
        except (OSError, msgspec.MsgspecError):
            return Kept()

    def keep(self, session: KeptSession) -> None:
        """Put a session first, instead of its older entry; the least used ones beyond the bound go."""
        session.used = time.time()
        session.marks = session.marks[-MOST_MARKS:]

        def first(kept: Kept) -> Kept:
            others = [one for one in kept.sessions if one.id != session.id]
            return Kept([session, *others][:MOST_SESSIONS], kept.lines)

        self._change(first)

    def forget(self, handle: str) -> None:
        """Remove the session with this handle, which opens nothing any more."""
        self._change(lambda kept: Kept([one for one in kept.sessions if one.handle != handle], kept.lines))

    def typed(self, line: str) -> None:
        """Add a line to the history."""
        if len(line) <= LONGEST_LINE:
            self._change(lambda kept: Kept(kept.sessions, [*kept.lines, line][-MOST_LINES:]))

    def _change(self, change: Callable[[Kept], Kept]) -> None:
        """Read the file and write what ``change`` makes of it, one chat at a time."""
        folder, fresh = self.file.parent, self.file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                kept = change(self.read())
                fresh.unlink(missing_ok=True)
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(msgspec.json.encode(kept))
                fresh.replace(self.file)
            finally:
                os.close(lock)


class TypedLines(History):
    """The history of the prompt, in the file of ``state``."""

    def __init__(self, state: ChatState) -> None:
        super().__init__()
        self._state = state

    def load_history_strings(self) -> Iterable[str]:
        """The lines, the last one first."""
        return reversed(self._state.read().lines)

    def store_string(self, string: str) -> None:
        """Called with each line that was typed."""
        self._state.typed(string)
