"""One session's connection to the server: client events go out, one task receives what comes back.

    transport ─ receive task ─┬▶ the request that the event answers
                              └▶ a bounded queue ─▶ the reader: a turn, a run, or `chat.events`

The receive task also makes a lost connection again (`reconnect`). This file knows nothing of turns.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import anyio
import msgspec

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
from .frames.client import (
    ClientEvent,
    ItemDelete,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    ResponseSteer,
    TextClear,
)
from .frames.server import (
    ErrorDetails,
    ErrorEvent,
    ItemDeleted,
    ItemTruncated,
    ResponseCreated,
    ResponseDone,
    ServerEvent,
    TextCommitted,
)
from .multiplex import SessionTransport, SharedTransport
from .reconnect import Return, deadline
from .transport import Transport

MAX_QUEUED = 64
"""Events that wait for a slow reader. Beyond them the transport is not read, so that the server waits."""

_Event = TypeVar("_Event")


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A client event that waits for its answer. ``frame``: sent again where a restarted server lost the answer.

    ``position``: how many events had been queued when the answer came.
    """

    event_id: str
    matches: Callable[[ServerEvent], bool]
    answer: asyncio.Future[ServerEvent]
    frame: bytes | None = None
    position: int = 0

    def is_answered_by(self, event: ServerEvent) -> bool:
        """Whether the event is the answer, or an error about this request or about none in particular."""
        if self.answer.done():
            return False
        if isinstance(event, ErrorEvent):
            return event.error.event_id in (self.event_id, None)
        return self.matches(event)


