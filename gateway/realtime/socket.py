"""One client's socket: it passes client events to the session that they name, and that session's events to the
client.

A socket has a session of its own, and further ones that the client attached; sessions outlive it. If the client
reads slowly, its replies wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from msgspec import UNSET

from ...kvstore.log_lines import about, about_session
from ...sdk.errors import FrameError
from ...sdk.frames import codec
from ...sdk.frames.client import ClientEvent, SessionAttach, SessionDetach, SessionResume
from ...sdk.frames.server import ErrorEvent, SessionDetached
from ...sessions.conversation.items import new_id
from ...sessions.errors import SessionError, SessionUnknown, StorageUnavailable
from ..access.auth import ClientIdentity, TurnCaller
from ..errors import (
    GatewayError,
    SessionRequired,
    error_details,
    wire_error,
)
from ..live.client_socket import ClientSocket, SocketEnd
from ..live.session import log_refusal
from ..net.channel import Channel
from ..net.outbox import Outbox, SessionOutbox
from ..settings import ClientLimits
from .session import RealtimeFace, RealtimeSession

log = logging.getLogger(__name__)


class AttachedSession:
    """A session that the client attached to its socket besides the socket's own one. To `LiveSessions` it is
    the session's connection. ``outbox``: through which its events go to the socket. ``caller``: the socket's
    client. ``gone`` is called with this object, and why, when the session has moved to another connection, or
    was deleted."""

    def __init__(
        self,
        outbox: SessionOutbox,
        caller: TurnCaller,
        gone: Callable[[AttachedSession, GatewayError], None],
    ) -> None:
        self.outbox = outbox
        self.caller = caller
        self.session: RealtimeSession | None = None
        self._gone = gone

    def taken(self, why: GatewayError) -> None:
        """Called when the session is not on this socket any more; passes it to the callback ``gone``."""
        self._gone(self, why)


class RealtimeSocket(ClientSocket):
    """Serves one client on one WebSocket. The socket has a session of its own, for which this object is the
    `SessionConnection`, and those that the client attached, each with an `AttachedSession`. ``channel``: the
    connection. ``face`` opens and resumes sessions."""

    def __init__(
        self, channel: Channel, face: RealtimeFace, client: ClientIdentity, limits: ClientLimits
    ) -> None:
        super().__init__(channel, client, limits, Outbox(limits, channel.send_now))
        self._face = face
        self._own: RealtimeSession | None = None
        self._own_outbox = self._new_outbox()
        self._attached: dict[str, AttachedSession] = {}
        self._attaching = False

    @property
    def caller(self) -> TurnCaller:
        """The client for which the turns of its sessions run."""
        return self.client.caller

    def taken(self, why: GatewayError) -> None:
        """Called when the socket's own session is not on this socket any more: it has moved to another socket,
        or was deleted. If other sessions are attached, the client is sent `session.detached`; otherwise the
        socket closes, because of ``why``. While a `session.attach` is served neither happens, because it may be
        attaching that same session."""
        own, self._own = self._own, None
        if self._attaching:
            return
        if own is not None and self._attached:
            self._tell_detached(own.live.id, why)
        else:
            self.leave(why)

    async def begin(self) -> None:
        """Open the socket's own session, unless the client comes back to resume one."""
        if self.client.resume:
            return
        try:
            own = self._own = self._face.open(self, self.caller.owner, self.caller.salt)
        except SessionError as error:
            await self._turn_away(error)
            raise SocketEnd(wire_error(error)) from None
        own.live.resumable = self.client.resumable
        self._own_outbox.session_id = own.live.id
        own.event_log.open_to(self._own_outbox)

    def end(self) -> None:
        """All sessions leave the socket."""
        self._let_go()
        for attached in list(self._attached.values()):
            self._dismiss(attached)

    async def _turn_away(self, error: SessionError) -> None:
        """Send the `error` event that says why the client gets no session, as the only frame of this socket,
        and log it. Waits at most ``close_seconds``."""
        code = wire_error(error).code
        log.warning("session refused", extra=about("", client=self.client.address or None, code=code))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_seconds):
                await self._channel.send(_alone(error))

    def _let_go(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._face.sessions.left(own.live, self)

    # --- the one way in -------------------------------------------------------------------------------------

    async def serve(self, frame: bytes | str) -> None:
        """Serve one client event."""
        await self._take(codec.decode_client(frame, self._limits.frame_bytes))

    def refuse_frame(self, frame: bytes | str, error: FrameError) -> None:
        """Send an `error` event."""
        self._refuse(error)

    async def _take(self, event: ClientEvent) -> None:
        """Serve `session.resume`, `session.attach` and `session.detach` here; give every other event to its
        session."""
        if isinstance(event, SessionResume | SessionAttach):
            try:
                await (self._resume(event) if isinstance(event, SessionResume) else self._attach(event))
            except SessionError as error:
                self._refuse(error, event.event_id)
            except Exception as error:  # a defect in opening one session ends no other on this socket
                log.exception("%s failed", type(event).__name__, extra=about_session(event.session_id or ""))
                self._refuse(error, event.event_id)
        elif isinstance(event, SessionDetach):
            self._detach(event)
        elif (session := self._addressed(event)) is not None:
            await session.take(event)
        elif event.session_id is not None:
            unknown = SessionUnknown("This socket has no such session", param="session_id")
            self._refuse(unknown, event.event_id)
        else:
            self._refuse(SessionRequired("Send session.resume first"), event.event_id)

    def _addressed(self, event: ClientEvent) -> RealtimeSession | None:
        """The session on this socket that an event names; the socket's own if it names none. None if that
        session is not on this socket."""
        session_id = event.session_id
        if session_id is None or (self._own is not None and session_id == self._own.live.id):
            return self._own
        attached = self._attached.get(session_id)
        return None if attached is None else attached.session

    def _refuse(self, error: Exception, event_id: str | None = None) -> None:
        """Send the client an `error` event for what was refused: through the event log of the socket's own
        session, in order with its other events; without a session, directly."""
        if self._own is not None:
            self._own.refuse(error, event_id)
        else:
            log_refusal("", error)
            self.outbox.post([_alone(error, event_id)])

    # --- which sessions are here ----------------------------------------------------------------------------

    async def _resume(self, event: SessionResume) -> None:
        """Serve `session.resume`: make the session that its handle opens the socket's own, instead of the one
        before. Send the client `session.resumed` and the events that it missed. Raises a `SessionError`; the
        socket may have no session of its own then."""
        session = await self._face.resume(self, event.handle, self.caller.owner, self.client.former_owner)
        if session is not self._own:
            self._let_go()
            self._own = session
        session.live.resumable = True
        try:
            await self._durable(session)
            if self._own is session:  # no other socket resumed it meanwhile
                self._own_outbox = self._new_outbox(session.live.id)  # the event log abandons the old one
                session.resume(self._own_outbox, event.last_event)
        except SessionError:
            self._let_go()
            raise

    async def _attach(self, event: SessionAttach) -> None:
        attached = AttachedSession(self._new_outbox(), self.caller, self._lost)
        self._attaching = True
        try:
            session = await self._face.resume(
                attached, event.session, self.caller.owner, self.client.former_owner
            )
        finally:
            self._attaching = False
        attached.session, attached.outbox.session_id = session, session.live.id
        self._attached[session.live.id] = attached
        self.outbox.shared = session.live.resumable = True
        try:
            await self._durable(session)
            if self._attached.get(session.live.id) is attached:
                session.resume(attached.outbox, event.last_event)
        except SessionError:
            self._dismiss(attached)
            raise

    def _detach(self, event: SessionDetach) -> None:
        session = self._addressed(event)
        if session is None:
            self._refuse(SessionUnknown("This socket has no such session"), event.event_id)
            return
        if session is self._own:
            self._let_go()
        else:
            self._dismiss(self._attached[session.live.id])
        self._tell_detached(session.live.id)

    def _dismiss(self, attached: AttachedSession) -> None:
        """Take an attached session off this socket. It stays in memory for a while, in which a client with its
        handle can resume it."""
        session = attached.session
        if session is not None and self._attached.pop(session.live.id, None) is not None:
            self._face.sessions.left(session.live, attached)

    def _lost(self, attached: AttachedSession, why: GatewayError) -> None:
        """Called when an attached session has moved to another connection, or was deleted: sends the client
        `session.detached`."""
        session = attached.session
        if session is not None and self._attached.pop(session.live.id, None) is not None:
            self._tell_detached(session.live.id, why)

    def _tell_detached(self, session_id: str, why: GatewayError | None = None) -> None:
        reason = UNSET if why is None else wire_error(why).code
        told = SessionDetached(event_id=new_id("event"), session_id=session_id, reason=reason)
        self.outbox.post([codec.encode(told)])

    def _new_outbox(self, session_id: str = "") -> SessionOutbox:
        return SessionOutbox(self.outbox, session_id)

    async def _durable(self, session: RealtimeSession) -> None:
        """Wait until the journal has the session's new handle; only then may the client see it. Raises
        ``StorageUnavailable`` if that takes longer than ``close_seconds``, or the journal is closed."""
        journal = session.session.log
        ticket = journal.sync()
        if ticket is not None:
            await asyncio.wait([ticket], timeout=self._limits.close_seconds)
            if not ticket.done():
                raise journal.fault or StorageUnavailable("The journal does not answer")
            ticket.result()


def _alone(error: Exception, event_id: str | None = None) -> bytes:
    """An encoded `error` event for ``error`` that belongs to no session. ``event_id``: of the client event that
    was refused; None if it had none."""
    return codec.encode(ErrorEvent(event_id=new_id("event"), error=error_details(error, event_id)))
