"""One HTTP connection: uvicorn's protocol with h11, behind a check of each head and a deadline for each stage.

Uvicorn and h11 themselves keep partial heads for ever, read a head that two programs can read in two ways, and
take any number of chunks of one byte.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..access.auth import refusal
from ..access.turn_queue import PLACE, Place
from ..errors import GatewayError, HeadInvalid, HeadTooLarge, SlowSender, TooManyChunks
from ..settings import ClientLimits
from .cycles import let_go
from .deadlines import ConnectionStage
from .heads import HEAD_END, check_head, whole_answer
from .listener import Door, Refused
from .websocket_connection import LimitedWebSocket

MOST_CHUNKS = 1024
"""The most chunks of a body, besides one for each `CHUNK_BYTES` of it: each costs a parser's run."""
CHUNK_BYTES = 512


class CheckedParser(h11.Connection):
    """h11's parser of one connection, which gives no request before its head was checked. ``checked``: the head
    that it has now was. ``most``: bytes of a head. ``fault``: why it takes no more, if h11 cannot tell."""

    def __init__(self, most: int) -> None:
        super().__init__(h11.SERVER, most)
        self.checked = False
        self.fault: GatewayError | None = None
        self._chunks = self._bytes = 0  # of the body that comes

    def next_event(self) -> Any:
        """The next event, as h11 has it. Raises ``RemoteProtocolError``, also for too many small chunks."""
        if self.their_state is h11.IDLE and not self.checked:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.checked, self._chunks, self._bytes = False, 0, 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > MOST_CHUNKS + self._bytes // CHUNK_BYTES:
                self.fault = TooManyChunks(
                    f"The body comes in chunks of less than {CHUNK_BYTES} bytes: send larger"
                )
                raise h11.RemoteProtocolError("too many chunks")
        return event


