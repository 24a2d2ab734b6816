"""What the turns of a server share, whatever their protocol: which may begin now, and what is counted of each.

A face, the code of one protocol, calls `Turns.admit` before it does any work for a turn. `LiveSession` calls
`Turns.begin` when the turn runs, and reports to the `CountedTurn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...sessions.turn.events import ReplyDone
from ...sessions.turn.response import TurnResponse
from ..access.auth import TurnCaller
from ..access.rate_limits import RateLimiter, RateLimits
from ..access.turn_queue import Place, TurnQueue
from ..errors import GatewayError, wire_error
from ..metrics.turns import TurnMetrics

if TYPE_CHECKING:  # it needs an extra
    from ..metrics.tracing import TurnSpan, TurnTracer


class Turns:
    """Admits and counts the turns of all live sessions of a server. ``rates``: limits per minute of the keys;
    by default none has a limit. ``queue``: of turns that wait for the engine; by default it refuses none.
    ``tracer``: makes a span of each turn; None: nothing is traced. ``metrics``: counts and times of all
    turns."""

    def __init__(
        self,
        rates: RateLimiter | None = None,
        queue: TurnQueue | None = None,
        tracer: TurnTracer | None = None,
        metrics: TurnMetrics | None = None,
    ) -> None:
        self.tracer = tracer
        self.rates = rates or RateLimiter()
        self.queue = TurnQueue() if queue is None else queue
        self.metrics = metrics or TurnMetrics()
        self.running = 0
        """The number of turns that run."""

    def admit(self, caller: TurnCaller) -> RateLimits:
        """Let one turn of a client begin: take one of its requests per minute. Returns what its key has left.

        Raises ``RateLimited`` or ``QueueTooLong``, which say when to try again and are counted as refusals.
        """
        try:
            if caller.place is None or not caller.place.free:
                self.queue.check(caller.salt)
            return self.rates.admit(caller.key, caller.salt)
        except GatewayError as error:
            self.metrics.refuse(caller.attribution, wire_error(error).code)
            raise

    def foresee(self, caller: TurnCaller) -> None:
        """Raises what `admit` would raise, for a request that has only come; takes nothing."""
        try:
            self.check(caller)
        except GatewayError as error:
            self.metrics.refuse(caller.attribution, wire_error(error).code)
            raise

    def check(self, caller: TurnCaller) -> None:
        """Raise ``RateLimited`` or ``QueueTooLong`` if `admit` would. Takes and counts nothing."""
        if caller.place is None or not caller.place.free:
            self.queue.check(caller.salt)
        self.rates.check(caller.key, caller.salt)

    def begin(self, caller: TurnCaller, session_id: str, response: TurnResponse) -> CountedTurn:
        """Count a turn of ``caller`` as begun in the session ``session_id``, and start its trace span. Returns
        the object that its output and its end are reported to."""
        span = None if self.tracer is None else self.tracer.begin(caller, session_id, response)
        return CountedTurn(self, caller, span)


class CountedTurn:
    """One turn, from its begin to `close`: passes what happens to it on to the queue, the rate limits, the
    metrics and, if ``span`` is there, its trace span."""

    __slots__ = ("_caller", "_place", "_span", "_turns", "times")

    def __init__(self, turns: Turns, caller: TurnCaller, span: TurnSpan | None) -> None:
        self.times = turns.metrics.begin(caller.attribution)
        self._turns = turns
        self._caller = caller
        self._span = span
        place = caller.place
        self._place = place if place is not None and place.free else Place(turns.queue, caller.salt)
        self._place.take()
        turns.running += 1

    def output(self) -> None:
        """Report that output of the turn came now. The first output ends its wait in the queue."""
        self._place.start()
        self.times.output()

    def end(self, done: ReplyDone) -> None:
        """Report that the turn has ended with its last event ``done``: take its tokens from the key's limit,
        and record its usage and end."""
        usage = done.usage
        tokens = usage.new_tokens + usage.output_tokens
        self._turns.rates.spent(self._caller.key, self._caller.salt, tokens)
        wire = None if done.error is None else wire_error(done.error)
        self._turns.metrics.end(
            self.times, done, wire.code if wire is not None and wire.status < 500 else None
        )
        if self._span is not None:
            self._span.end(self.times, done)

    def fail(self, error: Exception) -> None:
        """Report that the turn raised ``error`` before its last event came."""
        wire = wire_error(error)
        self._turns.metrics.fail(self.times, wire.code, refused=wire.status < 500)
        if self._span is not None:
            self._span.fail(error)

    def close(self) -> None:
        """Release what the turn still holds, its place in the queue and its span, however it ended. Call it
        last."""
        self._turns.running -= 1
        self._place.leave()
        if self._span is not None:
            self._span.close()
