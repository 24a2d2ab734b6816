"""A session in memory and the turns that run in it, for every face.

A live session outlives its client's connection: its turns go on while no client is there. It knows no protocol;
what a turn tells goes to the session's face.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ..sessions.errors import StorageUnavailable
from ..sessions.session import Session
from ..sessions.turn.events import EndReason, ReplyEvent
from ..sessions.turn.response import TurnResponse
from .errors import INTERNAL, wire_error

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class SessionFace(Protocol):
    """One session's side of a protocol. `LiveSession` and `LiveSessions` call these methods."""

    async def tell(self, response: TurnResponse, event: ReplyEvent) -> None:
        """Pass on one event of a running turn. Returns when the client can take more."""

    def ended(self, response: TurnResponse, error: Exception | None) -> None:
        """A turn is over. ``error``: the reading of it raised this, so its last event may be missing."""

    def detach(self) -> None:
        """The client's connection is gone, or belongs to another client now."""

    def alarm(self, fault: StorageUnavailable) -> None:
        """The journal cannot write: acknowledgements wait until it can."""

    def recovered(self, lost_seconds: float) -> None:
        """Another engine has taken over after ``lost_seconds`` without one."""

    def going_away(self, seconds: float) -> None:
        """The server takes no new work, and closes the connection within ``seconds``."""

    async def flushed(self) -> None:
        """Wait until the client has all that was told."""

    def child_config(self) -> bytes:
        """What the journal keeps of a session that is forked from this one."""

    def fork(self, session: Session, config: bytes) -> LiveSession:
        """Bring to life a session that was forked from this one."""


class LiveSession:
    """One session, its turns and its face.

    ``resumable``: the client can come back with a handle, so turns go on without it. ``draining``: the server
    takes no new turns.
    """

    def __init__(self, session: Session, face: SessionFace) -> None:
        self.session = session
        self.face = face
        self.resumable = False
        self.draining = False
        self._running: dict[str, TurnResponse] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.id

    @property
    def running(self) -> tuple[TurnResponse, ...]:
        """The turns that run."""
        return tuple(self._running.values())

    @property
    def at_rest(self) -> bool:
        """Whether no turn runs and no request is being served."""
        return not self._running and not self._serving

    # --- requests -------------------------------------------------------------------------------------------

    async def in_order(self, work: Callable[[], Awaitable[None]]) -> None:
        """Serve a client's request after those before it. It goes on when the caller is cancelled."""
        await asyncio.shield(spawn(self._next(work), self._serving))

    async def _next(self, work: Callable[[], Awaitable[None]]) -> None:
        async with self._order:
            await work()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work beside the requests, until the session is closed. `at_rest` does not count it."""
        spawn(work, self._background)

    # --- turns ----------------------------------------------------------------------------------------------

    def run(self, response: TurnResponse) -> None:
        """Read a turn to its end in a task of its own, and tell the face what it tells."""
        task = asyncio.create_task(self._read(response), name=response.id)
        self._running[response.id] = response
        self._idle.clear()
        self._readers[response.id] = task
        task.add_done_callback(lambda _: self._forget(response.id))  # also where it never began

    def is_running(self, response_id: str) -> bool:
        """Whether this turn runs."""
        return response_id in self._running

    async def cancel(self, response_id: str, reason: EndReason = EndReason.CLIENT_CANCELLED) -> None:
        """Cut a turn short, if it runs. What it has said stays."""
        if response_id in self._running:
            await self._running[response_id].cancel(reason)

    async def wait_ended(self, response_id: str | None) -> None:
        """Wait until this turn is over, if it runs."""
        if (reader := self._readers.get(response_id or "")) is not None:
            await asyncio.wait([reader])

    async def idle(self) -> None:
        """Wait until no turn runs."""
        await self._idle.wait()

    async def _read(self, response: TurnResponse) -> None:
        try:
            async with response:
                async for event in response:
                    await self.face.tell(response, event)
        except Exception as error:  # it ends this turn and nothing else
            report(response.id, error)
            self.face.ended(response, error)
        else:
            self.face.ended(response, None)
        finally:
            self._forget(response.id)

    def _forget(self, response_id: str) -> None:
        self._readers.pop(response_id, None)
        self._running.pop(response_id, None)
        if not self._running:
            self._idle.set()

    # --- the end --------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Take no new turns; wait until none runs and the client has all.

        A turn that still runs after ``seconds`` goes on in the next server where the session is resumable and
        in the journal. Any other is cut, and ends as incomplete.
        """
        self.draining = True
        self.face.going_away(seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()
        if not (self.resumable and self.session.log.durable):
            for response in self.running:
                await response.cancel(EndReason.SERVER_LEAVING)
            await self.idle()
        await self.face.flushed()

    async def aclose(self) -> None:
        """End all that still runs here. `SessionRegistry.close` closes the session itself."""
        self.face.detach()
        tasks = [*self._readers.values(), *self._serving, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def spawn(work: Coroutine[Any, Any, _T], tasks: set[asyncio.Task[_T]]) -> asyncio.Task[_T]:
    """Run work in a task that ``tasks`` holds until it ends."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def report(response_id: str, error: Exception) -> None:
    """Log an error that is this server's own mistake, and no answer to a client."""
    if wire_error(error) is INTERNAL:
        log.error("response %s failed", response_id, exc_info=error)
