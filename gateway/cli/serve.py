"""``holdfast serve``: run a server until a signal comes. What an operator must know goes to the log on
stderr."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
import termios
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ...kvstore.log_lines import LineWriter, logging_lines
from ...kvstore.options import expanded
from ...runtime.errors import RuntimeFault
from ...runtime.kv_placement.sizing import memory_line, refusal
from ...runtime.link.child import SpawnedEngine
from ...runtime.link.messages import Heartbeat, Hello, Phase
from ...runtime.settings import EngineSettings
from ...sessions.errors import SessionError
from ..errors import AddressUnusable, CertificateUnusable, KeysUnusable, TracingUnavailable
from ..net.repeated_lines import RepeatFilter
from ..server import Serving, serving
from ..settings import GatewaySettings
from .collector import Collector

log = logging.getLogger(__name__)

EXIT_AT_ONCE = 1
EXIT_REFUSED = 2
WATCH_SECONDS = 1.0
"""Seconds between two looks at the files of keys and certificate. A changed file is read at the second look,
when it is the same as at the first."""
SWITCH_SECONDS = 0.001
"""How long the event loop waits for a worker thread that computes in Python: not 5 ms, as by default."""
LINE_SHARE = 0.25
"""Where there is no terminal, a phase of loading gets another log line after each such part of it."""
REFUSALS = (
    *(RuntimeFault, SessionError),
    *(AddressUnusable, KeysUnusable, CertificateUnusable, TracingUnavailable),
)
"""Errors because of which a server does not start: exit code 2 and one line."""


def run(
    settings: GatewaySettings, engine_settings: EngineSettings, first: SpawnedEngine | None = None
) -> int:
    """Run a server until a signal ends it. ``first``: the engine's process, if it was started before. Returns
    the exit code: 0, or 2 if it could not start or run; then the last line on stderr says why."""
    gc.freeze()  # what was imported stays
    repeats, cause = RepeatFilter(), ""
    sys.setswitchinterval(SWITCH_SECONDS)
    with logging_lines("holdfast", engine_settings.logs, repeats) as lines:
        try:
            asyncio.run(_until_signal(settings, engine_settings, lines, first))
        except REFUSALS as error:
            cause = error.message
        except (OSError, MemoryError) as error:  # no memory, no process, a full disk
            named = getattr(error, "filename", None) or "the server"
            cause = str(refusal(error, str(named)) or error)
        finally:
            repeats.finish()
        if cause and engine_settings.logs.form == "json":
            log.error("%s", cause)
            return EXIT_REFUSED
    if cause:
        with contextlib.suppress(OSError):
            print(f"holdfast: {cause}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    return 0


async def _until_signal(
    settings: GatewaySettings, engine_settings: EngineSettings, lines: LineWriter, first: SpawnedEngine | None
) -> None:
    """Run the server until a signal. The first one drains a server that runs, and ends one that still loads. A
    second one ends the process at once.

    SIGHUP counts as such a signal if a terminal may have sent it; otherwise it makes the server read the keys
    and the certificate again. The child processes end when their sockets close.
    """
    up, leave, reload = asyncio.Event(), asyncio.Event(), asyncio.Event()
    server = asyncio.create_task(_serve(settings, engine_settings, first, up, leave, reload))

    def signalled() -> None:
        if leave.is_set():
            log.warning("a second signal: ended at once")
            lines.close()
            os._exit(EXIT_AT_ONCE)
        if not up.is_set():
            server.cancel()
        leave.set()

    def hung_up() -> None:
        _leave_terminal()
        if not leave.is_set():  # kernel and shell may both send it
            signalled()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    if not _on_terminal():
        loop.add_signal_handler(signal.SIGHUP, reload.set)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
        loop.add_signal_handler(signal.SIGHUP, hung_up)
    await asyncio.wait([server])
    if not server.cancelled():
        server.result()


def _on_terminal() -> bool:
    """Whether this process belongs to a terminal: it reads from one, writes to one, or is controlled by one.
    Then SIGHUP means that the terminal is gone."""
    if os.isatty(0) or os.isatty(2):
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave_terminal() -> None:
    """Send stdout and stderr to /dev/null, if their terminal is gone. Otherwise each line would raise an
    error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(nowhere, output)
    os.close(nowhere)


