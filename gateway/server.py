"""``serve``: the gateway and its engine in a child process, listening from the first moment on.

Composes settings, sockets, supervision and signals; knows no protocol. ``/ready`` follows the engine while it
loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from msgspec.structs import replace

from ..runtime.errors import RuntimeFault
from ..runtime.kv_placement.sizing import memory_line, refusal
from ..runtime.kv_placement.tier_setup import clipped
from ..runtime.link.messages import Heartbeat, Hello
from ..runtime.link.process import ChildEngine
from ..runtime.settings import DTYPE_BYTES, EngineSettings
from ..sessions.errors import SessionError
from .app import build_app
from .cli.progress import Loading
from .compose import model_name, opened
from .errors import AddressUnusable, CertificateUnusable, KeysUnusable, PortTaken
from .limit_checks import check, check_leases
from .net.listener import http_protocol, listen, websocket_protocol
from .net.repeated_lines import RepeatFilter
from .net.tls import renew, server_context
from .service import Service
from .settings import GatewaySettings
from .tenants import Tenants

EXIT_AT_ONCE = 1
COLLECT = 20_000, 10, 10
"""New objects before the collector looks at them, and so on: by default it looks at each 700."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs. ``url`` is its address: ``http[s]://host:port``. ``clipped``: why KV on disk has less
    room than it was given, if it has.
    """

    url: str
    service: Service
    engine: ChildEngine
    reload: Callable[[], Awaitable[str]]
    """Read the keys file and the certificate again; says what came of it. Raises ``KeysUnusable`` or
    ``CertificateUnusable``, and then all stays as it was."""
    clipped: str | None = None


TICK_SECONDS = 1.0
"""Between two looks at the clock, for the date that answers carry."""


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling; says when it listens, and is told when to leave."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Close what is open and end."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """Until it is told to leave. Uvicorn's own looks ten times a second whether it was."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._leaving.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours to handle."""
        yield


@asynccontextmanager
async def serving(
    settings: GatewaySettings,
    engine_settings: EngineSettings,
    heard: Callable[[Heartbeat], None] = lambda beat: None,
    engine: ChildEngine | None = None,
    listening: Callable[[str], None] = lambda url: None,
) -> AsyncIterator[Serving]:
    """A server that listens; entered when a turn could run, left when engine and sockets are gone.

    ``listening`` is told the address before anything is loaded, ``heard`` gets the engine's heartbeats, while
    it loads too. ``engine``: one of these settings, where it is not to be made by default. Raises
    ``AddressUnusable``, ``KeysUnusable``, ``CertificateUnusable``, and what loading raises
    (`compose.opened`).
    """
    secured = server_context(settings.network)
    tenants = Tenants.of(settings)
    check(tenants, settings, engine_settings)
    reserve = 0 if settings.store is None else settings.journal.reserve_bytes
    engine_settings = replace(engine_settings, tenants=tenants.budgets(), disk_reserve=reserve)
    with _listen(settings) as sock:
        engine = engine or ChildEngine(engine_settings, on_heartbeat=heard)
        service = Service(settings, model_name(engine_settings.model), engine.link, tenants)
        async with _listening(service, sock, secured) as url:
            listening(url)
            async with opened(service, engine_settings.model, engine):
                hello = engine.link.hello
                check_leases(tenants, engine_settings, hello)

                async def reload() -> str:
                    found = await asyncio.to_thread(Tenants.of, settings)
                    check(found, settings, engine_settings)
                    check_leases(found, engine_settings, hello)
                    if secured is not None:
                        await asyncio.to_thread(renew, secured, settings.network)
                    return _changed(tenants, found, service.change_tenants(found))

                yield Serving(url, service, engine, reload, clipped(engine_settings))


def _changed(before: Tenants, now: Tenants, closed: int) -> str:
    """What a reload came to, for the operator."""
    count = 0 if now.keys is None else len(now.keys.tenants)
    told = f"keys: {count} from {now.source or 'the command line'}; connections closed: {closed}"
    if (before.journal(), before.budgets()) != (now.journal(), now.budgets()):
        told += "; limits named kept, journal, leased and disk change with the next start"
    return told


