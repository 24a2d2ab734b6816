"""The client for code without `async`: the same sessions behind plain calls. An event loop runs in a thread.

with connect("ws://127.0.0.1:8040") as client, client.session() as chat:
    for piece in chat.say("Hello!"):
        print(piece, end="")
    print(chat.say("And again?").finish().text)

Methods, tools, sampling fields and errors are those of `sdk.chat`. Use a chat from one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Concatenate, Generic, ParamSpec, TypeVar, Unpack

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from msgspec import UNSET, UnsetType

from .chat import Chat
from .client import Client
from .client import connect as connect_async
from .connection.responses import Finished
from .frames.items import AnyItem
from .frames.session import SessionResource
from .opening import AsyncOpening, SyncOpening
from .params import ResponseOptions
from .reading import Reading

_Piece = TypeVar("_Piece")
_End = TypeVar("_End")
_Result = TypeVar("_Result")
_P = ParamSpec("_P")


class SyncStream(Generic[_Piece, _End]):
    """A turn, a reply or a run for code without `async`: iterate over its pieces, or `finish` it. Nothing is
    sent before that.

    Ctrl-C while it waits for a piece stops the waiting and raises `KeyboardInterrupt`. A turn or reply can be
    read on after that; a run is over.
    """

    def __init__(self, portal: BlockingPortal, reading: Reading[_Piece, _End]) -> None:
        self._portal = portal
        self._reading = reading
        self._read: deque[_Piece] = deque()  # the piece that was read and not yet given
        self._turnstile = anyio.Lock()  # a read that Ctrl-C cut ends before the next begins
        self._scope: anyio.CancelScope | None = None  # of the last read

    def __repr__(self) -> str:
        return f"<Sync {self._reading!r}>"

    def __iter__(self) -> Iterator[_Piece]:
        return self

    def __next__(self) -> _Piece:
        if not self._read:
            try:
                self._portal.start_task_soon(self._next).result()
            except KeyboardInterrupt:
                self._portal.call(self._cut)
                raise
        if not self._read:
            raise StopIteration
        return self._read.popleft()

    def finish(self) -> _End:
        """Read to the end. Returns the last response, or the `RunDone` of a run."""
        for _ in self:
            pass
        return self._portal.call(self._ended)

    async def _next(self) -> None:
        """Read one piece. The loop keeps it until it is given: Ctrl-C may come before the thread has it."""
        with anyio.CancelScope() as self._scope:
            async with self._turnstile:
                if not self._read:
                    async for piece in self._reading:
                        self._read.append(piece)
                        return

    async def _cut(self) -> None:
        """Cancel the last read. Its task has begun: the event loop begins tasks in the order of the calls."""
        if self._scope is not None:
            self._scope.cancel()

    async def _ended(self) -> _End:
        return await self._reading


def _waited(
    method: Callable[Concatenate[Chat, _P], Coroutine[object, object, _Result]],
) -> Callable[Concatenate[SyncChat, _P], _Result]:
    """A method of `Chat` for code without `async`: it returns when that is done."""

    @wraps(method)
    def call(chat: SyncChat, /, *args: _P.args, **named: _P.kwargs) -> _Result:
        return chat._portal.call(partial(method, chat.chat, *args, **named))

    return call


def _streamed(
    method: Callable[Concatenate[Chat, _P], Reading[_Piece, _End]],
) -> Callable[Concatenate[SyncChat, _P], SyncStream[_Piece, _End]]:
    """A method of `Chat` that begins a turn, a reply or a run, for code without `async`: it returns a
    `SyncStream` of that."""

    @wraps(method)
    def call(chat: SyncChat, /, *args: _P.args, **named: _P.kwargs) -> SyncStream[_Piece, _End]:
        return SyncStream(chat._portal, method(chat.chat, *args, **named))

    return call


class SyncChat:
    """One session, made by `SyncClient.session`. `chat`: the `sdk.chat.Chat` behind it, of which these are the
    methods. `say`, `respond` and `run` return a `SyncStream`; the others return when it is done."""

    def __init__(self, portal: BlockingPortal, chat: Chat) -> None:
        self._portal = portal
        self.chat = chat

    def __repr__(self) -> str:
        return f"<Sync {self.chat!r}>"

    @property
    def session(self) -> SessionResource:
        """The session's configuration, as the server told it last."""
        return self.chat.session

    @property
    def handle(self) -> str | None:
        """A secret with which `SyncClient.resume` opens this session again; None if the connection cannot be
        made again."""
        return self.chat.handle

    @property
    def last(self) -> Finished:
        """The last response that ended: its text, usage, KV and times. Raises `LookupError` before the
        first."""
        return self.chat.last

    say = _streamed(Chat.say)
    respond = _streamed(Chat.respond)
    run = _streamed(Chat.run)
    cancel = _waited(Chat.cancel)  # from another thread than the one that reads
    interrupt = _waited(Chat.interrupt)
    rewind = _waited(Chat.rewind)
    add = _waited(Chat.add)
    answer = _waited(Chat.answer)
    update = _waited(Chat.update)
    lease = _waited(Chat.lease)
    stage = _waited(Chat.stage)
    settle = _waited(Chat.settle)
    blocks = _waited(Chat.blocks)
    close = _waited(Chat.aclose)
    _fork = _waited(Chat.fork)
    _compact = _waited(Chat.compact)

    def fork(
        self,
        children: int = 1,
        at: AnyItem | str | None = None,
        *,
        adapter: str | UnsetType | None = UNSET,
    ) -> list[SyncChat]:
        """`Chat.fork`: make `children` new sessions that go on from here, or from behind the item `at` (or the
        item with that id), with the same adapter or another one. They are closed with this chat."""
        return [SyncChat(self._portal, child) for child in self._fork(children, at, adapter=adapter)]

    def compact(self, turns: int = 2, **overrides: Unpack[ResponseOptions]) -> SyncChat:
        """`Chat.compact`: a fork in which a summary stands for all but the last `turns` turns. It is closed
        with this chat."""
        return SyncChat(self._portal, self._compact(turns, **overrides))


