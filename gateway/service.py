"""`Service`: what all routes share, that is, the link to the engine, the live sessions and the open sockets.

It decides which clients are served, and makes the faces, that is, the code of each protocol. `opened` puts it
on an engine. The server and the embedded engine both use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from starlette.requests import Request

from ..kvstore.log_lines import logging_with
from ..kvstore.options import expanded
from ..kvstore.slices import sliced
from ..runtime.errors import EngineGone, SettingsInvalid
from ..runtime.kv_placement.tier_setup import file_bytes
from ..runtime.link.client import EngineLink
from ..runtime.link.messages import Phase
from ..runtime.model.folder import check_folder, find_model
from ..runtime.verbs import LoadedAdapter
from ..sdk.frames.exported import ImportedSession
from ..sessions.adapters import SessionAdapter
from ..sessions.journal.journal import Journal
from ..sessions.journal.lock import StoreLock
from ..sessions.registry import SessionRegistry
from ..sessions.settings import SessionSettings
from ..sessions.stored import StoredObjects
from ..sessions.text.language import Language
from ..sessions.workers import Stopped
from .access.attribution import TenantLabels
from .access.auth import TENANT, ClientIdentity
from .access.rate_limits import RateLimiter
from .access.tenants import NOTHING_SET, Tenants
from .access.turn_queue import TurnQueue
from .errors import Draining, EngineLoading, KeyRemoved, ModelNotServed, SlowReader
from .live.client_socket import ClientSocket
from .live.session import LiveSession, spawn
from .live.sessions import LiveSessions
from .live.transcripts import Transcripts
from .live.turns import Turns
from .metrics.prometheus import MetricsSnapshot, TenantSnapshot
from .metrics.turns import TurnMetrics
from .net.bodies import CONVERSATION, BodyBound, BodyMemory, read_body, told_bytes
from .net.channel import Channel
from .realtime.session import RealtimeFace
from .realtime.socket import RealtimeSocket
from .settings import GatewaySettings

if TYPE_CHECKING:  # it needs an extra
    from .metrics.tracing import TurnTracer

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MOST_NAMED = 16
"""So many adapters at most are named to a client that asks for a model that is not served."""
ASIDE_BYTES = 4096
"""Bodies of fewer bytes are decoded while the engine loads."""
LOADING = {Phase.LOADING: "loading weights", Phase.COMPILING: "compiling kernels"}
"""What an engine that is not ready is doing, by its phase, for the text of ``EngineLoading``. In any other
phase the journal is being opened."""


class ServerState(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The answer of the probes: what the engine does. `fraction`: how much of its loading is done, from 0 to 1.
    `detail`: more about the phase. `journal`: how the journal differs from that of the last start, if it
    does."""

    status: Literal["ready", "not ready", "hung"]
    phase: Phase
    detail: str
    fraction: float
    journal: list[str] = []

    @property
    def ready(self) -> bool:
        """Whether a turn could run now."""
        return self.status == "ready"

    @property
    def alive(self) -> bool:
        """False if the engine hangs and a restart of the server would help."""
        return self.status != "hung"


