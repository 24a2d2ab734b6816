"""The gateway's end of one socket: calls that await their reply, generations that await their rows.

There is one object per engine. A message is handled as it arrives, in order and in no task: the rows of a
generation may follow its reply in the same read. This end knows request ids, sequence ids and epochs; it
knows no processes and no restarts.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from .. import verbs
from ..errors import EngineDied, EngineGone, FrameInvalid, RuntimeFault, fault_of
from . import messages
from .generation import Generation


@dataclass(slots=True)
class _PendingVerb:
    verb: verbs.AnyVerb
    reply: asyncio.Future[verbs.VerbReply]  # cancelled: nothing awaits it
    generation: Generation | None


FIRST_HEARTBEAT = 20.0  # seconds until the first heartbeat of a new engine; its process starts in them


class GatewayEnd(asyncio.Protocol):
    """The gateway's end of the link to one engine; made on the event loop that it runs on.

    ``on_heartbeat`` is called with each heartbeat. ``clock``: seconds, monotonic. ``hello``: the future of
    the engine's first message, which fails if the link ends before. ``lost``: set when the socket is closed.
    ``heartbeat``: the latest; ``last_heartbeat``: when it came. ``gone``: why the link ended, None while it is
    up.
    """

    def __init__(
        self,
        on_heartbeat: Callable[[messages.Heartbeat], None] = lambda beat: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hello: asyncio.Future[messages.Hello] = asyncio.get_running_loop().create_future()
        self.hello.add_done_callback(lambda hello: hello.cancelled() or hello.exception())  # may go unread
        self.lost = asyncio.Event()
        self.heartbeat: messages.Heartbeat | None = None
        self.last_heartbeat = clock()
        self.stale_rows = 0
        self._on_heartbeat = on_heartbeat
        self._clock = clock
        self._reader = messages.report_reader()
        self._requests = itertools.count(1)
        self._pending: dict[int, _PendingVerb] = {}
        self._generations: dict[int, Generation] = {}
        self._unread: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._transport: asyncio.WriteTransport | None = None
        self._fatal: messages.Fatal | None = None
        self.gone: EngineGone | None = None

    # --- down -----------------------------------------------------------------------------------------------

    @property
    def overdue(self) -> float:
        """Seconds since the next heartbeat should have arrived; 0.0 if it is in time, or the link ended.

        Heartbeats count when they arrive here: an event loop that was blocked must read before it judges.
        """
        if self.gone is not None:
            return 0.0
        allowed = self.heartbeat.deadline if self.heartbeat else FIRST_HEARTBEAT
        return max(0.0, self._clock() - self.last_heartbeat - allowed)

    def next_request(self) -> int:
        """A new request id, for the next verb."""
        return next(self._requests)

    async def call(self, verb: verbs.AnyVerb, generation: Generation | None = None) -> verbs.VerbReply:
        """Send a verb and wait for its reply. ``generation``: the generation that the verb begins: it gets
        its state from the reply, and its rows from then on.

        Raises the error of the engine's refusal, or ``EngineGone``. If the caller is cancelled here, what the
        verb began is stopped or closed by another verb, which is sent at once and before all later ones.
        """
        pending = self._send(verb, generation)
        try:
            return await pending.reply
        except asyncio.CancelledError:
            self._undo(pending)
            raise

    def ask(self, verb: verbs.AnyVerb) -> asyncio.Future[verbs.VerbReply]:
        """Send a verb that need not be undone. Returns the future of its reply, which fails with the error of
        the engine's refusal or with ``EngineGone``.

        Raises ``EngineGone`` if the verb cannot be sent.
        """
        return self._send(verb).reply

    def lengths(self) -> dict[str, float]:
        """How many calls have no reply yet, how many generations run, how many rows are unread, and how many
        were dropped for an old epoch."""
        return {
            "link_calls": len(self._pending),
            "link_generations": len(self._generations),
            "link_rows": sum(generation.queued for generation in self._unread),
            "link_stale_rows": self.stale_rows,
        }

    def _send(self, verb: verbs.AnyVerb, generation: Generation | None = None) -> _PendingVerb:
        data = messages.frame(verb)
        if self.gone is not None or self._transport is None:
            raise self.gone.copy() if self.gone else EngineDied("the engine is not connected")
        pending = _PendingVerb(verb, asyncio.get_running_loop().create_future(), generation)
        self._pending[verb.request] = pending
        self._transport.write(data)
        return pending

    def _undo(self, pending: _PendingVerb) -> None:
        """Stop or close what a cancelled call began, unless the engine refused it."""
        generation, pending.generation = pending.generation, None  # a reply that comes later begins nothing
        refused = not pending.reply.cancelled() and pending.reply.exception()
        if refused or self.gone is not None:
            return
        begun = _begun_by(pending.verb)
        if isinstance(pending.verb, verbs.Generate):
            if self._generations.get(pending.verb.seq) is generation:
                self._end_generation(pending.verb.seq)
            if not begun:
                self.ask(verbs.Stop(self.next_request(), pending.verb.seq)).cancel()
        for seq in begun:
            self.ask(verbs.Close(self.next_request(), seq)).cancel()

    # --- up (called by the event loop) ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the socket is open: keeps the transport to write to."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with bytes from the engine: handles the reports that ``data`` completes. An invalid
        frame ends the link."""
        try:
            for report in self._reader.feed(data):
                self._receive(report)
        except FrameInvalid as fault:
            self.close(fault)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio when the socket was closed, by either end: fails what is pending, and sets
        ``lost``."""
        cause = f": {error}" if error else ""
        self.close(EngineDied(self._fatal.message if self._fatal else f"the engine closed its link{cause}"))
        self.lost.set()

    def _receive(self, report: messages.AnyReport) -> None:
        match report:
            case verbs.Step():
                for row in report.rows:
                    self._receive_row(row)
            case verbs.VerbReply():
                self._receive_reply(report)
            case verbs.Refusal():
                _resolve(self._take(report.request), fault_of(report.code, report.message))
            case messages.Heartbeat():
                self.heartbeat, self.last_heartbeat = report, self._clock()
                self._on_heartbeat(report)
            case messages.Hello():
                if not self.hello.done():
                    self.hello.set_result(report)
            case messages.Fatal():
                self._fatal = report

    def _receive_row(self, row: verbs.Row) -> None:
        generation = self._generations.get(row.seq)
        if generation is None or row.epoch != generation.state.epoch:
            self.stale_rows += 1
            return
        generation.put(row)
        if row.finish is not None:
            del self._generations[row.seq]

    def _receive_reply(self, reply: verbs.VerbReply) -> None:
        pending = self._take(reply.request)
        if isinstance(pending.verb, verbs.Close):
            self._end_generation(pending.verb.seq)
        elif reply.state is not None:
            running = self._generations.get(reply.state.seq)
            if running is not None and running.state.epoch != reply.state.epoch:
                self._end_generation(reply.state.seq)
            if pending.generation is not None:
                pending.generation.state = reply.state
                self._generations[reply.state.seq] = pending.generation
                self._unread.add(pending.generation)
        _resolve(pending, reply)

    def _take(self, request: int) -> _PendingVerb:
        pending = self._pending.pop(request, None)
        if pending is None:
            raise FrameInvalid(f"an answer to request {request}, which awaits none")
        return pending

    def _end_generation(self, seq: int) -> None:
        generation = self._generations.pop(seq, None)
        if generation is not None:
            generation.end()

    def close(self, fault: EngineGone) -> None:
        """End the link: fail all pending calls and generations with ``fault``, and close the socket. Only the
        first call has an effect."""
        if self.gone is not None:
            return
        self.gone = fault
        if not self.hello.done():
            early = self._fatal
            self.hello.set_exception(fault_of(early.code, early.message) if early else fault.copy())
        for pending in self._pending.values():
            _resolve(pending, fault.copy())
        for generation in self._generations.values():
            generation.end(fault)
        self._pending.clear()
        self._generations.clear()
        if self._transport is not None:
            self._transport.abort()


def _resolve(pending: _PendingVerb, answer: verbs.VerbReply | RuntimeFault) -> None:
    if pending.reply.done():
        return
    if isinstance(answer, verbs.VerbReply):
        pending.reply.set_result(answer)
    else:
        pending.reply.set_exception(answer)


def _begun_by(verb: verbs.AnyVerb) -> list[int]:
    if isinstance(verb, verbs.Open) or (isinstance(verb, verbs.Generate) and verb.opening is not None):
        return [verb.seq]
    return verb.children if isinstance(verb, verbs.Fork) else []
