"""Formats and writes log lines, in one form for all processes of a server. It stands in the lowest room, which
all of them can import.

    2026-11-24T13:05:01.123Z INFO holdfast[sess_5b0c]: response completed response=resp_7a output=14 ttft_ms=8.1

A thread writes the lines. If stderr is a pipe that is not read, lines are dropped and counted; no caller waits.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

import msgspec

from .options import Option

LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogForm: TypeAlias = Literal["text", "json"]

MOST_WAITING = 4096
"""The most lines that wait to be written; further lines are dropped."""
CLOSE_SECONDS = 0.5
"""Seconds that `LineWriter.close` waits for the last lines to be written."""
PACKAGE = "holdfast"
CLEAR = "\r\x1b[K"
"""Clears the current line of a terminal, where another process may show a progress bar."""
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127) if code not in (9, 10)}
"""How each control character is spelled in a log line. A terminal would act on the character itself."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the processes of a server log, and in which form."""

    level: Annotated[LogLevel, Option(name="log_level")] = "info"
    """The least level that is logged."""
    form: Annotated[LogForm, Option(name="log_format")] = "text"
    """text: a line for each event; json: an object for each."""


_BOUND: ContextVar[Mapping[str, object]] = ContextVar("facts of log lines", default=MappingProxyType({}))


@contextmanager
def logging_with(**facts: object) -> Iterator[None]:
    """In the block, all log lines of this task, and of tasks that begin in it, have these facts, besides those
    of the blocks around it. A line's own facts go before."""
    token = _BOUND.set({**_BOUND.get(), **facts})
    try:
        yield
    finally:
        _BOUND.reset(token)


def about(subject: str, **facts: object) -> dict[str, object]:
    """The argument ``extra`` of a log call. ``subject``: the id of a session or request that the line is
    about; ``facts``: names and values that follow the message."""
    return {"subject": subject, "facts": facts}


def about_session(session_id: str, **facts: object) -> dict[str, object]:
    """As `about`, for a line about a session."""
    return about(session_id, session=session_id or None, **facts)


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    """The facts of `about` and `logging_with` that a log record has, by name. Call it where the record was
    made."""
    return {**_BOUND.get(), **getattr(record, "facts", {})}


class LineFormatter(logging.Formatter):
    """Formats a log record as one line of text, or as one JSON object with ``time``, ``level``, ``process``,
    ``id``, ``message``, the facts of `about` and `logging_with`, and ``traceback`` if there is one.

    ``process``: the name of this process. In text form, all lines of a message or traceback but the first are
    indented.
    """

    def __init__(self, process: str, form: LogForm) -> None:
        super().__init__()
        self._process = process
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The text of one log record, as described at the class, without a newline at its end."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
        subject: str = getattr(record, "subject", "")
        facts = facts_of(record)
        message = record.getMessage()
        traceback = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        if self._json:
            told: dict[str, object] = {
                "time": when,
                "level": record.levelname.lower(),
                "process": self._process,
                "id": subject or None,
                "message": message,
                **{name: value for name, value in facts.items() if value is not None},
            }
            if traceback:
                told["traceback"] = traceback
            return msgspec.json.encode(told, enc_hook=str).decode()
        for name in ("session", "request"):
            if facts.get(name) == subject:  # it stands before the message
                del facts[name]
        words = [message, *(f"{name}={value}" for name, value in facts.items() if value is not None)]
        text = " ".join(words) + (f"\n{traceback}" if traceback else "")
        origin = f"{self._process}[{subject}]" if subject else self._process
        return f"{when} {record.levelname} {origin}: {text.translate(CONTROLS)}".replace("\n", "\n    ")


class LineWriter(logging.Handler):
    """A log handler that writes lines to ``sys.stderr`` (looked up for each line) in a thread of its own.
    `close` writes the lines that still wait."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="holdfast-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Give one line to the writing thread; drop it if too many wait."""
        if self._lines.qsize() >= MOST_WAITING:
            self._lost += 1
            return
        try:
            self._lines.put(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Write the lines that wait, for ``CLOSE_SECONDS`` at most. Lines logged later are not written."""
        self._lines.put(None)
        self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError, ValueError):  # nothing reads it any more
                if (stream := sys.stderr) is not None:
                    alone = stream.isatty() and stream is sys.__stderr__
                    # one write with its newline: another process may write to the same pipe in between
                    stream.write(f"{CLEAR}{line}\n" if alone else f"{line}\n")
                    stream.flush()
            if self._lost and self._lines.empty():
                lost, self._lost = self._lost, 0
                logging.getLogger(__name__).warning("%d lines were lost: stderr was not read in time", lost)


@contextmanager
def logging_lines(
    process: str, settings: LogSettings, flood: logging.Filter | None = None
) -> Iterator[LineWriter]:
    """Write the log of this process to stderr until the end of the ``with`` block.

    ``process``: the name of this process, in each line. ``flood``: a filter that drops most of many equal
    lines; None: no filter. Of other packages only warnings and errors are logged.
    """
    writer = LineWriter()
    writer.setFormatter(LineFormatter(process, settings.form))
    if flood is not None:
        writer.addFilter(flood)
    root, own = logging.getLogger(), logging.getLogger(PACKAGE)
    before = own.level
    root.addHandler(writer)
    own.setLevel(settings.level.upper())
    try:
        yield writer
    finally:
        root.removeHandler(writer)
        own.setLevel(before)
        writer.close()
