"""Events over one transport: sent with ids of their own, read by one reader at a time.

Keeps count of the responses that run, so that those nobody reads can be ended. Knows nothing of turns.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import anyio
import msgspec
from anyio import BusyResourceError, ResourceGuard

from .buffer import Buffer
from .errors import (
    ChatBusy,
    ConnectionFailed,
    ConnectionLost,
    FieldInvalid,
    FrameError,
    ProtocolBroken,
    ServerError,
    SessionLost,
)
from .frames import codec
from .frames.client import ClientEvent, ItemDelete, ResponseCancel, ResponseCreate, TextClear
from .frames.server import (
    ErrorDetails,
    ErrorEvent,
    ItemDeleted,
    ResponseCreated,
    ResponseDone,
    ServerEvent,
    TextCommitted,
)
from .frames.verbs import ItemTruncate, ItemTruncated, ResponseSteer
from .multiplex import Line, SharedConnection
from .reconnect import Return, deadline
from .transport import Transport


@dataclass(slots=True, eq=False)
class _Wanted:
    """An answer that somebody waits for; ``frame`` asks for it again."""

    event_id: str
    wanted: Callable[[ServerEvent], bool]
    frame: bytes | None = None
    found: ServerEvent | None = None

    def takes(self, event: ServerEvent) -> bool:
        """Keep the event if it is the answer, or the refusal."""
        if self.found is None:
            refused = isinstance(event, ErrorEvent) and event.error.event_id in (self.event_id, None)
            if refused or (not isinstance(event, ErrorEvent) and self.wanted(event)):
                self.found = event
                return True
        return False


class Connection:
    """Sends client events and receives server events.

    With a way `back` a lost connection is made again behind both: what was read is not read twice, what was
    sent is not served twice.
    """

    def __init__(self, transport: Transport, back: Return | None = None, running: Iterable[str] = ()) -> None:
        self.buffer = Buffer()
        self._transport = transport
        self._back = back
        self._returning = anyio.Lock()
        self._closed = False
        self._wanted: list[_Wanted] = []
        self.refusals: deque[ErrorDetails] = deque(maxlen=64)
        """The latest, whoever read them."""
        self.commits: deque[TextCommitted] = deque(maxlen=64)
        """The same of answers to commits."""
        self._aside: deque[ServerEvent] = deque()  # read, and waiting for the next reader
        self._turned = anyio.Event()  # set when a reader leaves, or has found what another waits for
        self._prefix = f"client_{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._created: dict[str, str] = {}  # ids of running responses, and of what asked for them
        self._cancels: set[str] = set()
        self._asked: list[str] = []  # ids of `response.create`s not answered yet, in order
        self._begun: deque[str] = deque(maxlen=64)  # of those whose response has begun, by their order
        self._running: set[str] = set(running)  # ids of responses without their `response.done`
        self._inherited = frozenset(self._running)  # their beginning is told again
        self._ending: set[str] = set()  # of those that run, the ones that were told to end
        self._reading = ResourceGuard("reading from")
        self._read = False  # whether a task reads now
        self._fetching = False  # whether one that waits for an answer does

    @property
    def busy(self) -> bool:
        """Whether a response runs or has been asked for."""
        return bool(self._asked or self._running)

    def runs(self, response_id: str) -> bool:
        """Whether this response's end has not been read yet."""
        return response_id in self._running

    def awaits(self, event_id: str) -> bool:
        """Whether this `response.create` has not been answered yet."""
        return event_id in self._asked

    @property
    def handle(self) -> str | None:
        """What opens the session again."""
        return None if self._back is None else self._back.handle

    def way_back(self) -> Return:
        """How this session is come back to. Raises `ConnectionFailed` where there is no way."""
        if self._back is None:
            raise ConnectionFailed("This client has no way to open a session by its handle")
        return self._back

    def share(self, session_id: str) -> SharedConnection:
        """Make room on the connection for other sessions; while nobody reads."""
        if self._read:
            raise ChatBusy("A turn is being read on this chat: it cannot share its connection now")
        if not isinstance(self._transport, Line):
            self._transport = SharedConnection(self._transport, session_id).line(session_id)
        return self._transport.connection

    async def send(self, event: ClientEvent) -> str:
        """Send one event, with an id if it has none; returns its id.

        Raises `ConnectionLost`, and a `FrameError` where the event can be no frame, or has an id so long that
        no answer would name it: then nothing was sent.
        """
        event_id = event.event_id or f"{self._prefix}_{next(self._numbers)}"
        if len(event_id) > codec.MAX_EVENT_ID:
            raise FieldInvalid(f"An event's id has at most {codec.MAX_EVENT_ID} characters", "event_id")
        frame = codec.framed(msgspec.structs.replace(event, event_id=event_id))  # before it counts as asked
        if isinstance(event, ResponseCancel):
            self._cancels.add(event_id)
            self._ending.update([event.response_id] if isinstance(event.response_id, str) else [])
        elif isinstance(event, ResponseCreate | ResponseSteer):
            self._asked.append(event_id)
        transport = self._transport
        if self._back is not None:
            self._back.sent(event_id, frame)
        try:
            await transport.send(frame)
        except ConnectionLost as lost:
            await self._come_back(transport, lost)  # it is sent again with all that may be lost
        return event_id

    async def receive(self) -> ServerEvent:
        """The next event that this version knows.

        Errors about a cancel are passed over: it came too late and harmed nothing. Raises `ConnectionLost`,
        `ProtocolBroken`, and `ChatBusy` while another task reads.
        """
        try:
            with self._reading:
                self._read = True
                try:
                    while True:
                        event = await self._next()
                        if event is not None and self._take_in(event):
                            return event
                finally:
                    self._read = False
                    self._turn()
        except BusyResourceError:
            raise ChatBusy("Another task reads this chat's events") from None

    async def answer(
        self,
        event_id: str,
        wanted: Callable[[ServerEvent], bool],
        meanwhile: Callable[[ServerEvent], object] | None = None,
    ) -> ServerEvent:
        """The first event that is `wanted`, read here or by the task that reads now.

        What is read here until then is given to `meanwhile`; without it, it is put aside for who reads next
        if a response runs. Raises `ServerError` when the event sent was refused.
        """
        frame = None if self._back is None else self._back.frame_of(event_id)
        waiting = _Wanted(event_id, wanted, frame)
        self._wanted.append(waiting)
        try:
            while waiting.found is None:
                if self._read or self._fetching:
                    await self._turned.wait()
                elif meanwhile is not None:
                    meanwhile(await self.receive())
                else:
                    await self._put_aside()
            if isinstance(waiting.found, ErrorEvent):
                raise server_error(waiting.found.error)
            if self._back is not None:
                self._back.arrived(event_id)
            return waiting.found
        finally:
            self._wanted.remove(waiting)

    async def delete(self, item_id: str) -> None:
        """Take an item out of the conversation."""
        sent = await self.send(ItemDelete(item_id=item_id))
        await self.answer(sent, lambda event: isinstance(event, ItemDeleted) and event.item_id == item_id)

    async def committed(self, commit: str, call_id: str) -> TextCommitted | None:
        """The answer to the event ``commit``, by which a call's output became an item; None: it was refused."""
        for known in self.commits:
            if known.call_id == call_id:
                return known
        if any(refusal.event_id == commit for refusal in self.refusals):
            return None
        told = await self.answer(
            commit, lambda event: isinstance(event, TextCommitted) and event.call_id == call_id
        )
        assert isinstance(told, TextCommitted)
        return told

    async def truncate(
        self, item_id: str, end: int, meanwhile: Callable[[ServerEvent], object] | None = None
    ) -> ItemTruncated:
        """End a message of the model after `end` characters."""
        sent = await self.send(ItemTruncate(item_id=item_id, text_end=end))
        done = await self.answer(
            sent,
            lambda event: isinstance(event, ItemTruncated) and event.item_id == item_id,
            meanwhile or (lambda _: None),
        )
        assert isinstance(done, ItemTruncated)
        return done

    async def others(self) -> None:
        """Wait until no other task reads."""
        while self._read:
            await self._turned.wait()

    async def fresh(self) -> None:
        """Take back what an earlier client of the session may have left in the buffer."""
        if self.buffer.stale:
            self.buffer.stale = False
            await self.send(TextClear())

    async def _put_aside(self) -> None:
        """Read one event, and keep it for who reads next; where nothing runs, nobody will."""
        self._fetching = True
        try:
            event = await self._incoming()
        finally:
            self._fetching = False
            self._turn()
        if event is not None:
            if any(waiting.found is event for waiting in self._wanted):
                self._take_in(event)
            else:
                self._aside.append(event)
        while self._aside and not self.busy and not self._read:
            self._take_in(self._aside.popleft())

    async def _next(self) -> ServerEvent | None:
        """The next event for who reads: one put aside, or else one that comes."""
        while self._fetching and not self._aside:
            await self._turned.wait()
        return self._aside.popleft() if self._aside else await self._incoming()

    async def _incoming(self) -> ServerEvent | None:
        """The next event; who waits for it has it."""
        event = self._decoded(await self._frame())
        if isinstance(event, ErrorEvent):
            self.refusals.append(event.error)
        elif isinstance(event, TextCommitted):
            self.commits.append(event)
        for waiting in self._wanted if event is not None else ():
            if event is not None and waiting.takes(event):
                self._turn()
        return event

    def _turn(self) -> None:
        self._turned.set()
        self._turned = anyio.Event()

    async def quiet(self) -> None:
        """Cancel what runs and read on until nothing does, dropping what still comes."""
        await self.cut()
        while self.busy:
            await self.receive()

    async def ended(
        self,
        meanwhile: Callable[[ServerEvent], object] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until nothing runs, or it is `enough`, whoever reads; what is read here goes to `meanwhile`."""
        while self.busy and not enough():
            if self._read:
                await self._turned.wait()
                continue
            event = await self.receive()
            if meanwhile is not None:
                meanwhile(event)

    async def make_way(self) -> None:
        """Cancel what runs, for a turn that is sent next: the server serves it when that has ended.

        What was not answered at all is waited for: its answer would be taken for the turn's.
        """
        if self._read or self._inherited & self._running:
            await self.quiet()
        await self.cut()
        while self._asked:
            await self.receive()

    async def aclose(self, *, cut: bool = False) -> None:
        """End the connection. ``cut``: and what runs, which would go on until the session's lease is over."""
        self._closed = True
        try:
            with suppress(ConnectionLost):
                if cut:
                    await self.cut()
        finally:
            await self._transport.aclose()

    async def cut(self) -> None:
        """Cancel what runs and what has been asked for."""
        if self._asked:
            await self.send(ResponseCancel())
        for response_id in self._running - self._ending:
            await self.send(ResponseCancel(response_id=response_id))

    async def _frame(self) -> bytes:
        while True:
            transport = self._transport
            try:
                return await transport.receive()
            except ConnectionLost as lost:
                await self._come_back(transport, lost)

    async def _come_back(self, transport: Transport, lost: ConnectionLost) -> None:
        """Put another transport in the place of this one. Raises ``lost`` where there is no way back."""
        async with self._returning:
            back = self._back
            if self._transport is not transport:
                return  # the other side of this connection has found the way already
            if back is None or self._closed or not back.possible(lost):
                raise lost
            give_up = deadline(back.patience)
            for pause in back.patience.pauses():
                await anyio.sleep(pause)
                try:
                    self._transport = await self._resumed(back)
                    return
                except SessionLost:
                    raise
                except (ConnectionFailed, ConnectionLost):
                    if time.monotonic() > give_up:
                        raise lost from None

    async def _resumed(self, back: Return) -> Transport:
        transport, resumed = await back.connect()
        awaited = {waiting.event_id: waiting.frame for waiting in self._wanted if waiting.found is None}
        frames = [*self._cancelled_again(), *back.again(resumed, awaited)]
        sent: set[bytes] = set()
        while frames:
            for frame in frames:
                await transport.send(frame)
            sent.update(frames)
            frames = back.since(sent)  # given meanwhile to the connection that is lost
        return transport

    def _cancelled_again(self) -> list[bytes]:
        """A server that died before a cancelled response was over goes on with it, and refuses another."""
        frames = []
        for response_id in sorted(self._ending & self._running):
            event_id = f"{self._prefix}_{next(self._numbers)}"
            self._cancels.add(event_id)
            frames.append(codec.encode(ResponseCancel(event_id=event_id, response_id=response_id)))
        return frames

    def _take_in(self, event: ServerEvent) -> bool:
        """Note what the event says of responses; whether it is for the reader."""
        self._note_arrivals(event)
        match event:
            case ErrorEvent(error=error) if error.event_id in self._cancels:
                self._cancels.discard(error.event_id or "")
                return False
            case ErrorEvent(error=error) if error.event_id in self._asked:
                self._asked.remove(error.event_id or "")
            case ErrorEvent(error=error) if error.event_id in self._begun:
                self._begun.remove(error.event_id or "")  # it was a later one's response that had begun
                self._begin()
            case ResponseCreated(response=response):
                self._begin()
                self._running.add(response.id)
            case ResponseDone(response=response):
                self._running.discard(response.id)
                self._ending.discard(response.id)
        return True

    def _begin(self) -> None:
        """A response does not say what asked for it: the first that was not answered."""
        if self._asked:
            self._begun.append(self._asked.pop(0))

    def _note_arrivals(self, event: ServerEvent) -> None:
        """Which client events need not be sent again: those refused, and those up to what a response ends."""
        if self._back is None:
            return
        match event:
            case ErrorEvent(error=error) if error.event_id:
                self._back.arrived(error.event_id)
            case ResponseCreated(response=response) if self._asked:
                self._created[response.id] = self._asked[0]
            case ResponseDone(response=response) if response.id in self._created:
                self._back.arrived(self._created.pop(response.id))

    def _decoded(self, frame: bytes) -> ServerEvent | None:
        try:
            event = codec.decode_server(frame)
            if self._back is not None:
                self._back.read(frame, event)
            return event
        except FrameError as error:
            raise ProtocolBroken(f"The server sent a frame this client cannot read: {error}") from error


def server_error(details: ErrorDetails) -> ServerError:
    """The exception for an error event."""
    return ServerError(
        details.message,
        code=details.code,
        kind=details.type,
        param=details.param,
        event_id=details.event_id,
    )