class LimitedHTTP(H11Protocol):
    """Uvicorn's protocol of one HTTP connection. ``limits``, ``door``: those of its server; `http_protocol`
    makes a class that has them."""

    limits: ClientLimits
    door: Door
    conn: CheckedParser

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.conn = CheckedParser(self.limits.header_bytes)
        self._head: bytearray | None = None  # the first part of a head, until its end has come
        self._place: Place | None = None
        self._over = False  # the last answer is given: what still comes is thrown away

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio: the connection is there. The time of its first head runs since it was accepted."""
        super().connection_made(cast(asyncio.Transport, transport))
        self.deadline, self._place = self.door.pick_up(transport.get_extra_info("socket"))
        self.deadline.watch(self)

    # --- reading --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with bytes from the client: a head goes to the parser when it is whole."""
        if self._over:
            return
        if self.conn.their_state is h11.IDLE:
            self._take_head(data)
            return
        super().data_received(data)
        self._follow()

    def _follow(self) -> None:
        """Follow the parser: how much of a request has come?"""
        theirs, stage = self.conn.their_state, self.deadline.stage
        if self._over:
            return
        if theirs is h11.IDLE:  # the body of an answered request has ended
            self._await_next()
        elif stage is ConnectionStage.HEAD:
            self.deadline.enter(ConnectionStage.BODY if theirs is h11.SEND_BODY else ConnectionStage.SERVED)
        elif stage is ConnectionStage.BODY and theirs is not h11.SEND_BODY:
            self.deadline.enter(ConnectionStage.SERVED)

    def _take_head(self, data: bytes) -> None:
        """Take bytes of a head. If it is whole, decide about the request, and have it served."""
        if self.deadline.stage is ConnectionStage.IDLE:
            self.deadline.enter(ConnectionStage.HEAD)
        searched, more = 0, len(data)
        if self._head is not None:
            searched = max(0, len(self._head) - 2)
            self._head += data
            data = self._head  # type: ignore[assignment]
        found, most = HEAD_END.search(data, searched), self.limits.header_bytes
        if data[0] <= 0x20:  # it begins no request
            self._turn_away(HeadInvalid("What came is not a request of HTTP/1.1"))
        elif (len(data) if found is None else found.end()) > most:
            self._turn_away(
                HeadTooLarge(f"The request's head has more than {most} bytes: send smaller cookies")
            )
        elif found is None:
            self._head = self._head or bytearray(data)
            self.deadline.hold(more)
        else:
            self._head = None
            self._take_request(bytes(data), found.end())

    def _take_request(self, data: bytes, end: int) -> None:
        """Take a request of which the head, the first ``end`` bytes, is whole."""
        try:
            check_head(data[:end])
        except GatewayError as error:
            self._turn_away(error)
            return
        if self._place is None:
            found = self.door.decide(data, self.client, close=False)
            if isinstance(found, Refused):
                self._refuse(found)
                return
            self._place = found
        before, self.conn.checked = self.scope, True
        super().data_received(data)
        if self.scope is before:  # it was no valid request
            self._abandon()
            return
        if self._place is not None:
            cast("dict[str, object]", self.scope)[PLACE] = self._place
        if self.transport.get_protocol() is self:  # no WebSocket has the connection now
            self._follow()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Called when a request asks for a WebSocket: the connection is its protocol's from now on, which gets
        the head as it was parsed, and has what is left of the time to answer it."""
        if any(
            name == b"transfer-encoding" or (name == b"content-length" and int(value))
            for name, value in event.headers
        ):
            self._turn_away(HeadInvalid("The request for a WebSocket has a body: send none"))
            return
        self.connections.discard(self)
        opened = cast("type[LimitedWebSocket]", self.ws_protocol_class)(
            self.config, self.server_state, self.app_state
        )
        self.transport.set_protocol(opened)
        opened.take_over(self.transport, self.deadline, event, self.conn.trailing_data[0])

    # --- answers --------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Called when a request is answered: what comes next is the rest of its body, or the next request."""
        self._abandon()
        self.server_state.total_requests += 1
        if self._over:
            return
        if self.transport.is_closing():
            self.deadline.enter(ConnectionStage.CLOSING)
            return
        self.deadline.enter(ConnectionStage.REST)
        self.flow.resume_reading()
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.DONE:
            self.conn.start_next_cycle()
            self._await_next()

    def _await_next(self) -> None:
        """Nothing of a request is left: wait for the next one. What has come of it already goes the same way
        as what comes later."""
        self.deadline.enter(ConnectionStage.IDLE)
        behind = self.conn.trailing_data[0]
        if behind:
            self.conn = CheckedParser(self.limits.header_bytes)
            self._take_head(behind)

    def _refuse(self, refused: Refused) -> None:
        """Give the answer that refuses a whole request."""
        self.transport.write(refused.answer)
        if refused.close or self.transport.get_write_buffer_size():  # or the client reads no answers
            self._end()
        else:
            self.deadline.enter(ConnectionStage.IDLE)

    def send_400_response(self, msg: str) -> None:
        """Called when the parser can read no more: tells the client, if it has no answer yet, and ends."""
        self._turn_away(self.conn.fault or HeadInvalid("What came is not a request of HTTP/1.1"))

    def _turn_away(self, error: GatewayError) -> None:
        """End the connection because of ``error``, with an answer if none has begun. A request that is served
        counts as one that its client has left."""
        served = self.cycle is not None and not self.cycle.response_complete
        if not served or not self.cycle.response_started:
            scope = self.scope if served else {"path": "", "headers": (), "client": self.client}
            self.transport.write(whole_answer(refusal(error, cast("Scope", scope)), close=True))
        if served:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._end()

    def _end(self) -> None:
        """Close the connection behind what was written. As long as the client sends, its bytes are thrown away:
        a socket that is closed with unread bytes would discard the answer."""
        self._over, self._head = True, None
        self._abandon()
        if self.transport.can_write_eof():
            self.deadline.enter(ConnectionStage.REST)
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.deadline.enter(ConnectionStage.CLOSING)
            self.transport.close()

    # --- the end --------------------------------------------------------------------------------------------

    def overdue(self, stage: ConnectionStage) -> None:
        """Called when the time of a stage is over (`TimedConnection`): ends the connection. Half a head is
        answered; to a client that has sent nothing an answer would be one to its next request."""
        limits = self.limits
        if stage is ConnectionStage.HEAD and self._head is not None:
            told = f"The request's head did not end within {limits.header_seconds:g} s"
            self._turn_away(SlowSender(f"{told}: send it at once"))
        elif stage is ConnectionStage.BODY and (self.flow.read_paused or self.cycle.response_started):
            self.deadline.enter(stage)  # the application reads no body now
        elif stage is ConnectionStage.BODY:
            told = f"The request's body did not end within {limits.body_seconds:g} s"
            self._turn_away(SlowSender(f"{told}: send less, or faster"))
        elif stage is ConnectionStage.REST:
            self.transport.abort()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Called when the server ends: closes the connection, behind the answer to a request that is whole."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.close()
        elif cycle.response_started or self.conn.their_state is not h11.SEND_BODY:
            cycle.keep_alive = False
        else:
            self.transport.abort()  # it waits for the body

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: the connection is gone."""
        self._abandon()
        self.deadline.end()
        super().connection_lost(exc)
        let_go(self.transport)

    def _abandon(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.abandon()


def http_protocol(limits: ClientLimits, door: Door) -> type[LimitedHTTP]:
    """Make the protocol class of HTTP connections for uvicorn: `LimitedHTTP` with these limits and this
    door."""
    return type("BoundHTTP", (LimitedHTTP,), {"limits": limits, "door": door})
