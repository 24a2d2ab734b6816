"""What the turns of a server share, for every face: which may begin now, and what is counted of each.

A face calls `Turns.admit` before it does any work for a turn. `LiveSession` makes a `CountedTurn` of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..sessions.turn.events import ReplyDone
from ..sessions.turn.response import TurnResponse
from .auth import TurnCaller
from .errors import GatewayError, wire_error
from .rate_limits import RateLimiter, RateLimits
from .turn_metrics import TurnMetrics
from .turn_queue import Place, TurnQueue

if TYPE_CHECKING:  # it needs an extra
    from .tracing import TurnSpan, TurnTracer


class Turns:
    """One object for all live sessions. ``rates``: of the keys; by default none has a limit. ``queue``: of
    turns that wait for the engine; by default it has no end. ``tracer``: None if nothing is traced.
    ``metrics``: counts and times of all turns."""

    def __init__(
        self,
        rates: RateLimiter | None = None,
        queue: TurnQueue | None = None,
        tracer: TurnTracer | None = None,
    ) -> None:
        self.tracer = tracer
        self.rates = rates or RateLimiter()
        self.queue = TurnQueue() if queue is None else queue
        self.metrics = TurnMetrics()

    def admit(self, caller: TurnCaller) -> RateLimits:
        """Let one turn of a client begin.

        Raises ``RateLimited`` or ``QueueTooLong``, which say when to try again.
        """
        try:
            if caller.place is None or not caller.place.free:
                self.queue.check(caller.salt)
            return self.rates.admit(caller.key, caller.salt)
        except GatewayError as error:
            self.metrics.refuse(wire_error(error).code)
            raise

    def foresee(self, caller: TurnCaller) -> None:
        """Raises what `admit` would raise, for a request that has only come; takes nothing."""
        try:
            self.check(caller)
        except GatewayError as error:
            self.metrics.refuse(wire_error(error).code)
            raise

    def check(self, caller: TurnCaller) -> None:
        """Raises what `admit` would raise; nothing is counted."""
        if caller.place is None or not caller.place.free:
            self.queue.check(caller.salt)
        self.rates.check(caller.key, caller.salt)

    def begin(self, caller: TurnCaller, session_id: str, response: TurnResponse) -> CountedTurn:
        """A client's turn begins in the session ``session_id``."""
        span = None if self.tracer is None else self.tracer.begin(caller, session_id, response)
        return CountedTurn(self, caller, span)


class CountedTurn:
    """One turn, from its begin to `close`."""

    __slots__ = ("_caller", "_place", "_span", "_turns", "times")

    def __init__(self, turns: Turns, caller: TurnCaller, span: TurnSpan | None) -> None:
        self.times = turns.metrics.begin()
        self._turns = turns
        self._caller = caller
        self._span = span
        place = caller.place
        self._place = place if place is not None and place.free else Place(turns.queue, caller.salt)
        self._place.take()

    def output(self) -> None:
        """Output came."""
        self._place.start()
        self.times.output()

    def end(self, done: ReplyDone) -> None:
        """Its last event came."""
        usage = done.usage
        tokens = usage.new_tokens + usage.output_tokens
        self._turns.rates.spent(self._caller.key, self._caller.salt, tokens)
        self._turns.metrics.end(self.times, done)
        if self._span is not None:
            self._span.end(self.times, done)

    def fail(self, error: Exception) -> None:
        """It raised before its last event came."""
        self._turns.metrics.fail(wire_error(error).code)
        if self._span is not None:
            self._span.fail(error)

    def close(self) -> None:
        """It is over, whatever its end."""
        self._place.leave()
        if self._span is not None:
            self._span.close()
