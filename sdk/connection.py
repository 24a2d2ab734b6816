"""One session's connection to the server: client events go out, one task receives what comes back.

    transport ─ receive task ─┬▶ the request that the event answers
                              └▶ a bounded queue ─▶ the reader: a turn, a run, or `chat.events`

The receive task also makes a lost connection again (`reconnect`).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

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
from .frames.client import ClientEvent, ItemDelete, ItemTruncate, ResponseCancel, TextClear
from .frames.server import ErrorDetails, ErrorEvent, ItemDeleted, ItemTruncated, ServerEvent, TextCommitted
from .multiplex import SessionTransport, SharedTransport
from .reconnect import Resumption
from .responses import RunningResponses
from .transport import Transport

MAX_QUEUED = 64
"""Events that wait for a slow reader. Beyond them the transport is not read, so that the server waits."""

_Event = TypeVar("_Event")


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A client event that waits for its answer. ``frame``: sent again where a restarted server lost the
    answer. ``position``: how many events had been queued when the answer came."""

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

    With a `resumption` the receive task makes a lost connection again when something next needs it: no event is
    read twice, and no request is served twice. ``running``: ids of responses that run at the server already.
    """

    def __init__(
        self, transport: Transport, resumption: Resumption | None = None, running: Iterable[str] = ()
    ) -> None:
        self.buffer = InputBuffer()
        self._transport = transport
        self._resumption = resumption
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
        self.responses = RunningResponses(running)

    @property
    def handle(self) -> str | None:
        """Opens the session again; None where the connection cannot be made again."""
        return None if self._resumption is None else self._resumption.handle

    def resumption(self) -> Resumption:
        """How this session is resumed. Raises `ConnectionFailed` where it cannot be."""
        if self._resumption is None:
            raise ConnectionFailed("This client cannot open a session by its handle")
        return self._resumption

    # --- sending --------------------------------------------------------------------------------------------

    async def send(self, event: ClientEvent) -> str:
        """Send one event, with an id if it has none; returns its id.

        Raises `ConnectionLost`, and a `FrameError`, without sending, for an event that cannot be encoded or
        has an id that is too long.
        """
        event_id = event.event_id or self._new_id()
        if len(event_id) > codec.MAX_EVENT_ID:
            raise FieldInvalid(f"An event's id has at most {codec.MAX_EVENT_ID} characters", "event_id")
        frame = codec.framed(msgspec.structs.replace(event, event_id=event_id))
        self.responses.sent(event_id, event)
        for request in self._requests:
            if request.event_id == event_id:
                request.frame = frame
        transport = self._transport
        if self._resumption is not None:
            self._resumption.sent(event_id, frame)
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
        Raises `ServerError` for a refusal."""
        with self._pending(event_id, matches) as request:
            if self._resumption is not None:
                request.frame = self._resumption.frame_of(event_id)
            for index, event in enumerate(self._queue):
                if not isinstance(event, ProtocolBroken) and request.is_answered_by(event):
                    del self._queue[index]
                    self._resolve(request, event, self._taken + index)
                    self._take_in(event)
                    break
            return await self._answer(request, None)

    async def delete(self, item_id: str) -> None:
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
        while self.responses.busy:
            await self.receive()

    async def ended(
        self,
        meanwhile: Callable[[ServerEvent], object] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until nothing runs or `enough` holds, also while another task reads; `meanwhile` gets events."""
        while self.responses.busy and not enough():
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
        if self._reading or self.responses.inherited:
            await self.quiet()
        await self.cut()
        while self.responses.asked:
            await self.receive()

    async def cut(self) -> None:
        """Cancel what runs and what has been asked for."""
        if self.responses.asked:
            await self.send(ResponseCancel())
        for response_id in self.responses.running - self.responses.ending:
            await self.send(ResponseCancel(response_id=response_id))

    async def clear_leftover(self) -> None:
        """Clear the input buffer of what an earlier client of the session may have left in it."""
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
        if self._resumption is not None:
            self._resumption.read(frame, event)
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
        waiting = [request.answer for request in self._requests]
        for future in (*waiting, *self._senders, self._arrival):
            if future is not None and not future.done():
                future.set_exception(error)

    async def _come_back(self, lost: ConnectionLost) -> None:
        """Replace the lost transport by a new one. Raises ``lost`` where that is not possible."""
        resumption = self._resumption
        if resumption is None or self._closed or not resumption.possible(lost):
            raise lost
        try:
            self._transport = await resumption.patience.retry(partial(self._resumed, resumption), pause=True)
        except SessionLost:
            raise
        except (ConnectionFailed, ConnectionLost):
            raise lost from None
        for sender in self._senders:
            if not sender.done():
                sender.set_result(None)

    async def _resumed(self, resumption: Resumption) -> Transport:
        """A new transport on which all has been sent again that the server may lack."""
        transport, resumed = await resumption.connect()
        try:
            awaited = {one.event_id: one.frame for one in self._requests if not one.answer.done()}
            frames = [*self._cancelled_again(), *resumption.again(resumed, awaited)]
            sent: set[bytes] = set()
            while frames:
                for frame in frames:
                    await transport.send(frame)
                sent.update(frames)
                frames = resumption.since(sent)  # sent meanwhile over the lost transport
            return transport
        except BaseException:
            await transport.aclose()
            raise

    def _cancelled_again(self) -> list[bytes]:
        """A server that died before a cancelled response was over goes on with it, and refuses another."""
        frames = []
        for response_id in sorted(self.responses.ending & self.responses.running):
            cancel = ResponseCancel(event_id=(event_id := self._new_id()), response_id=response_id)
            self.responses.sent(event_id, cancel)
            frames.append(codec.encode(cancel))
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
            elif not self.responses.busy:  # nothing runs that a reader would come for
                self._take_in(self._taken_next())
            else:
                break
        if isinstance(event, ErrorEvent):
            raise server_error(event.error)
        return event

    def _resolve(self, request: _PendingRequest, event: ServerEvent, position: int) -> None:
        request.position = position
        request.answer.set_result(event)
        if self._resumption is not None and not isinstance(event, ErrorEvent):
            self._resumption.arrived(request.event_id)

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
        if self._room is not None:
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    async def _returned(self, transport: Transport, lost: ConnectionLost) -> None:
        """Wait until the receive task has replaced a transport that a sender found lost. Raises ``lost``."""
        if self._transport is not transport:
            return
        if self._resumption is None or self._closed or not self._resumption.possible(lost):
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

    def _take_in(self, event: ServerEvent) -> bool:
        """Note what the event says of responses; whether it is for the reader."""
        if self._resumption is not None and (event_id := self.responses.acknowledged(event)):
            self._resumption.arrived(event_id)
        return self.responses.read(event)

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


def server_error(details: ErrorDetails) -> ServerError:
    return ServerError(
        details.message, code=details.code, kind=details.type, param=details.param, event_id=details.event_id
    )


def _forget(future: asyncio.Future[_Event]) -> None:
    """Nothing awaits the future any more: an error in it is not logged as unread."""
    if future.done() and not future.cancelled():
        future.exception()


class InputBuffer:
    """The owner of the session's one input text buffer: a message that is typed, or a tool's streamed output.
    A tool's output gives way to a message. ``stale``: an earlier client may have left text in the buffer."""

    def __init__(self) -> None:
        self.stale = False
        self._owner: object | None = None
        self._give_way: Callable[[], Awaitable[None]] | None = None

    def lend(self, owner: object, give_way: Callable[[], Awaitable[None]]) -> bool:
        """Give it to `owner` unless another has it; a later `claim` awaits `give_way` first."""
        if self._owner not in (None, owner):
            return False
        self._owner, self._give_way = owner, give_way
        return True

    async def claim(self, owner: object) -> None:
        """Give it to `owner`, after the one it was lent to has given way."""
        if self._owner is not owner:
            give_way, self._give_way = self._give_way, None
            self._owner = owner
            if give_way is not None:
                await give_way()

    def release(self, owner: object) -> None:
        """Free the buffer, if `owner` has it."""
        if self._owner is owner:
            self._owner = self._give_way = None