@contextmanager
def _session(client: SyncClient, opening: AsyncOpening[Chat]) -> Iterator[SyncChat]:
    with client._portal.wrap_async_context_manager(opening) as chat:
        yield SyncChat(client._portal, chat)


def _opened(
    method: Callable[Concatenate[Client, _P], AsyncOpening[Chat]],
) -> Callable[Concatenate[SyncClient, _P], SyncOpening[SyncChat]]:
    """A method of `Client` that opens a session, for code without `async`."""

    @wraps(method)
    def call(client: SyncClient, /, *args: _P.args, **named: _P.kwargs) -> SyncOpening[SyncChat]:
        opening = method(client._client, *args, **named)
        return SyncOpening(_session(client, opening), opening)

    return call


class SyncClient:
    """Opens sessions on a server, for code without `async`. Made by `connect`."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self._portal = portal
        self._client = client

    def __repr__(self) -> str:
        return f"<Sync {self._client!r}>"

    session = _opened(Client.session)
    resume = _opened(Client.resume)
    import_session = _opened(Client.import_session)


@contextmanager
def _client(opening: AsyncOpening[Client]) -> Iterator[SyncClient]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(opening) as client:
        yield SyncClient(portal, client)


def _connected(connecting: Callable[_P, AsyncOpening[Client]]) -> Callable[_P, SyncOpening[SyncClient]]:
    @wraps(connecting)
    def call(*args: _P.args, **named: _P.kwargs) -> SyncOpening[SyncClient]:
        opening = connecting(*args, **named)
        return SyncOpening(_client(opening), opening)

    return call


connect = _connected(connect_async)
"""`sdk.connect` for code without `async`: an event loop runs in a thread, which ends with the block."""
