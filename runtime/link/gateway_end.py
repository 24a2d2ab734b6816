"""The gateway's end of one socket: calls that await their reply, generations that await their rows.

One object per engine_number of the engine. What arrives is dispatched where it arrives, in order and without a
task in between: a row can follow its generation's reply in the same read, and a caller that was cancelled
disturbs nobody. Knows request ids and epochs; not sequence ids' meaning, restarts or processes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from ..errors import EngineDied, EngineGone, FrameInvalid, LinkClosed, RuntimeFault, fault_of
from .codec import frame, report_reader
from .generation import Generation
from .messages import (
    AnyReport,
    AnyVerb,
    Close,
    Fatal,
    Fork,
    Generate,
    Heartbeat,
    Hello,
    Open,
    Refusal,
    Row,
    Step,
    Stop,
    VerbReply,
)


@dataclass(slots=True)
class _Call:
    verb: AnyVerb
    reply: asyncio.Future[VerbReply] | None = None  # None: nobody waits
    generation: Generation | None = None


FIRST_HEARTBEAT = 20.0  # seconds a new engine has to be heard of; its process starts in them


class GatewayEnd(asyncio.Protocol):
    """Made on the event loop that it is used on; ``heard`` is told of each heartbeat."""

    def __init__(self, heard: Callable[[Heartbeat], None] = lambda beat: None) -> None:
        self.hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self.hello.add_done_callback(lambda hello: hello.cancelled() or hello.exception())  # may go unread
        self.lost = asyncio.Event()
        self.heartbeat: Heartbeat | None = None
        self.last_heartbeat = time.monotonic()
        self.gone_at = math.inf  # when nothing came any more, by ``time.monotonic()``
        self.stale_rows = 0
        self._heard = heard
        self._reader = report_reader()
        self._requests = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._generations: dict[int, Generation] = {}
        self._unread: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._transport: asyncio.WriteTransport | None = None
        self._fatal: Fatal | None = None
        self._gone: EngineGone | None = None

    # --- down -----------------------------------------------------------------------------------------------

    @property
    def gone(self) -> EngineGone | None:
        """Why nothing will come any more; None while the engine is there."""
        return self._gone

    @property
    def overdue(self) -> float:
        """Seconds since the engine should have been heard of again; 0.0 while in time, or gone.

        By arrival here: a blocked loop must read before it judges.
        """
        if self._gone is not None:
            return 0.0
        allowed = self.heartbeat.deadline if self.heartbeat else FIRST_HEARTBEAT
        return max(0.0, time.monotonic() - self.last_heartbeat - allowed)

    def next_request(self) -> int:
        """The id for the next verb."""
        return next(self._requests)

    async def call(self, verb: AnyVerb, generation: Generation | None = None) -> VerbReply:
        """Send a verb and wait for its reply; ``generation`` begins with it.

        Raises what the engine refused it with, or ``EngineGone``. A caller cancelled here leaves nothing
        behind: what the verb began is stopped or closed by one sent at once, before any later verb of
        anybody.
        """
        reply: asyncio.Future[VerbReply] = asyncio.get_running_loop().create_future()
        call = _Call(verb, reply, generation)
        self._send(call)
        try:
            return await reply
        except asyncio.CancelledError:
            self._undo(call)
            raise

    def ask(self, verb: AnyVerb) -> asyncio.Future[VerbReply]:
        """Send a verb; its reply when it comes, or what `call` would raise. Raises ``EngineGone``.

        For verbs that are nothing to undo.
        """
        reply: asyncio.Future[VerbReply] = asyncio.get_running_loop().create_future()
        self._send(_Call(verb, reply))
        return reply

    def post(self, verb: AnyVerb) -> None:
        """Send a verb whose reply nobody waits for."""
        self._send(_Call(verb))

    def close(self) -> None:
        """Close this end: whoever waits gets ``LinkClosed``."""
        self._end(LinkClosed("this end closed the link"))

    def give_up(self, fault: EngineGone) -> None:
        """The engine is there, but of no use: whoever waits gets ``fault``."""
        self._end(fault)

    def lengths(self) -> dict[str, float]:
        """Calls without reply, running generations, rows nobody has read, rows dropped for an old epoch."""
        return {
            "link_calls": len(self._calls),
            "link_generations": len(self._generations),
            "link_rows": sum(generation.queued for generation in self._unread),
            "link_stale_rows": self.stale_rows,
        }

    def _send(self, call: _Call) -> None:
        data = frame(call.verb)
        if self._gone is not None or self._transport is None:
            raise _anew(self._gone or EngineDied("the engine is not connected"))
        self._calls[call.verb.request] = call
        self._transport.write(data)

    def _undo(self, call: _Call) -> None:
        reply, call.reply = call.reply, None
        refused = reply is not None and reply.done() and not reply.cancelled() and reply.exception()
        if refused or self._gone is not None:
            return
        begun = _begun_by(call.verb)
        if isinstance(call.verb, Generate):
            if self._generations.get(call.verb.seq) is call.generation:
                self._over(call.verb.seq)
            if not begun:
                self.post(Stop(self.next_request(), call.verb.seq))
        for seq in begun:
            self.post(Close(self.next_request(), seq))

    # --- up (called by the event loop) ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is ours."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came, of any number of reports."""
        try:
            for report in self._reader.feed(data):
                self._receive(report)
        except FrameInvalid as fault:
            self._end(fault)

    def connection_lost(self, error: Exception | None) -> None:
        """The other end closed, or this one did."""
        reason = (
            self._fatal.message if self._fatal else f"the engine closed its link{f': {error}' * bool(error)}"
        )
        self._end(EngineDied(reason))
        self.lost.set()

    def _receive(self, report: AnyReport) -> None:
        match report:
            case Step():
                for row in report.rows:
                    self._row(row)
            case VerbReply():
                self._reply(report)
            case Refusal():
                self._settle(self._called(report.request), fault_of(report.code, report.message))
            case Heartbeat():
                self.heartbeat, self.last_heartbeat = report, time.monotonic()
                self._heard(report)
            case Hello():
                if not self.hello.done():
                    self.hello.set_result(report)
            case Fatal():
                self._fatal = report

    def _row(self, row: Row) -> None:
        generation = self._generations.get(row.seq)
        if generation is None or row.epoch != generation.state.epoch:
            self.stale_rows += 1
            return
        generation.put(row)
        if row.finish is not None:
            del self._generations[row.seq]

    def _reply(self, reply: VerbReply) -> None:
        call = self._called(reply.request)
        if isinstance(call.verb, Close):
            self._over(call.verb.seq)
        elif reply.state is not None:
            running = self._generations.get(reply.state.seq)
            if running is not None and running.state.epoch != reply.state.epoch:
                self._over(reply.state.seq)
            if call.generation is not None and call.reply is not None:
                call.generation.state = reply.state
                self._generations[reply.state.seq] = call.generation
                self._unread.add(call.generation)
        self._settle(call, reply)

    def _called(self, request: int) -> _Call:
        call = self._calls.pop(request, None)
        if call is None:
            raise FrameInvalid(f"an answer to request {request}, which awaits none")
        return call

    def _settle(self, call: _Call, answer: VerbReply | RuntimeFault) -> None:
        if call.reply is None or call.reply.done():
            return
        if isinstance(answer, VerbReply):
            call.reply.set_result(answer)
        else:
            call.reply.set_exception(answer)

    def _over(self, seq: int) -> None:
        generation = self._generations.pop(seq, None)
        if generation is not None:
            generation.end()

    def _end(self, fault: EngineGone) -> None:
        """Everybody who waits learns it now; the first reason stays."""
        if self._gone is not None:
            return
        self._gone = fault
        self.gone_at = time.monotonic()
        if not self.hello.done():
            early = self._fatal
            self.hello.set_exception(fault_of(early.code, early.message) if early else _anew(fault))
        for call in self._calls.values():
            self._settle(call, _anew(fault))
        for generation in self._generations.values():
            generation.fail(fault)
        self._calls.clear()
        self._generations.clear()
        if self._transport is not None:
            self._transport.abort()


def _anew(fault: EngineGone) -> EngineGone:
    """One exception per raise: a shared one would collect everybody's traceback."""
    return type(fault)(fault.message)


def _begun_by(verb: AnyVerb) -> list[int]:
    if isinstance(verb, Open) or (isinstance(verb, Generate) and verb.opening is not None):
        return [verb.seq]
    return verb.children if isinstance(verb, Fork) else []