class Connection:
    """Sends client events, answers requests and queues all other server events for one reader.

    With a `back` a lost connection is made again, by the receive task, when something next needs it: no event
    is read twice, and no request is served twice.
    """

    def __init__(self, transport: Transport, back: Return | None = None, running: Iterable[str] = ()) -> None:
        self.buffer = Buffer()
        self._transport = transport
        self._back = back
        self._closed = False
        self._prefix = f"client_{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self.refusals: deque[ErrorDetails] = deque(maxlen=64)
        """The last errors that were received."""
        self.commits: deque[TextCommitted] = deque(maxlen=64)
        """The last answers to commits of text that were received."""
        # the receive task, and what waits for it
        self._task: asyncio.Task[None] | None = None
        self._queue: deque[ServerEvent | ProtocolBroken] = deque()
        self._taken = 0  # events that have left the queue
        self._requests: list[_PendingRequest] = []
        self._senders: list[asyncio.Future[None]] = []  # their frames wait for a new connection
        self._arrival: asyncio.Future[None] | None = None  # the reader waits for an event
        self._room: asyncio.Future[None] | None = None  # the receive task waits for room in the queue
        self._reading = False
        self._read_on: asyncio.Event | None = None  # set when the reader has taken an event, or has stopped
        # the responses, as far as their events have been read
        self._created: dict[str, str] = {}  # ids of running responses, and of the events that asked for them
        self._cancels: set[str] = set()
        self._asked: list[str] = []  # ids of `response.create`s without an answer, in order
        self._begun: deque[str] = deque(maxlen=64)  # ids of those whose response has begun, in that order
        self._running: set[str] = set(running)  # ids of responses without their `response.done`
        self._inherited = frozenset(self._running)  # their events come again from the first
        self._ending: set[str] = set()  # ids of running responses that a cancel was sent for

    @property
    def busy(self) -> bool:
        """Whether a response runs or has been asked for."""
        return bool(self._asked or self._running)

    def runs(self, response_id: str) -> bool:
        """Whether this response's end has not been read yet."""
        return response_id in self._running

    def awaits(self, event_id: str) -> bool:
        """Whether the answer to this `response.create` has not been read yet."""
        return event_id in self._asked

    @property
    def handle(self) -> str | None:
        """Opens the session again; None where the connection cannot be made again."""
        return None if self._back is None else self._back.handle

    def way_back(self) -> Return:
        """How this session is resumed. Raises `ConnectionFailed` where it cannot be."""
        if self._back is None:
            raise ConnectionFailed("This client has no way to open a session by its handle")
        return self._back

    # --- sending --------------------------------------------------------------------------------------------

    async def send(self, event: ClientEvent) -> str:
        """Send one event, with an id if it has none; returns its id.

        Raises `ConnectionLost`, and a `FrameError`, without sending, for an event that cannot be encoded or
        whose id is too long for the server to repeat.
        """
        event_id = event.event_id or self._new_id()
        if len(event_id) > codec.MAX_EVENT_ID:
            raise FieldInvalid(f"An event's id has at most {codec.MAX_EVENT_ID} characters", "event_id")
        frame = codec.framed(msgspec.structs.replace(event, event_id=event_id))
        if isinstance(event, ResponseCancel):
            self._cancels.add(event_id)
            self._ending.update([event.response_id] if isinstance(event.response_id, str) else [])
        elif isinstance(event, ResponseCreate | ResponseSteer):
            self._asked.append(event_id)
        for request in self._requests:
            if request.event_id == event_id:
                request.frame = frame
        transport = self._transport
        if self._back is not None:
            self._back.sent(event_id, frame)
        try:
            await transport.send(frame)
        except ConnectionLost as lost:
            await self._returned(transport, lost)
        return event_id

    async def request(
        self,
        event: ClientEvent,
        answer: type[_Event],
        matches: Callable[[_Event], bool] = lambda event: True,
        meanwhile: Callable[[ServerEvent], object] | None = None,
    ) -> _Event:
        """Send one event and wait for its answer: the first of the type ``answer`` that ``matches``.

        Events that came before it go to ``meanwhile`` where no other task reads. Raises `ServerError` for a
        refusal, and what `send` raises.
        """
        event_id = event.event_id or self._new_id()
        with self._pending(event_id, lambda event: isinstance(event, answer) and matches(event)) as request:
            await self.send(msgspec.structs.replace(event, event_id=event_id))
            found = await self._answer(request, meanwhile)
        assert isinstance(found, answer)
        return found

    async def answer(self, event_id: str, matches: Callable[[ServerEvent], bool]) -> ServerEvent:
        """The answer to an event that was sent before: the first that ``matches``, queued already or to come.

        Raises `ServerError` for a refusal.
        """
        with self._pending(event_id, matches) as request:
            if self._back is not None:
                request.frame = self._back.frame_of(event_id)
            for index, event in enumerate(self._queue):
                if not isinstance(event, ProtocolBroken) and request.is_answered_by(event):
                    del self._queue[index]
                    self._resolve(request, event, self._taken + index)
                    self._take_in(event)
                    break
            return await self._answer(request, None)

    async def delete(self, item_id: str) -> None:
        """Take an item out of the conversation."""
        await self.request(ItemDelete(item_id=item_id), ItemDeleted, lambda event: event.item_id == item_id)

    async def committed(self, commit: str, call_id: str) -> TextCommitted | None:
        """The answer to the event ``commit``, which made a call's output an item; None: it was refused."""
        for known in self.commits:
            if known.call_id == call_id:
                return known
        if any(refusal.event_id == commit for refusal in self.refusals):
            return None
        answer = await self.answer(
            commit, lambda event: isinstance(event, TextCommitted) and event.call_id == call_id
        )
        assert isinstance(answer, TextCommitted)
        return answer

    async def truncate(
        self, item_id: str, end: int, meanwhile: Callable[[ServerEvent], object] | None = None
    ) -> ItemTruncated:
        """End a message of the model after `end` characters."""
        event = ItemTruncate(item_id=item_id, text_end=end)
        matches: Callable[[ItemTruncated], bool] = lambda event: event.item_id == item_id
        return await self.request(event, ItemTruncated, matches, meanwhile or (lambda _: None))

    # --- reading --------------------------------------------------------------------------------------------

    async def receive(self) -> ServerEvent:
        """The next event of a known type that answers no request.

        Errors about a cancel are skipped: the response had ended before. Raises `ConnectionLost`,
        `ProtocolBroken`, and `ChatBusy` while another task reads.
        """
        if self._reading:
            raise ChatBusy("Another task reads this chat's events")
        self._reading = True
        try:
            while True:
                while not self._queue:
                    await self._next_arrival()
                event = self._taken_next()
                if self._take_in(event):
                    return event
        finally:
            self._reading = False
            if self._read_on is not None:
                self._read_on.set()
                self._read_on = None

    async def others(self) -> None:
        """Wait until no other task reads."""
        while self._reading:
            await self._other_reader()

    async def quiet(self) -> None:
        """Cancel what runs and drop events until nothing runs."""
        await self.cut()
        while self.busy:
            await self.receive()

    async def ended(
        self,
        meanwhile: Callable[[ServerEvent], object] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until nothing runs or `enough` holds, whether or not another task reads.

        Events that are read here go to `meanwhile`.
        """
        while self.busy and not enough():
            if self._reading:
                await self._other_reader()
                continue
            event = await self.receive()
            if meanwhile is not None:
                meanwhile(event)

    async def make_way(self) -> None:
        """Cancel what runs, for a turn that is sent next: the server serves it when the running one has ended.

        Responses that were asked for and have not begun are waited for: the next `response.created` would be
        taken for the new turn's.
        """
        if self._reading or self._inherited & self._running:
            await self.quiet()
        await self.cut()
        while self._asked:
            await self.receive()

    async def cut(self) -> None:
        """Cancel what runs and what has been asked for."""
        if self._asked:
            await self.send(ResponseCancel())
        for response_id in self._running - self._ending:
            await self.send(ResponseCancel(response_id=response_id))

    async def fresh(self) -> None:
        """Take back what an earlier client of the session may have left in the buffer."""
        if self.buffer.stale:
            self.buffer.stale = False
            await self.send(TextClear())

    # --- the transport --------------------------------------------------------------------------------------

    async def share(self, session_id: str) -> SharedTransport:
        """The transport under this session, made ready to carry other sessions beside it."""
        if not isinstance(self._transport, SessionTransport):
            await self._stop()
            self._transport = SharedTransport(self._transport, session_id).session(session_id)
            if self._is_needed():
                self._start()
        return self._transport.connection

    async def aclose(self, *, cut: bool = False) -> None:
        """Close the transport. ``cut``: cancel running responses first, which else go on at the server."""
        self._closed = True
        try:
            with suppress(ConnectionLost):
                if cut:
                    await self.cut()
        finally:
            try:
                await self._stop()
            finally:
                self._fail(ConnectionLost("This connection was closed"))
                await self._transport.aclose()

    # --- the receive task -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the receive task where it does not run: at first, and after a loss that ended it."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._receive_all(), name="holdfast-receive")

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _receive_all(self) -> None:
        """Receive until the connection is lost while nothing needs it, or cannot be made again."""
        try:
            while True:
                try:
                    frame = await self._transport.receive()
                except ConnectionLost as lost:
                    if not self._is_needed():
                        return  # the next that needs it starts this task again
                    await self._come_back(lost)
                    continue
                self._arrived(frame)
                while self._is_full():
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
        except Exception as error:
            self._fail(error)

    def _arrived(self, frame: bytes) -> None:
        """Give one event to the request it answers, and to the reader."""
        try:
            event = codec.decode_server(frame)
        except FrameError as error:
            broken = ProtocolBroken(f"The server sent a frame this client cannot read: {error}")
            broken.__cause__ = error
            if self._requests:
                self._fail(broken)
            else:
                self._put(broken)
            return
        if self._back is not None:
            self._back.read(frame, event)
        if event is None:
            return
        if isinstance(event, ErrorEvent):
            self.refusals.append(event.error)
        elif isinstance(event, TextCommitted):
            self.commits.append(event)
        answered = False
        for request in self._requests:
            if request.is_answered_by(event):
                answered = True
                self._resolve(request, event, self._taken + len(self._queue))
                if not isinstance(event, ErrorEvent):
                    break
        if answered and not self._reading:
            self._take_in(event)
        else:
            self._put(event)

    def _put(self, event: ServerEvent | ProtocolBroken) -> None:
        self._queue.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _is_full(self) -> bool:
        """Whether to hold back the server; not while a request waits, as its answer may come later."""
        return len(self._queue) >= MAX_QUEUED and not self._requests and not self._senders

    def _is_needed(self) -> bool:
        """Whether a request, a sender or a reader with an empty queue waits."""
        return bool(self._requests or self._senders or (self._arrival is not None and not self._queue))

    def _fail(self, error: Exception) -> None:
        """Raise the error in all that wait."""
        waiting = [request.answer for request in self._requests]
        for future in (*waiting, *self._senders, self._arrival):
            if future is not None and not future.done():
                future.set_exception(error)

    async def _come_back(self, lost: ConnectionLost) -> None:
        """Replace the lost transport by a new one. Raises ``lost`` where that is not possible."""
        back = self._back
        if back is None or self._closed or not back.possible(lost):
            raise lost
        give_up = deadline(back.patience)
        for pause in back.patience.pauses():
            await anyio.sleep(pause)
            try:
                self._transport = await self._resumed(back)
                break
            except SessionLost:
                raise
            except (ConnectionFailed, ConnectionLost):
                if time.monotonic() > give_up:
                    raise lost from None
        for sender in self._senders:
            if not sender.done():
                sender.set_result(None)

    async def _resumed(self, back: Return) -> Transport:
        """A new transport on which all has been sent again that the server may lack."""
        transport, resumed = await back.connect()
        try:
            awaited = {one.event_id: one.frame for one in self._requests if not one.answer.done()}
            frames = [*self._cancelled_again(), *back.again(resumed, awaited)]
            sent: set[bytes] = set()
            while frames:
                for frame in frames:
                    await transport.send(frame)
                sent.update(frames)
                frames = back.since(sent)  # sent meanwhile over the lost transport
            return transport
        except BaseException:
            await transport.aclose()
            raise

    def _cancelled_again(self) -> list[bytes]:
        """A server that died before a cancelled response was over goes on with it, and refuses another."""
        frames = []
        for response_id in sorted(self._ending & self._running):
            event_id = self._new_id()
            self._cancels.add(event_id)
            frames.append(codec.encode(ResponseCancel(event_id=event_id, response_id=response_id)))
        return frames

    # --- waiting for it -------------------------------------------------------------------------------------

    @contextmanager
    def _pending(self, event_id: str, matches: Callable[[ServerEvent], bool]) -> Iterator[_PendingRequest]:
        """A request that is answered from now on, until the block is left."""
        self._check_open()
        request = _PendingRequest(event_id, matches, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._make_room()
        try:
            yield request
        finally:
            self._requests.remove(request)
            _forget(request.answer)

    async def _answer(
        self, request: _PendingRequest, meanwhile: Callable[[ServerEvent], object] | None
    ) -> ServerEvent:
        self._start()
        event = await request.answer
        while self._taken < request.position and self._queue and not self._reading:
            if meanwhile is not None:
                passed = self._taken_next()
                if self._take_in(passed):
                    meanwhile(passed)
            elif not self.busy:  # nothing runs that a reader would come for
                self._take_in(self._taken_next())
            else:
                break
        if isinstance(event, ErrorEvent):
            raise server_error(event.error)
        return event

    def _resolve(self, request: _PendingRequest, event: ServerEvent, position: int) -> None:
        request.position = position
        request.answer.set_result(event)
        if self._back is not None and not isinstance(event, ErrorEvent):
            self._back.arrived(request.event_id)

    async def _next_arrival(self) -> None:
        """Wait until there is an event in the queue."""
        self._check_open()
        self._arrival = asyncio.get_running_loop().create_future()
        self._start()
        try:
            await self._arrival
        finally:
            _forget(self._arrival)
            self._arrival = None

    def _taken_next(self) -> ServerEvent:
        """The first event of the queue. Raises `ProtocolBroken` where it could not be read."""
        event = self._queue.popleft()
        self._taken += 1
        if self._room is not None and len(self._queue) <= MAX_QUEUED // 2:
            self._make_room()
        if isinstance(event, ProtocolBroken):
            raise event
        return event

    def _make_room(self) -> None:
        """Let the receive task go on."""
        if self._room is not None:
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    async def _returned(self, transport: Transport, lost: ConnectionLost) -> None:
        """Wait until the receive task has replaced a transport that a sender found lost. Raises ``lost``."""
        if self._transport is not transport:
            return
        if self._back is None or self._closed or not self._back.possible(lost):
            raise lost
        sender: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._senders.append(sender)
        self._make_room()
        self._start()
        try:
            await sender
        finally:
            self._senders.remove(sender)
            _forget(sender)

    async def _other_reader(self) -> None:
        """Wait until the other task that reads has an event, or has stopped."""
        if self._read_on is None:
            self._read_on = asyncio.Event()
        await self._read_on.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost("This connection was closed")

    def _new_id(self) -> str:
        return f"{self._prefix}_{next(self._numbers)}"

    # --- the responses --------------------------------------------------------------------------------------

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
        """A response does not name its `response.create`: it is the first without an answer."""
        if self._asked:
            self._begun.append(self._asked.pop(0))

    def _note_arrivals(self, event: ServerEvent) -> None:
        """Tell `back` what need not be sent again: events refused, and those up to what a response ends."""
        if self._back is None:
            return
        match event:
            case ErrorEvent(error=error) if error.event_id:
                self._back.arrived(error.event_id)
            case ResponseCreated(response=response) if self._asked:
                self._created[response.id] = self._asked[0]
            case ResponseDone(response=response) if response.id in self._created:
                self._back.arrived(self._created.pop(response.id))


def server_error(details: ErrorDetails) -> ServerError:
    """The exception for an error event."""
    return ServerError(
        details.message,
        code=details.code,
        kind=details.type,
        param=details.param,
        event_id=details.event_id,
    )


def _forget(future: asyncio.Future[_Event]) -> None:
    """Nothing awaits the future any more: an error in it is not logged as unread."""
    if future.done() and not future.cancelled():
        future.exception()
