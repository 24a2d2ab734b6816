"""A session in memory and the turns that run in it, whatever protocol its client speaks.

A live session outlives its client's connection: its turns continue while no client is there. It knows no
protocol; it passes the events of a turn to its `SessionFace`, the code of the client's protocol, which sends
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ...kvstore.log_lines import about_session, logging_with
from ...sessions.errors import StorageUnavailable
from ...sessions.session import Session
from ...sessions.turn.events import (
    EndReason,
    ReplyArgumentsDelta,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyReasoningDelta,
    ReplyStatus,
    ReplyTextDelta,
)
from ...sessions.turn.response import TurnResponse
from ..access.auth import TurnCaller
from ..access.rate_limits import RateLimits
from ..errors import INTERNAL, wire_error
from ..metrics.turns import TurnTimes
from ..net.flag import Flag
from .turns import CountedTurn, Turns

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_OUTPUT = (ReplyTextDelta, ReplyReasoningDelta, ReplyCallStarted, ReplyArgumentsDelta)
"""The events that count as output: the time to the first token ends with the first of them."""


class SessionFace(Protocol):
    """What the code of a protocol offers for one session: it sends the client what happens. `LiveSession` and
    `LiveSessions` call these methods."""

    async def tell(self, response: TurnResponse, event: ReplyEvent) -> None:
        """Send the client ``event``, the next event of the running turn ``response``. Returns when the client
        can take more."""

    def tell_now(self, response: TurnResponse, event: ReplyTextDelta) -> bool:
        """Send the client ``event``, as `tell` does, if that needs no wait. Returns whether it was sent; if
        not, `tell` gets the event. It is called by the code that makes the event, not in a task, so it must not
        wait."""

    def ended(self, response: TurnResponse, error: Exception | None) -> None:
        """Called when the turn ``response`` is over, to tell the client. ``error``: what was raised while its
        events were read and sent; its last event may not have come then. None if all events came."""

    def detach(self) -> None:
        """Called when the client's connection is gone, or another one has taken the session: from now on
        nothing is sent to it."""

    def alarm(self, fault: StorageUnavailable) -> None:
        """Called when the journal cannot write, because of ``fault``: tells the client if it waits for an
        acknowledgement. Acknowledgements wait until the journal can write."""

    def recovered(self, lost_seconds: float) -> None:
        """Called when another engine has taken over, after ``lost_seconds`` without one: tells the client
        that."""

    def going_away(self, seconds: float) -> None:
        """Called before the server ends: tells the client that the server takes no new turns, and closes the
        connection within ``seconds``."""

    async def flushed(self) -> None:
        """Wait until the client's connection has taken everything that was sent to it."""

    def child_config(self) -> bytes:
        """The configuration with which a session that is forked from this one begins, encoded by the face. The
        journal keeps these bytes."""

    def fork(self, session: Session, config: bytes) -> LiveSession:
        """Make a live session of ``session``, which was forked from this one. ``config``: what `child_config`
        returned."""


