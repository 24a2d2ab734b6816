"""One session's connection to the server: client events go out, one task receives what comes back.

    transport ─ receive task ─┬▶ the request that the event answers
                              └▶ a bounded queue ─▶ the reader: a turn, a run, or `chat.events`

The receive task also makes a lost connection again (`reconnect`).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from ..errors import (
    DELETED,
    ChatBusy,
    ConnectionFailed,
    ConnectionFault,
    ConnectionLost,
    FieldInvalid,
    FrameError,
    ProtocolBroken,
    ServerError,
    SessionLost,
)
from ..frames import codec
from ..frames.client import ClientEvent, ItemDelete, ResponseCancel, ResponseCreate, TextClear
from ..frames.server import (
    ErrorDetails,
    ErrorEvent,
    ItemDeleted,
    OutputFrame,
    ResponseCreated,
    ResponseDone,
    ServerEvent,
    SessionDetached,
    TextCommitted,
)
from .multiplex import SessionTransport, SharedTransport
from .reconnect import Resumption
from .responses import ASIDE, RunningResponses, labelled
from .transport import Transport

MAX_QUEUED = 64
"""At most so many events wait for a slow reader; then the transport is not read further, so that the server
waits."""

_Event = TypeVar("_Event")
_Fault = TypeVar("_Fault", bound=Exception)


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A client event that waits for its answer. ``matches``: whether a server event is that answer. ``frame``:
    the event's bytes, sent again if a restarted server lost the answer; None until it is sent. ``position``:
    how many events had ever been queued for the reader when the answer came."""

    event_id: str
    matches: Callable[[ServerEvent], bool]
    answer: asyncio.Future[ServerEvent]
    frame: bytes | None = None
    position: int = 0

    def is_answered_by(self, event: ServerEvent) -> bool:
        """Whether `event` answers this request: it matches, or it is an error about this event or about none in
        particular. False if the request has its answer."""
        if self.answer.done():
            return False
        if isinstance(event, ErrorEvent):
            return event.error.event_id in (self.event_id, None)
        return self.matches(event)


class Aside:
    """One response out of band (`conversation` is "none") and the queue of its events; `Connection.aside` asks
    for it. It is read beside turns and other such responses.

    Its queue has no bound but the reply's length: the other readers of the connection must not wait for it.
    """

    def __init__(self, connection: Connection) -> None:
        self.event_id = connection.new_id()
        self.response_id: str | None = None
        self._connection = connection
        self._events: deque[ServerEvent] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._over = False

    @property
    def running(self) -> bool:
        """Whether there is more to read: events are queued, or the response has not ended."""
        return bool(self._events) or not self._over

    async def receive(self) -> ServerEvent:
        """Wait for the next event of the response, or the error that refuses it. Raises `ConnectionLost`, and
        `ChatBusy` if another task waits here."""
        if self._arrival is not None:
            raise ChatBusy("Another task reads this reply")
        try:
            while not self._events:
                with self._connection.waiter() as self._arrival:
                    await self._arrival
        finally:
            self._arrival = None
        return self._events.popleft()

    def takes(self, event: ServerEvent) -> bool:
        """Queue `event` if it is about this response. Returns whether it is. The label by which the response
        was known is removed from its metadata."""
        if isinstance(event, ErrorEvent):
            ours = event.error.event_id == self.event_id
            self._over = self._over or ours
        elif isinstance(event, ResponseCreated | ResponseDone):
            labels = event.response.metadata or {}
            ours = labels.get(ASIDE) == self.event_id or event.response.id == self.response_id
            if ours:
                self.response_id = event.response.id
                self._over = isinstance(event, ResponseDone)
                own = {name: value for name, value in labels.items() if name != ASIDE} or None
                response = msgspec.structs.replace(event.response, metadata=own)
                event = msgspec.structs.replace(event, response=response)
        else:
            ours = isinstance(event, OutputFrame) and event.response_id == self.response_id is not None
        if ours:
            self._events.append(event)
            if self._arrival is not None and not self._arrival.done():
                self._arrival.set_result(None)
        return ours


