"""``holdfast serve``: run a server until a signal, and say on stderr what an operator has to know."""

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

from ...runtime.errors import RuntimeFault
from ...runtime.kv_placement.sizing import memory_line, refusal
from ...runtime.link.messages import Hello
from ...runtime.settings import DTYPE_BYTES, EngineSettings
from ...sessions.errors import SessionError
from ..errors import AddressUnusable, CertificateUnusable, KeysUnusable
from ..net.repeated_lines import RepeatFilter
from ..server import Serving, serving
from ..settings import GatewaySettings
from .progress import Loading

EXIT_AT_ONCE = 1
COLLECT = 20_000, 10, 10
"""The garbage collector's thresholds. By default it runs after each 700 new objects."""


def run(settings: GatewaySettings, engine_settings: EngineSettings) -> int:
    """Serve until a signal; returns the exit code. The last line on stderr says why it did not start."""
    logging.basicConfig(format="holdfast: %(levelname)s: %(message)s", level=logging.WARNING)
    repeats = RepeatFilter()
    for handler in logging.getLogger().handlers:
        handler.addFilter(repeats)
    try:
        asyncio.run(_until_signal(settings, engine_settings))
    except (RuntimeFault, SessionError, AddressUnusable, KeysUnusable, CertificateUnusable) as error:
        _tell(error.message)
        return 2
    except (OSError, MemoryError) as error:  # no memory, no process, a full disk
        named = getattr(error, "filename", None) or "the server"
        _tell(str(refusal(error, str(named)) or error))
        return 2
    finally:
        repeats.finish()
        for handler in logging.getLogger().handlers:
            handler.removeFilter(repeats)
    return 0


def _tell(line: str) -> None:
    """Write one line to stderr. That nothing reads stderr any more changes nothing."""
    with contextlib.suppress(OSError):
        print(f"holdfast: {line}", file=sys.stderr, flush=True)


async def _until_signal(settings: GatewaySettings, engine_settings: EngineSettings) -> None:
    """Run until a signal. The first drains, or ends a server that loads; a second one ends it at once.

    SIGHUP drains where a terminal may have sent it; elsewhere it has the keys read again. The child processes
    end when their sockets close.
    """
    up, leave, reload = asyncio.Event(), asyncio.Event(), asyncio.Event()
    server = asyncio.create_task(_serve(settings, engine_settings, up, leave, reload))

    def signalled() -> None:
        if leave.is_set():
            _tell("left at once")
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
    """Whether a hang-up of the terminal ends this process: it reads or writes one, or is controlled by one."""
    if os.isatty(0) or os.isatty(2):
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave_terminal() -> None:
    """Send output to nowhere where its terminal is gone; otherwise each line would raise an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(nowhere, output)
    os.close(nowhere)


async def _reload(running: Serving, asked: asyncio.Event) -> None:
    """Read keys and certificate again whenever ``asked`` is set."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            told = f"reloaded: {await running.reload()}"
        except (KeysUnusable, CertificateUnusable) as error:
            told = f"not reloaded, all stays as it was: {error.message}"
        _tell(told)


async def _serve(
    settings: GatewaySettings,
    engine_settings: EngineSettings,
    up: asyncio.Event,
    leave: asyncio.Event,
    reload: asyncio.Event,
) -> None:
    asked = f"{engine_settings.model}, device {engine_settings.device}"
    with Loading() as loading:
        begun = lambda url: loading.begun(f"holdfast: starting {asked}, {url}")
        async with serving(settings, engine_settings, loading.heard, listening=begun) as running:
            loading.loaded(_memory(running.engine.link.hello))
            loading.loaded(f"holdfast: {running.service.model} at {running.url}")
            loading.loaded(f"holdfast: {_kept(settings)}")
            if running.clipped is not None:
                loading.loaded(f"holdfast: {running.clipped}")
            running.service.state()  # logs a journal that cannot be written
            gc.collect()
            gc.set_threshold(*COLLECT)
            gc.freeze()  # a full collection over what loading made would stop all sockets for 50 ms
            up.set()
            reloading = asyncio.create_task(_reload(running, reload))
            try:
                await leave.wait()
            finally:
                reloading.cancel()
            await running.service.drain()


def _kept(settings: GatewaySettings) -> str:
    if settings.store is None:
        return "sessions are kept in memory only"
    return f"sessions are kept in {settings.store.expanduser()}"


def _memory(hello: Hello) -> str:
    weights = hello.parameters * DTYPE_BYTES[hello.dtype]
    memory = memory_line(weights, hello.blocks, hello.block_bytes, hello.block_tokens)
    kept = "" if hello.kv_dtype in ("", hello.dtype) else f", KV {hello.kv_dtype}"
    return f"holdfast: {memory}; {hello.device}, {hello.dtype}{kept}, kernels {hello.kernels}"