class Loading(Progress):
    """Shows on stderr, or on ``console``, what the engine loads and how much of that is done. Use it in a
    ``with`` block: a bar is shown there on a terminal, log lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self.add_task("starting the engine", total=1.0)
        self._loaded = False
        self._told = ("", 0.0)  # the last line's phase, and its share

    def heard(self, beat: Heartbeat) -> None:
        """Called with each heartbeat of the engine: shows the progress of loading that it reports."""
        if self._loaded or beat.phase not in (Phase.LOADING, Phase.COMPILING):
            return
        detail = beat.detail or "loading"
        if not self.disable:
            self.update(self._bar, description=detail, completed=beat.fraction)
            return
        phase, share = detail.partition(" ")[0], beat.fraction
        if phase != self._told[0] or share >= self._told[1] + LINE_SHARE:
            self._told = phase, share
            log.info("%s", f"{detail} ({share:.0%})" if share else detail)

    def loaded(self) -> None:
        """Called when the engine is loaded: removes the bar and shows nothing more."""
        self._loaded = True
        self.stop()


class FileWatch:
    """Watches ``paths``, which may be missing, for changes since their content was last read, by their inode,
    size and time; it reads no content. A link counts as the file that it points to, so that mounted secrets,
    which are exchanged by renaming a link, count too."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._known = self._seen = self._state()

    def changed(self) -> bool:
        """Whether a file differs from what it was when last read, and is the same as at the last call: a change
        is told one call late, so that no file is read while it is being written. Call it at intervals, and read
        the files if it is true: it counts them as read."""
        before, self._seen = self._seen, self._state()
        if self._seen != before or self._seen == self._known:
            return False
        self._known = self._seen
        return True

    def note(self) -> None:
        """Count the files as read in their present state. Call it just before reading them for another
        reason."""
        self._known = self._seen = self._state()

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """A file's inode, size in bytes and time of modification in nanoseconds, at least one of which changes if
    it is replaced or written; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


async def _reload(running: Serving, asked: asyncio.Event) -> None:
    """Read keys and certificate again each time ``asked`` is set, or one of their files has changed, and log
    what is different now. Runs until cancelled."""
    watch = FileWatch(running.reloadable)
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_SECONDS if running.reloadable else None):
                await asked.wait()
        if not (asked.is_set() or await asyncio.to_thread(watch.changed)):
            continue
        asked.clear()
        watch.note()
        try:
            log.info("reloaded: %s", await running.reload())
        except (KeysUnusable, CertificateUnusable) as error:
            log.warning("not reloaded, all stays as it was: %s", error.message)


async def _serve(
    settings: GatewaySettings,
    engine_settings: EngineSettings,
    first: SpawnedEngine | None,
    up: asyncio.Event,
    leave: asyncio.Event,
    reload: asyncio.Event,
) -> None:
    asked = f"{engine_settings.model}, device {engine_settings.device}"
    with Loading() as loading:
        begun = lambda url: log.info("starting %s, %s", asked, url)
        async with serving(settings, engine_settings, loading.heard, listening=begun, first=first) as running:
            loading.loaded()
            log.info("%s", _memory(running.engine.link.hello))
            folder = None if settings.store is None else expanded(settings.store)
            log.info("sessions are kept in %s", "memory only" if folder is None else folder)
            if running.clipped is not None:
                log.warning("%s", running.clipped)
            running.service.state()  # logs a journal that cannot be written
            collector = Collector(lambda: running.service.turns.running > 0)
            up.set()
            log.info("%s at %s", running.service.model, running.url)
            beside = [asyncio.create_task(work) for work in (_reload(running, reload), collector.run())]
            try:
                await leave.wait()
            finally:
                for task in beside:
                    task.cancel()
            await running.service.drain()
    log.info("stopped")


def _memory(hello: Hello) -> str:
    memory = hello.memory or memory_line(hello.weights, hello.blocks, hello.block_bytes, hello.room)
    kept = "" if hello.kv_dtype in ("", hello.dtype) else f", KV {hello.kv_dtype}"
    weights = f", weights {hello.quantisation}" if hello.quantisation else ""
    return f"{memory}; {hello.device}, {hello.dtype}{kept}{weights}, kernels {hello.kernels}"