class Connection:
    """Sends client events, gives answers to the requests that wait for them, and queues all other server events
    for one reader.

    With a `resumption` the receive task makes a lost connection again when something next needs it: no event is
    read twice, and no request is served twice. ``running``: ids of responses that run at the server already.
    """

    def __init__(
        self, transport: Transport, resumption: Resumption | None = None, running: Iterable[str] = ()
    ) -> None:
        self.buffer = InputBuffer()
        self._transport = transport
        self._resumption = resumption
        self.closed = False
        """Whether `aclose` was called."""
        self._prefix = f"client_{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self.refusals: deque[ErrorDetails] = deque(maxlen=64)
        """The last errors that the server sent."""
        self.commits: deque[TextCommitted] = deque(maxlen=64)
        """The last answers of the server to commits of the input buffer."""
        # the receive task, and what waits for it
        self._task: asyncio.Task[None] | None = None
        self._queue: deque[ServerEvent | ConnectionFault] = deque()
        self._taken = 0  # events that have left the queue
        self._requests: list[_PendingRequest] = []
        self._waiters: list[asyncio.Future[Any]] = []  # of requests, senders and readers
        self._senders: list[asyncio.Future[None]] = []  # their frames wait for a new connection
        self._arrival: asyncio.Future[None] | None = None  # the reader waits for an event
        self._room = asyncio.Event()  # the receive task waits for room in the queue
        self._reading = False
        self._read_on = asyncio.Event()  # wakes what waits until the reader has an event, or has stopped
        self.responses = RunningResponses(running)
        self._asides: weakref.WeakValueDictionary[str, Aside] = weakref.WeakValueDictionary()
        self._out_of_band: set[str] = set()  # ids of responses that run beside the conversation

    @property
    def handle(self) -> str | None:
        """A secret with which the session is opened again; None if the connection cannot be made again."""
        return None if self._resumption is None else self._resumption.handle

    def resumption(self) -> Resumption:
        """What sessions of this server are resumed with. Raises `ConnectionFailed` if this client cannot resume
        any."""
        if self._resumption is None:
            raise ConnectionFailed("This client cannot open a session by its handle")
        return self._resumption

    # --- sending --------------------------------------------------------------------------------------------

    async def send(self, event: ClientEvent) -> str:
        """Send one event; returns its id, which is made if it has none. If the connection is lost, it waits
        until that is made again, and the event is sent on the new one.

        Raises `ConnectionLost` if it cannot be made again, and a `FrameError`, without sending, for an event
        that cannot be encoded or has an id that is too long.
        """
        event_id = event.event_id or self.new_id()
        if len(event_id) > codec.MAX_EVENT_ID:
            raise FieldInvalid(f"An event's id has at most {codec.MAX_EVENT_ID} characters", "event_id")
        frame = codec.framed(msgspec.structs.replace(event, event_id=event_id))
        if event_id not in self._asides:
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
        """Send one event and return its answer: the first server event of the type ``answer`` that ``matches``.

        Events that were queued before the answer are given to ``meanwhile``, unless another task reads; without
        ``meanwhile`` they stay queued while a response runs, and are dropped if none does. Raises `ServerError`
        if the event is refused, and what `send` raises.
        """
        event_id = event.event_id or self.new_id()
        with self._pending(event_id, lambda event: isinstance(event, answer) and matches(event)) as request:
            await self.send(msgspec.structs.replace(event, event_id=event_id))
            found = await self._answer(request, meanwhile)
        assert isinstance(found, answer)
        return found

    async def answer(self, event_id: str, matches: Callable[[ServerEvent], bool]) -> ServerEvent:
        """The answer to the event ``event_id`` that was sent before: the first server event that ``matches``.
        It is taken out of the queue, or waited for. Raises `ServerError` if the event is refused,
        `ConnectionLost`."""
        with self._pending(event_id, matches) as request:
            if self._resumption is not None:
                request.frame = self._resumption.frame_of(event_id)
            for index, event in enumerate(self._queue):
                if not isinstance(event, ConnectionFault) and request.is_answered_by(event):
                    del self._queue[index]
                    self._resolve(request, event, self._taken + index)
                    self._take_in(event)
                    break
            return await self._answer(request, None)

    async def delete(self, item_id: str) -> None:
        """Delete an item at the server, and wait for the answer. Raises what `request` raises."""
        await self.request(ItemDelete(item_id=item_id), ItemDeleted, lambda event: event.item_id == item_id)

    async def committed(self, commit: str, call_id: str) -> TextCommitted | None:
        """The answer to the event ``commit``, which made the streamed output of the call ``call_id`` an item;
        it is waited for. None if the server has refused it already. Raises `ServerError` if it is refused while
        this waits."""
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

    # --- reading --------------------------------------------------------------------------------------------

    async def receive(self) -> ServerEvent:
        """Wait for the next event that is for the reader: of a known type, and no answer to a request. An
        answer that comes while this waits is returned here, too.

        Errors about a cancel are skipped: the response had ended before. Raises `ConnectionLost`,
        `ProtocolBroken`, and `ChatBusy` while another task reads.
        """
        if self._reading:
            raise ChatBusy("Another task reads this chat's events")
        self._reading = True
        try:
            while True:
                while not self._queue:
                    with self.waiter() as self._arrival:
                        await self._arrival
                event = self._taken_next()
                if self._take_in(event):
                    return event
        finally:
            self._reading = False
            self._read_on.set()
            self._read_on.clear()

    async def others(self) -> None:
        """Wait until no other task reads events."""
        while self._reading:
            await self._read_on.wait()

    async def aside(self, create: ResponseCreate) -> Aside:
        """Ask for the response out of band of `create`. A label in its metadata lets its events be told from
        those of others. Raises what `send` raises."""
        aside = Aside(self)
        self._asides[aside.event_id] = aside
        create = labelled(create, aside.event_id)
        await self.send(msgspec.structs.replace(create, event_id=aside.event_id))
        return aside

    async def quiet(self) -> None:
        """Cancel the running response and those asked for, and read and drop events until none runs. Responses
        out of band go on. Raises what `receive` raises."""
        await self.cut()
        while self.responses.busy:
            await self.receive()

    async def ended(
        self,
        meanwhile: Callable[[ServerEvent], object] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until no response runs or is asked for, or until `enough` returns true; nothing is cancelled. If
        no other task reads, events are read here and given to `meanwhile` (None: dropped). Responses out of
        band do not count."""
        while self.responses.busy and not enough():
            if self._reading:
                await self._read_on.wait()
                continue
            event = await self.receive()
            if meanwhile is not None:
                meanwhile(event)

    async def make_way(self) -> None:
        """Cancel the running response, because a turn is sent next. Its end is not waited for: the server
        serves that turn when the running one has ended.

        Responses that were asked for and have not begun are waited for, because the next `response.created`
        would be taken for the new turn's. So is the end of responses that ran before this client came.
        """
        if self._reading or self.responses.inherited:
            await self.quiet()
        await self.cut()
        while self.responses.asked:
            await self.receive()

    async def cut(self) -> None:
        """Send a cancel for each running response, and for one that was asked for and has not begun. Does not
        wait for their ends. Responses out of band go on."""
        if self.responses.asked:
            await self.send(ResponseCancel())
        for response_id in self.responses.running - self.responses.ending:
            await self.send(ResponseCancel(response_id=response_id))

    async def clear_leftover(self) -> None:
        """Empty the session's input buffer (text that is not an item yet) at the server, if an earlier client
        of the session may have left text in it, or a commit was refused."""
        if self.buffer.stale:
            self.buffer.stale = False
            await self.send(TextClear())

    # --- the transport --------------------------------------------------------------------------------------

    async def share(self, session_id: str) -> SharedTransport:
        """Make this connection carry other sessions too, and return what carries them. `session_id`: this
        session's id."""
        if not isinstance(self._transport, SessionTransport):
            await self._stop()
            self._transport = SharedTransport(self._transport, session_id).session(session_id)
            if self._is_needed():
                self._start()
        return self._transport.connection

    async def aclose(self, *, cut: bool = False) -> None:
        """Close the transport; whatever waits raises `ConnectionLost`. ``cut``: cancel the running responses
        first, which else go on at the server. Responses out of band are cancelled in any case."""
        self.closed = True
        try:
            with suppress(ConnectionLost):
                if cut:
                    await self.cut()
                for response_id in sorted(self._out_of_band):
                    await self.send(ResponseCancel(response_id=response_id))
        finally:
            try:
                await self._stop()
            finally:
                self._fail(ConnectionLost("This connection was closed here"))
                await self._transport.aclose()

    # --- the receive task -----------------------------------------------------------------------------------

    @contextmanager
    def waiter(self) -> Iterator[asyncio.Future[Any]]:
        """A future for what waits for the receive task, which runs meanwhile even if the reader's queue is
        full. It fails with what ends that task. Raises `ConnectionLost` after `aclose`."""
        if self.closed:
            raise self.located(ConnectionLost("This connection was closed here"))
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._room.set()
        self._start()
        try:
            yield waiter
        finally:
            self._waiters.remove(waiter)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # marks it as read, so that it is not logged

    def _start(self) -> None:
        """Start the receive task if it does not run: at first, and after a loss that ended it."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._receive_all(), name="holdfast-receive")

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _receive_all(self) -> None:
        """Receive frames until the connection is lost. If something waits for it then, make it again and go on;
        if nothing does, end. If it cannot be made again, all that waits fails."""
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
                    self._room.clear()
                    await self._room.wait()
        except Exception as error:
            self._fail(error)

    def _arrived(self, frame: bytes) -> None:
        """Decode one frame, and give its event to the request that it answers, or else to the reader. If the
        frame cannot be decoded, the requests fail; without requests, the reader does."""
        try:
            event = codec.decode_server(frame)
        except FrameError as error:
            broken = self.located(ProtocolBroken(f"The server sent a frame this client cannot read: {error}"))
            broken.__cause__ = error
            self._break(broken)
            return
        if self._resumption is not None:
            self._resumption.read(frame, event)
            if self._resumption.postpones(event):
                return
        if event is None:
            return
        if isinstance(event, SessionDetached) and event.reason == "session_deleted":
            self._break(self.located(ConnectionLost.closed("", DELETED)))
            return
        if self._is_aside(event):
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
        if isinstance(event, SessionDetached) and event.reason:  # all else comes on another connection
            lost = self.located(ConnectionLost("The session has moved to another connection"))
            if self.responses.busy:
                self._put(lost)
            self._fail(lost)

    def _is_aside(self, event: ServerEvent) -> bool:
        """If an event is about a response out of band, give it to the queue of that response. Returns whether
        it is.

        If that response is not read any more, its events are dropped.
        """
        if not (self._asides or self._out_of_band or isinstance(event, ResponseCreated)):
            return False
        if isinstance(event, ResponseCreated) and event.response.conversation_id is None:
            asked = (event.response.metadata or {}).get(ASIDE)
            waiting = [one for one in self._asides.values() if one.response_id is None]
            if asked is None and waiting and not self.responses.asked:  # without labels they begin in order
                waiting[0].response_id = event.response.id
            if asked is not None or (waiting and not self.responses.asked):
                self._out_of_band.add(event.response.id)
        known = False
        for one in list(self._asides.values()):
            if one.takes(event):
                known = True
                if isinstance(event, ResponseDone) and self._resumption is not None:
                    self._resumption.arrived(one.event_id)
        if isinstance(event, ResponseCreated | ResponseDone):
            known = known or event.response.id in self._out_of_band
        elif isinstance(event, OutputFrame):
            known = known or event.response_id in self._out_of_band
        if isinstance(event, ResponseDone):
            self._out_of_band.discard(event.response.id)
        return known

    def _put(self, event: ServerEvent | ConnectionFault) -> None:
        self._queue.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _is_full(self) -> bool:
        """Whether the receive task has to pause, because the queue is full. It must not while something waits,
        such as a request, as the answer may come later."""
        return len(self._queue) >= MAX_QUEUED and not self._is_needed()

    def _is_needed(self) -> bool:
        """Whether something waits for the connection."""
        return any(not waiter.done() for waiter in self._waiters)

    def located(self, error: _Fault) -> _Fault:
        """The same error; one about the connection names the server and the session's handle."""
        if self._resumption is not None and isinstance(error, ConnectionFault):
            error.of(self._resumption.address, self._resumption.handle)
        return error

    def _break(self, error: ConnectionFault) -> None:
        """Let the requests fail; without requests, the reader."""
        if self._requests:
            self._fail(error)
        else:
            self._put(error)

    def _fail(self, error: Exception) -> None:
        error = self.located(error)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    async def _come_back(self, lost: ConnectionLost) -> None:
        """Replace the lost transport by a new one, and let senders go on. Raises `ConnectionLost`, with why, if
        that is not possible, and `SessionLost` if the server does not have the session."""
        resumption = self._resumption
        if resumption is None or self.closed or not resumption.possible(lost):
            raise lost
        patience = resumption.patience
        try:
            self._transport = await patience.retry(
                partial(self._resumed, resumption), lost.of(resumption.address, resumption.handle)
            )
        except SessionLost:
            raise
        except (ConnectionFailed, ConnectionLost) as failed:
            cause = f"{lost.cause}; tried again for {patience.total:g} s, at last: {failed.cause}"
            raise ConnectionLost(cause, lost.close_code) from failed
        for sender in self._senders:
            if not sender.done():
                sender.set_result(None)
        self._senders.clear()

    async def _resumed(self, resumption: Resumption) -> Transport:
        """Open a new transport, in one try, and send all again that the server may lack. After an error it is
        closed."""
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
        """New cancels, as frames, for running responses that a cancel was sent for. A server that died before
        such a response was over goes on with it, and refuses another response meanwhile."""
        frames = []
        for response_id in sorted(self.responses.ending & self.responses.running):
            cancel = ResponseCancel(event_id=(event_id := self.new_id()), response_id=response_id)
            self.responses.sent(event_id, cancel)
            frames.append(codec.encode(cancel))
        return frames

    # --- waiting for it -------------------------------------------------------------------------------------

    @contextmanager
    def _pending(self, event_id: str, matches: Callable[[ServerEvent], bool]) -> Iterator[_PendingRequest]:
        """A request that the receive task answers while the block runs. Raises `ConnectionLost` after
        `aclose`."""
        with self.waiter() as answer:
            request = _PendingRequest(event_id, matches, answer)
            self._requests.append(request)
            try:
                yield request
            finally:
                self._requests.remove(request)

    async def _answer(
        self, request: _PendingRequest, meanwhile: Callable[[ServerEvent], object] | None
    ) -> ServerEvent:
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

    def _taken_next(self) -> ServerEvent:
        """Remove the first event from the queue and return it; the receive task goes on if it waited for room.
        Raises `ProtocolBroken` if the frame could not be read, `SessionLost` if it told that the session was
        deleted."""
        event = self._queue.popleft()
        self._taken += 1
        if len(self._queue) <= MAX_QUEUED // 2:
            self._room.set()
        if isinstance(event, ConnectionFault):
            raise event
        return event

    async def _returned(self, transport: Transport, lost: ConnectionLost) -> None:
        """Wait until the receive task has replaced ``transport``, on which sending failed; it sends the frame
        again. Raises ``lost``, the failure, if the session cannot be resumed."""
        if self._transport is not transport:
            return
        if self._resumption is None or self.closed or not self._resumption.possible(lost):
            raise self.located(lost)
        with self.waiter() as sender:
            self._senders.append(sender)
            await sender

    def _take_in(self, event: ServerEvent) -> bool:
        """Update which responses run, and which client events the server has, by an event that is read now.
        Returns whether the event is for the reader: an error about a cancel is not."""
        if self._resumption is not None and (event_id := self.responses.acknowledged(event)):
            self._resumption.arrived(event_id)
        return self.responses.read(event)

    def new_id(self) -> str:
        """A new id for a client event."""
        return f"{self._prefix}_{next(self._numbers)}"


def server_error(details: ErrorDetails) -> ServerError:
    return ServerError(
        details.message,
        code=details.code,
        kind=details.type,
        param=details.param,
        event_id=details.event_id,
        retry_after=details.retry_after or None,
    )


class InputBuffer:
    """Which part of this client fills the session's one input buffer at the server: a `TextInput`, or the
    streamed outputs of a run, which give way to a `TextInput`. ``stale``: there may be text in the buffer, left
    by an earlier client or by a commit that was refused."""

    def __init__(self) -> None:
        self.stale = False
        self._owner: object | None = None
        self._give_way: Callable[[], Awaitable[None]] | None = None

    def lend(self, owner: object, give_way: Callable[[], Awaitable[None]]) -> bool:
        """Give the buffer to `owner`, the outputs of a run. Returns False if another has it. A later `claim`
        awaits `give_way`, which has to empty the buffer."""
        if self._owner not in (None, owner):
            return False
        self._owner, self._give_way = owner, give_way
        return True

    async def claim(self, owner: object) -> None:
        """Give the buffer to `owner`, a `TextInput`. A run that has it gives way first; another `TextInput`
        just loses it."""
        if self._owner is not owner:
            give_way, self._give_way = self._give_way, None
            self._owner = owner
            if give_way is not None:
                await give_way()

    def release(self, owner: object) -> None:
        """Free the buffer if `owner` has it."""
        if self._owner is owner:
            self._owner = self._give_way = None