class Service:
    """One model behind one engine: its tenants, live sessions and open sockets. Sessions can be opened after
    `open`, which is called when the engine was loaded for the first time.

    ``model``: the name under which the model is served, unless the settings give other names. ``link``: to the
    engine. ``tenants``: None reads those of the settings here, which may raise ``KeysUnusable``. ``shared``:
    the engine's policy shares it between tenants. ``tracer``: makes a span of each turn; None: nothing is
    traced.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        model: str,
        link: EngineLink,
        tenants: Tenants | None = None,
        *,
        shared: bool = True,
        tracer: TurnTracer | None = None,
    ) -> None:
        self.settings = settings
        self.tenants = tenants or Tenants.of(settings)
        self.names = tuple(dict.fromkeys(settings.served_names)) or (model,)
        """The names under which the model is served; the first is the default."""
        self.started = int(time.time())
        self._registry: SessionRegistry | None = None
        self._journal: Journal | None = None
        self._live: LiveSessions | None = None
        self._faces: dict[str | None, RealtimeFace] = {}  # by the name that clients ask for, if no adapter's
        queue = TurnQueue(settings.max_queue_seconds, shared=shared)
        metrics = TurnMetrics(labels=TenantLabels(self.tenants.names().values()))
        self.turns = Turns(RateLimiter(self.tenants.rates()), queue, tracer, metrics)
        """Rate limits, queue, metrics and tracer, which the turns of all sessions share."""
        self._link = link
        self._sockets: dict[asyncio.Task[None], ClientSocket] = {}
        self._stored: StoredObjects | None = None
        self._bodies = BodyMemory()
        self._works: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._opened = asyncio.Event()  # no request waits for the engine any more
        self._waiting = 0
        self._slow_readers = 0
        link.on_recovery(self._recovered)

    def open(self, registry: SessionRegistry, journal: Journal | None = None) -> None:
        """Let clients open sessions of ``registry`` from now on. ``journal``: the registry's, None if it has
        none; if it cannot write, `LiveSessions.alarm` is called."""
        self._registry = registry
        self._journal = journal
        self._live = LiveSessions(registry, self.settings.limits, self.turns)
        self._stored = StoredObjects(journal)
        if journal is not None:
            journal.watchers.add(self._live.alarm)
        self._opened.set()

    def refuse(self) -> None:
        """Admit no client any more. Requests that wait for the engine to load are refused now."""
        self._draining = True
        self._opened.set()

    async def close(self) -> None:
        """Admit no client any more, close all sockets, and close all sessions in memory. Running turns count as
        interrupted, so that the next server can continue those that the journal has.

        Sockets, tasks that outlive their requests, and sessions get at most ``close_seconds`` each, because the
        engine may not answer.
        """
        self.refuse()
        if self._live is not None:
            self._live.stop()
        for socket in self._sockets.values():
            socket.leave()
        if self._sockets:
            await asyncio.wait(list(self._sockets), timeout=self.settings.limits.close_seconds)
        for work in self._works:
            work.cancel()
        if self._works:
            await asyncio.wait(list(self._works), timeout=self.settings.limits.close_seconds)
        registry, live = self._registry, self._live
        self._registry = self._live = None
        if registry is not None and live is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.limits.close_seconds):
                    await live.aclose()
                    await registry.aclose()

    def sessions(self) -> list[LiveSession]:
        """All sessions in memory, those without a client's connection included."""
        return [] if self._live is None else self._live.live()

    def state(self) -> ServerState:
        """What the probes would answer now."""
        link, beat = self._link, self._link.heartbeat
        fault = self._journal.fault if self._journal is not None and self._registry is not None else None
        ready = link.ready and self._registry is not None and not self._draining and fault is None
        alive = self._draining or link.overdue == 0.0  # the engine ends before the server does
        return ServerState(
            status="ready" if ready else "not ready" if alive else "hung",
            phase=link.phase,
            detail="draining" if self._draining else fault.message if fault else beat.detail if beat else "",
            fraction=beat.fraction if beat else 0.0,
            journal=[] if self._journal is None else list(self._journal.mismatches),
        )

    @property
    def model(self) -> str:
        """The name of the model that a client gets if it asks for none."""
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ``ModelNotServed`` if a client asks for another model. ``name``: what it asks for, of the model
        or of an adapter; None or an empty name is allowed."""
        adapters = self._link.expected if self._live is None else self._link.adapters
        if name and name not in self.names and name not in adapters:
            served = ", ".join(map(repr, [*self.names, *list(self._link.adapters)[:MOST_NAMED]]))
            raise ModelNotServed(f"This server serves {served}, not {name[:256]!r}")

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """The adapters that are loaded, in the order in which they were."""
        return list(self._link.adapters.values())

    @property
    def listed(self) -> list[str]:
        """The names that a client may ask for: those of the model, then those of the adapters."""
        return list(dict.fromkeys((*self.names, *self._link.adapters)))

    def adapter_of(self, name: str | None) -> SessionAdapter | None:
        """The adapter with the name that a client asks for; None: it asks for the model itself. The name was
        checked by `check_model`."""
        adapter = None if name is None or name in self.names else self._link.adapters.get(name)
        return None if adapter is None else SessionAdapter(adapter.name, adapter.digest)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the folder ``path`` under ``name``. Raises ``EngineGone``, ``AdapterInvalid``,
        ``AdapterExists``, ``AdapterLimit``."""
        await self.loaded()
        self.admit(None)
        loaded = await self._link.load_adapter(name, path)
        log.info("adapter loaded: rank %d, %d bytes, %s", loaded.rank, loaded.size, loaded.digest.hex()[:16])

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter: replies that run with it end as they would, and no other begins. Raises
        ``EngineGone``, ``AdapterUnknown``."""
        await self.loaded()
        self.admit(None)
        await self._link.unload_adapter(name)
        log.info("adapter unloaded")

    def admit(self, model: str | None) -> LiveSessions:
        """Check that a client may have a session, and return the live sessions, in which a face opens or
        resumes it. ``model``: the name that the client asks for; None: any.

        Raises ``ModelNotServed``, ``Draining``, or ``EngineLoading``.
        """
        self.check_model(model)
        if self._draining:
            raise Draining("The server is going away")
        if self._live is None:
            raise self._loading()
        return self._live

    async def loaded(self, seconds: float | None = None) -> None:
        """Wait until sessions can be opened, ``seconds`` at most; None: ``loading_seconds``. Returns also if
        the time is over or the server ends: `admit` raises then."""
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.loading_seconds if seconds is None else seconds):
                    await self._opened.wait()
        finally:
            self._waiting -= 1

    async def admitted(self, model: str | None, seconds: float | None = None) -> LiveSessions:
        """Wait until the engine is loaded, as `loaded` does, and then `admit`."""
        self.check_model(model)
        await self.loaded(seconds)
        return self.admit(model)

    async def read(
        self, request: Request, decode: Callable[[bytes], _T], bound: BodyBound = CONVERSATION
    ) -> tuple[_T, int]:
        """Read the body of a request and decode it. Returns what ``decode`` returns, and the body's size in
        bytes. ``bound``: how large it may be; for a large one this waits until the engine is loaded.

        Raises ``FrameTooLarge``, ``PromptTooLong``, ``TooManyBodies``, ``EngineLoading``, ``Draining``, what
        `read_body` raises, and what ``decode`` does.
        """
        salt, limits, told = request.scope.get(TENANT, b""), self.settings.limits, told_bytes(request)
        if self.context is None and (told or 0) > bound.size:
            await self.loaded()
            self.admit(None)
        context = self.context or 0
        check_size = partial(bound.check_size, context=context, limits=limits)
        check_size(told or 0)
        most = min(bound.most_bytes(context), limits.body_bytes) if told is None else told
        async with self._bodies.held(salt, most, limits.body_seconds):
            data = await read_body(request, check_size)

            def decoded(_: Stopped) -> _T:
                bound.check(data, context)
                return decode(data)

            return await self.aside(salt, len(data), decoded), len(data)

    async def aside(self, salt: bytes, size: int, work: Callable[[Stopped], _T]) -> _T:
        """Call ``work``, which takes long if ``size``, in bytes, is large, and return its result: it may run on
        a worker thread, as `SessionRegistry.aside` has it. For a large one this waits until the engine is
        loaded. ``salt``: of its tenant. Raises ``EngineLoading``, ``Draining``, and what ``work`` does."""
        if self._live is None:
            if size < ASIDE_BYTES:
                return work(bool)
            await self.loaded()
        live = self._live or self.admit(None)
        return await live.registry.aside(salt, size, work)

    async def transcripts(self, model: str | None) -> Transcripts:
        """The object that runs turns for clients that send the whole conversation with each request. ``model``:
        the name that the client asks for; None: any. Waits for an engine that still loads, as `loaded` does.

        Raises ``ModelNotServed``, ``Draining``, or ``EngineLoading``.
        """
        live, most = await self.admitted(model), self.settings.default_max_tokens
        return Transcripts(live, self._link, most, self.adapter_of(model))

    @property
    def stored(self) -> StoredObjects:
        """The store of responses and conversations of the Responses API. Raises ``EngineLoading`` before
        `open`."""
        if self._stored is None:
            raise self._loading()
        return self._stored

    async def delete(self, numbers: Iterable[int]) -> None:
        """Delete sessions of which a client has deleted what they were made for, by their numbers in the
        journal."""
        if self._live is not None:
            await self._live.delete(numbers)

    @property
    def context(self) -> int | None:
        """The tokens that the model's context holds; None until the engine is loaded."""
        return None if self._live is None else self._link.hello.max_context

    def _loading(self) -> EngineLoading:
        state = self.state()
        doing = LOADING.get(state.phase, "opening the journal")
        detail = f" ({state.detail}, {state.fraction:.0%})" if state.detail and state.phase in LOADING else ""
        return EngineLoading(
            f"The engine is not ready yet: {doing}{detail}. Try again soon; /ready tells when"
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work``, which may outlive its request, as a task, and return the task. `close` cancels it."""
        return spawn(work, self._works)

    async def converse(self, channel: Channel, client: ClientIdentity | None = None) -> None:
        """Serve one Realtime connection until either side ends it. Call it in a task of the connection's own. A
        client that reads too slowly is dropped, and logged. ``client``: its key's digests, tenant and query
        parameters; None: a client without a key.

        Raises ``ModelNotServed``, ``Draining``, or ``EngineLoading``.
        """
        limits = self.settings.limits
        client = client or ClientIdentity()
        face = self._realtime(None if client.resume else client.model)
        socket = RealtimeSocket(channel, face, client, limits)
        await self.serve(socket, channel)

    def _realtime(self, model: str | None) -> RealtimeFace:
        """The Realtime face of all clients that ask for the model, or an adapter, by this name. Raises what
        `admit` does."""
        live, face, adapter = self.admit(model), self._faces.get(model), self.adapter_of(model)
        if face is None or face.sessions is not live or adapter is not None:
            first = self.model if adapter is not None else model or self.model
            names, most = (first, *self.names), self.settings.default_max_tokens
            face = RealtimeFace(live, self._link, names, self.settings.limits, most, adapter)
            if adapter is None:  # others come and go
                self._faces[model] = face
        return face

    async def import_session(self, data: bytes, owner: bytes, salt: bytes) -> ImportedSession:
        """Begin a new session with the exported one in ``data``, for a client of Realtime that resumes it.
        ``owner``: the digest of the client's key, ``salt``: that of its tenant. Raises what `admit` and
        `RealtimeFace.import_` raise."""
        session = await self._realtime(None).import_(data, owner, salt)
        return ImportedSession(id=session.id, handle=session.handles.current)

    async def serve(self, socket: ClientSocket, channel: Channel) -> None:
        """Serve one WebSocket, of any protocol, until either side ends it. Call it in a task of the
        connection's own. A client that reads too slowly is dropped by means of ``channel``, and logged."""
        task = asyncio.current_task()
        assert task is not None, "a connection has a task of its own"
        self._sockets[task] = socket
        self._check_key(socket)  # it may have been removed since the request was let in
        with logging_with(**socket.client.caller.attribution.facts()):
            try:
                await socket.run()
            except SlowReader as slow:
                log.warning("the client at %s was dropped: %s", socket.client.address or "?", slow.message)
                self._slow_readers += 1
                channel.drop()
            finally:
                del self._sockets[task]

    async def drain(self) -> None:
        """Prepare for the server's end: admit no new client and no new turn, and tell all clients. Wait at most
        ``drain_seconds`` for running turns; those that the next server cannot continue are then cancelled.
        Returns after ``close_seconds`` more at the latest."""
        self.refuse()
        seconds = self.settings.drain_seconds
        log.info("draining: %d responses run and have %g s to end", self.turns.running, seconds)
        ending = [asyncio.ensure_future(session.drain(seconds)) for session in self.sessions()]
        if ending:
            _, late = await asyncio.wait(ending, timeout=seconds + self.settings.limits.close_seconds)
            for task in late:
                task.cancel()

    def _recovered(self, lost_seconds: float) -> None:
        """Called when another engine has taken over after ``lost_seconds`` without one: logs it and tells all
        sessions, also those without a running turn."""
        log.warning("another engine serves, after %.1f s without one", lost_seconds)
        if self._live is not None:
            self._live.recovered(lost_seconds)

    def change_tenants(self, tenants: Tenants) -> int:
        """Use the keys in ``tenants`` from now on, and their limits on open sessions, running turns and
        requests and tokens per minute.

        Closes the sockets of keys that are gone or belong to another tenant now, and returns their number.
        Limits that the engine and the journal enforce stay as they were at the start.
        """
        self.tenants = tenants
        self.turns.rates.change(tenants.rates())
        self.turns.metrics.labels.add(tenants.names().values())
        if self._registry is not None:
            self._registry.tenants.change(tenants.sessions())
        return sum([self._check_key(socket) for socket in self._sockets.values()])

    def _check_key(self, socket: ClientSocket) -> bool:
        """Begin to close a socket if its key was removed, or belongs to another tenant now. Returns whether
        that is so."""
        keys, caller = self.tenants.keys, socket.client.caller
        if keys is None or not caller.key or keys.opens((caller.key, *socket.client.aliases), caller.salt):
            return False
        socket.leave(KeyRemoved())
        return True

    async def snapshot(self, salt: bytes = b"", *, all_tenants: bool = True) -> MetricsSnapshot:
        """All statistics at this moment, for ``/metrics``. ``salt``: of the tenant that asks; its own numbers
        are in them. ``all_tenants``: false leaves out the totals of the server."""
        ready, tenant = self.state().ready, await self._tenant(salt)
        if not all_tenants:
            return MetricsSnapshot(ready, None, {}, {}, tenant)
        try:
            engine = await self._link.statistics()
        except EngineGone:
            engine = {}
        gateway = await self._lengths()
        if (registry := self._registry) is not None:
            gateway |= {**registry.statistics(), **await registry.sums()}
            if self._journal is not None:
                gateway |= await self._journal.statistics()
        number, turns = self._link.engine_number, self.turns.metrics
        vllm = self.model if self.settings.metrics_compat == "vllm" else None
        return MetricsSnapshot(ready, number, gateway, engine, tenant, turns, vllm)

    async def _tenant(self, salt: bytes) -> TenantSnapshot | None:
        name = self.tenants.name(salt)
        if not name or self._registry is None:
            return None
        limits = self.tenants.limits.get(name, NOTHING_SET)
        used = await self._registry.statistics_of(salt)
        return TenantSnapshot(name, used, asdict(limits))

    async def _lengths(self) -> dict[str, float]:
        events = size = 0
        for part in sliced(list(self._sockets.values())):
            for told in (socket.outbox.statistics() for socket in part):
                events, size = events + told.events, size + told.bytes
            await asyncio.sleep(0)
        return {
            "requests_waiting_for_engine": self._waiting,
            "sockets": len(self._sockets),
            "sessions_live": 0 if self._live is None else len(self._live),
            "responses_running": self.turns.running,
            "outbox_events": events,
            "outbox_bytes": size,
            "slow_readers_dropped": self._slow_readers,
            "turns_waiting": len(self.turns.queue),
            "turns_seconds_per_start": self.turns.queue.seconds_per_start,
        }


@asynccontextmanager
async def opened(
    service: Service, model: str, engine: AbstractAsyncContextManager[EngineLink]
) -> AsyncIterator[SessionRegistry]:
    """Run ``service`` on an engine during the block: load the model's tokenizer and templates, then, if they
    are sound, the engine; open the journal; let clients open sessions. Yields the session registry. After the
    block, sessions, journal and engine are closed. ``model``: a folder, a file or a name. ``engine``: entering
    it loads the engine.

    Raises ``ModelUnreadable``, ``SettingsInvalid``, ``TokenizerUnreadable``, ``TemplateFailed``,
    ``EngineDied``, and ``StoreUnusable`` (``StoreHeld`` already before loading).
    """
    settings = service.settings
    async with AsyncExitStack() as stack:
        stack.callback(service.refuse)  # what waits for an engine that could not be loaded
        folder = await asyncio.to_thread(find_model, model)
        check_folder(folder)  # first, so that no store is made for a model that is not there
        lock = None if settings.store is None else StoreLock(settings.store)
        if lock is not None:
            await asyncio.to_thread(lock.acquire, settings.journal.lock_seconds)
            stack.callback(lock.release)
        load = partial(Language.load, tool_fallback=settings.tool_fallback)
        language = await asyncio.to_thread(load, folder, settings.calls, settings.reasoning)
        link = await stack.enter_async_context(engine)
        if taken := [name for name in service.names if name in link.adapters]:
            raise SettingsInvalid(f"--lora-modules: {taken[0]!r} is a name of the model itself")
        for note in link.hello.notes:
            log.warning("%s", note)
        journal = None
        if settings.store is not None:
            shared = replace(settings.journal, tenants=service.tenants.journal())
            reclaimable = partial(file_bytes, expanded(settings.store))
            journal = await Journal.open(
                settings.store, language.digest(), shared, lock, reclaimable=reclaimable
            )
            stack.push_async_callback(journal.aclose)
        stack.push_async_callback(service.close)
        sessions = SessionSettings(
            recovery_seconds=settings.recovery_seconds,
            cycle_tokens=settings.cycle_tokens,
            tenants=service.tenants.sessions(),
        )
        registry = SessionRegistry(link, language, sessions, journal)
        service.open(registry, journal)
        yield registry