class LiveSession:
    """One session in memory, the turns that run in it, and its ``face``, which sends to the client.

    ``resumable``: the client can come back with a handle, so turns continue without it; the face sets this.
    ``disposable``: no client has a handle, so the session may be closed while idle although the journal does
    not have it. ``draining``: the server is going away, so no new turn may begin. ``turns``: admits and counts
    the turns of all sessions of the server. ``caller``: the client for which its turns run. ``begun_at``: the
    last turn in its history when it was made, by its id; None if it had none.
    """

    def __init__(self, session: Session, face: SessionFace, turns: Turns | None = None) -> None:
        self.session = session
        self.face = face
        self.resumable = False
        self.disposable = False
        self.draining = False
        self.turns = turns or Turns()
        self.caller = TurnCaller()
        self.begun_at = self._last_turn
        self._running: dict[str, TurnResponse] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()
        self._idle = Flag(on=True)

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.id

    @property
    def went_on(self) -> bool:
        """Whether a turn has joined its conversation since it was made."""
        return self._last_turn != self.begun_at

    @property
    def _last_turn(self) -> str | None:
        head = self.session.history.head
        return None if head is None else head.id

    @property
    def running(self) -> tuple[TurnResponse, ...]:
        """The turns that run: a turn runs until its events are all read."""
        return tuple(self._running.values())

    @property
    def at_rest(self) -> bool:
        """Whether no turn runs and no client request is being served. Background work does not count."""
        return not self._running and not self._serving

    # --- requests -------------------------------------------------------------------------------------------

    async def in_order(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``, which serves one client request, after the work of all earlier requests. Returns when
        ``work`` is done, and raises its errors. If the caller is cancelled, ``work`` is still finished."""
        await asyncio.shield(spawn(self._next(work), self._serving))

    async def _next(self, work: Callable[[], Awaitable[None]]) -> None:
        async with self._order:
            await work()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in a task of its own, beside the requests. `aclose` cancels it. `at_rest` does not count
        it."""
        spawn(work, self._background)

    # --- turns ----------------------------------------------------------------------------------------------

    def run(self, response: TurnResponse) -> None:
        """Run a turn: start a task that reads the events of ``response`` to the end and passes them to the
        face."""
        turn = self.turns.begin(self.caller, self.id, response)
        with logging_with(session=self.id, **self.caller.attribution.facts()):
            task = asyncio.create_task(self._read(response, turn), name=response.id)
        self._running[response.id] = response
        self._idle.clear()
        self._readers[response.id] = task
        task.add_done_callback(lambda _: turn.close())
        task.add_done_callback(lambda _: self._forget(response.id))  # also if the task never began

    def admit(self) -> None:
        """Let one turn begin, before any work for it: takes one request of the client's key. Raises
        ``TurnLimit``, ``RateLimited`` or ``QueueTooLong``."""
        self.session.check_turns()
        self.turns.admit(self.caller)

    def check_admission(self) -> None:
        """Raise ``RateLimited`` or ``QueueTooLong`` if `admit` would. Nothing is counted."""
        self.turns.check(self.caller)

    def rate_limits(self) -> RateLimits:
        """What the key of the session's client has left of its requests and tokens per minute."""
        return self.turns.rates.left(self.caller.key, self.caller.salt)

    async def cancel(self, response_id: str, reason: EndReason = EndReason.CLIENT_CANCELLED) -> None:
        """Cancel the turn with this id, if it runs. What it said so far stays in the conversation. ``reason``:
        the reason in its last event."""
        if response_id in self._running:
            await self._running[response_id].cancel(reason)

    async def wait_ended(self, response_id: str | None) -> None:
        """Wait until the turn with this id is over. Returns without waiting if that turn does not run, or the
        id is None."""
        if (reader := self._readers.get(response_id or "")) is not None:
            await asyncio.wait([reader])

    async def idle(self) -> None:
        """Wait until no turn runs."""
        await self._idle.wait()

    async def journaled(self) -> None:
        """Wait until the journal has all that the session has done so far. Without a journal it does not
        wait."""
        if (ticket := self.session.log.sync()) is not None:
            await asyncio.shield(ticket)  # others wait for the same one

    async def _read(self, response: TurnResponse, turn: CountedTurn) -> None:
        last: ReplyEvent | None = None

        def tell_now(delta: ReplyTextDelta) -> bool:
            if not self.face.tell_now(response, delta):
                return False
            turn.output()
            return True

        try:
            async with response:
                while (event := await response.next_event(tell_now)) is not None:
                    if isinstance(event, _OUTPUT):
                        turn.output()
                    await self.face.tell(response, event)
                    last = event
            if isinstance(last, ReplyDone):
                turn.end(last)
                _log_end(self.id, response.id, last, turn.times)
        except Exception as error:  # it ends this turn and nothing else
            turn.fail(error)
            report(self.id, response.id, error)
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
        """Prepare for the server's end: take no new turns, tell the client, and wait at most ``seconds`` until
        no turn runs.

        A turn that still runs then is left alone if the session is resumable and in the journal: the next
        server continues it. Any other is cancelled, and ends as incomplete. Last, wait until the client has
        received everything; this wait has no limit of its own.
        """
        self.draining = True
        face = self.face  # it may be let go meanwhile
        face.going_away(seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.idle()
        if not (self.resumable and self.session.log.durable):
            for response in self.running:
                await response.cancel(EndReason.SERVER_LEAVING)
            await self.idle()
        await face.flushed()

    async def aclose(self) -> None:
        """Detach the face from its connection, and cancel all tasks of this session: the turns' readers,
        requests and background work. The session itself stays open until `SessionRegistry.close`. The face,
        which may refer to this, is let go: what is closed is freed without the garbage collector."""
        self.face.detach()
        tasks = [*self._readers.values(), *self._serving, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del self.face


def spawn(work: Coroutine[Any, Any, _T], tasks: set[asyncio.Task[_T]]) -> asyncio.Task[_T]:
    """Start ``work`` as a task, keep it in the set ``tasks`` until it ends, so that it is not collected, and
    return it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def report(session_id: str, response_id: str, error: Exception) -> None:
    """Log that a response ended with ``error``: in one line, or with the traceback if the error is a mistake of
    this server."""
    wire = wire_error(error)
    if wire is INTERNAL:
        log.error("response broke off", exc_info=error, extra=about_session(session_id, response=response_id))
    else:
        log.info("response refused", extra=about_session(session_id, response=response_id, code=wire.code))


def log_refusal(session_id: str, error: Exception) -> None:
    """Log that a client's event was refused because of ``error``. Its text may quote the client, so it is
    logged only at debug level. A mistake of this server is not logged here: it was logged with its
    traceback."""
    wire = wire_error(error)
    if wire is not INTERNAL:  # a mistake of this server was logged with its traceback
        why = str(error) if log.isEnabledFor(logging.DEBUG) else None
        log.info("event refused", extra=about_session(session_id, code=wire.code, why=why))


def _log_end(session_id: str, response_id: str, done: ReplyDone, times: TurnTimes) -> None:
    """Log a response that has ended, with its tokens and times."""
    first = times.first_seconds
    usage, error = done.usage, done.error
    code = None if error is None else wire_error(error)
    level = logging.WARNING if code is not None and code.status >= 500 else logging.INFO
    if not log.isEnabledFor(level):
        return
    facts = about_session(
        session_id,
        response=response_id,
        code=None if code is None else code.code,
        reason=done.reason.value if done.status is not ReplyStatus.COMPLETED else None,
        input=usage.input_tokens,
        output=usage.output_tokens,
        ttft_ms=None if first is None else round(1e3 * first, 1),
        total_ms=round(1e3 * times.seconds, 1),
        cached=usage.cached_tokens - usage.host_tokens - usage.disk_tokens,
        host=usage.host_tokens,
        disk=usage.disk_tokens,
        prefilled=usage.prefilled_tokens,
        recomputed=usage.recomputed_tokens or None,
    )
    log.log(level, "response %s", done.status.value, extra=facts)