def run(settings: GatewaySettings, engine_settings: EngineSettings) -> int:
    """Serve until a signal; the process's exit code. What keeps it from starting is the last line on stderr."""
    logging.basicConfig(format="holdfast: %(levelname)s: %(message)s", level=logging.WARNING)
    repeats = RepeatFilter()
    for handler in logging.getLogger().handlers:
        handler.addFilter(repeats)
    try:
        asyncio.run(_until_signal(settings, engine_settings))
    except (RuntimeFault, SessionError, AddressUnusable, KeysUnusable, CertificateUnusable) as error:
        _tell(error.message)
        return 2
    except (OSError, MemoryError) as error:  # of the machine: no memory, no process, a disk that is full
        named = getattr(error, "filename", None) or "the server"
        _tell(str(refusal(error, str(named)) or error))
        return 2
    finally:
        repeats.finish()
        for handler in logging.getLogger().handlers:
            handler.removeFilter(repeats)
    return 0


def _tell(line: str) -> None:
    """One line on stderr. Where nobody reads it any more, the server does as it would have done."""
    with contextlib.suppress(OSError):
        print(f"holdfast: {line}", file=sys.stderr, flush=True)


async def _until_signal(settings: GatewaySettings, engine_settings: EngineSettings) -> None:
    """The first signal drains, one during loading leaves; after a second one nothing is waited for.

    SIGHUP drains where a terminal may have sent it, and elsewhere has the keys read again. Children end by
    themselves when their sockets do.
    """
    up, leave, reload = asyncio.Event(), asyncio.Event(), asyncio.Event()
    holding = asyncio.create_task(_hold(settings, engine_settings, up, leave, reload))

    def signalled() -> None:
        if leave.is_set():
            _tell("left at once")
            os._exit(EXIT_AT_ONCE)
        if not up.is_set():
            holding.cancel()
        leave.set()

    def hung_up() -> None:
        _leave_terminal()
        if not leave.is_set():  # kernel and shell may both tell of one hang-up
            signalled()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    if not _on_terminal():
        loop.add_signal_handler(signal.SIGHUP, reload.set)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup has said to stay
        loop.add_signal_handler(signal.SIGHUP, hung_up)
    await asyncio.wait([holding])
    if not holding.cancelled():
        holding.result()


def _on_terminal() -> bool:
    """Whether a terminal's hang-up is this process's own: it reads or writes one, or is controlled by one."""
    if os.isatty(0) or os.isatty(2):
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _leave_terminal() -> None:
    """Where output goes to a terminal that is gone, each line would be an error: let it go nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(nowhere, output)
    os.close(nowhere)


async def _reload(running: Serving, asked: asyncio.Event) -> None:
    """Whenever it is asked for."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            told = f"reloaded: {await running.reload()}"
        except (KeysUnusable, CertificateUnusable) as error:
            told = f"not reloaded, all stays as it was: {error.message}"
        _tell(told)


async def _hold(
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
            running.service.state()  # a journal that cannot be written is told now, not when somebody asks
            gc.collect()
            gc.set_threshold(*COLLECT)
            gc.freeze()  # what loading made stays: a full collection over it holds all sockets up for 50 ms
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


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        return listen(settings.host, settings.port, settings.limits)
    except (OSError, UnicodeError) as error:  # the latter for a name that can be none
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            taken = f"port {settings.port} on {settings.host} is taken by another program"
            raise PortTaken(taken) from None
        cause = refusal(error, "the socket") or error
        raise AddressUnusable(f"cannot listen on {settings.host}:{settings.port}: {cause}") from None


@asynccontextmanager
async def _listening(
    service: Service, sock: socket.socket, secured: ssl.SSLContext | None
) -> AsyncIterator[str]:
    """Answers on ``sock`` until the end of the block; then sockets close with 1012."""
    server = _Server(_config(service, secured))
    running = asyncio.create_task(server.serve(sockets=[sock]), name="holdfast-gateway")
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        yield _url(sock, secured)
    finally:
        listening.cancel()
        server.leave()
        await running


def _config(service: Service, secured: ssl.SSLContext | None) -> uvicorn.Config:
    limits = service.settings.limits
    return uvicorn.Config(
        build_app(service),
        http=http_protocol(limits),
        ws=websocket_protocol(limits),
        ws_max_size=limits.socket_bytes,
        ws_per_message_deflate=False,
        ws_ping_interval=limits.ping_seconds,
        ws_ping_timeout=limits.ping_seconds,
        timeout_graceful_shutdown=int(limits.close_seconds),
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # `BehindProxy` reads them
        ssl_context_factory=None if secured is None else lambda config, default: secured,
    )


def _url(sock: socket.socket, secured: ssl.SSLContext | None) -> str:
    host, port = sock.getsockname()[:2]
    return f"http{'s' if secured else ''}://{f'[{host}]' if ':' in host else host}:{port}"
