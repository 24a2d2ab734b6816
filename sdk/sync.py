"""The client for code without `async`: the same sessions behind plain calls. An event loop runs in a thread.

with connect("ws://127.0.0.1:8040") as client, client.session() as chat:
    for piece in chat.say("Hello!"):
        print(piece, end="")
    print(chat.say("And again?").finish().text)

Tools, sampling fields and errors are those of `sdk.chat`. Use a chat from one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from os import PathLike
from ssl import SSLContext
from typing import Any, Generic, Literal, TypeVar, Unpack

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from .agent.events import RunDone, RunEvent
from .agent.run import Run, RunLimits
from .chat import MAX_TOOL_ROUNDS, Chat
from .client import Client
from .client import connect as connect_async
from .connection.reconnect import Patience
from .connection.responses import Finished
from .frames import server
from .frames.items import AnyItem, FunctionCallItem
from .frames.session import SessionResource
from .opening import opens
from .params import ResponseOptions, RunOptions, SessionOptions, UpdateOptions
from .reply import Reply, last_of
from .tools.tool import ToolLike
from .turn import Turn

_Piece = TypeVar("_Piece")
_End = TypeVar("_End")


class SyncStream(Generic[_Piece, _End]):
    """A turn, a reply or a run for code without `async`: iterate over its pieces, or `finish` it. Nothing is
    sent before that.

    Ctrl-C while it waits for a piece stops the waiting and raises `KeyboardInterrupt`. A turn or reply can be
    read on after that; a run is over.
    """

    def __init__(self, portal: BlockingPortal, reading: Turn | Reply | Run, end: Callable[[], _End]) -> None:
        self._portal = portal
        self._pieces: AsyncIterator[Any] = aiter(reading)
        self._reading = reading
        self._end = end
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
        return self._end()

    async def _next(self) -> None:
        """Read one piece. The loop keeps it until it is given: Ctrl-C may come before the thread has it."""
        with anyio.CancelScope() as self._scope:
            async with self._turnstile:
                if not self._read:
                    async for piece in self._pieces:
                        self._read.append(piece)
                        return

    async def _cut(self) -> None:
        """Cancel the last read. Its task has begun: the event loop begins tasks in the order of the calls."""
        if self._scope is not None:
            self._scope.cancel()


class SyncChat:
    """One session, made by `SyncClient.session`. `chat`: the `sdk.chat.Chat` behind it."""

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

    def say(
        self, text: str | None = None, /, **overrides: Unpack[ResponseOptions]
    ) -> SyncStream[str, Finished]:
        """`Chat.say`: `text` becomes a message of the user. Iterate over the pieces of the reply, or `finish()`
        it. Tools are run in between."""
        turn = self.chat.say(text, **overrides)
        return SyncStream(self._portal, turn, lambda: last_of(turn.rounds))

    def respond(self, **overrides: Unpack[ResponseOptions]) -> SyncStream[server.ServerEvent, Finished]:
        """`Chat.respond`: ask for one response. Iterate over its typed events, or `finish()` it. Tools are not
        run."""
        reply = self.chat.respond(**overrides)
        return SyncStream(self._portal, reply, lambda: last_of(reply.rounds))

    def run(
        self,
        prompt: str | None = None,
        tools: Iterable[ToolLike] | None = None,
        *,
        limits: RunLimits | None = None,
        **overrides: Unpack[RunOptions],
    ) -> SyncStream[RunEvent, RunDone]:
        """`Chat.run`: the model works with tools until it is done. Iterate over its typed events, or `finish()`
        it."""
        run = self.chat.run(prompt, tools, limits=limits, **overrides)
        return SyncStream(self._portal, run, lambda: self._portal.call(run.done))

    def cancel(self) -> None:
        """`Chat.cancel`: cancel the running reply. Call it from another thread than the one that reads."""
        self._portal.call(self.chat.cancel)

    def interrupt(self, heard: int | str | None = None) -> str:
        """`Chat.interrupt`: cut the last reply after what the user has heard of it; returns the text that
        stays. `heard`: a number of characters, or the beginning of the text itself; None: as much as was read
        here."""
        return self._portal.call(self.chat.interrupt, heard)

    def rewind(self, to: AnyItem | str | int) -> server.SessionRewound:
        """`Chat.rewind`: remove the end of the conversation. `to`: the item, or its id, that becomes the last;
        a number of tokens that stay; or `"root"`: everything goes. Returns the server's answer."""
        return self._portal.call(self.chat.rewind, to)

    def fork(self, children: int = 1, at: AnyItem | str | None = None) -> list[SyncChat]:
        """`Chat.fork`: make `children` new sessions that go on from here, or from behind the item `at` (or the
        item with that id). They are closed with this chat."""
        return [SyncChat(self._portal, child) for child in self._portal.call(self.chat.fork, children, at)]

    def compact(self, turns: int = 2, **overrides: Unpack[ResponseOptions]) -> SyncChat:
        """`Chat.compact`: a fork in which a summary stands for all but the last `turns` turns. It is closed
        with this chat."""
        return SyncChat(self._portal, self._portal.call(lambda: self.chat.compact(turns, **overrides)))

    def add(self, item: AnyItem, previous_item_id: str | None = None) -> AnyItem:
        """`Chat.add`: add `item` to the conversation, at the end or after the item `previous_item_id`
        (`"root"`: at the beginning); returns it as the server has it."""
        return self._portal.call(self.chat.add, item, previous_item_id)

    def answer(self, call: FunctionCallItem, output: str) -> AnyItem:
        """`Chat.answer`: add the output of a tool call; returns the item."""
        return self._portal.call(self.chat.answer, call, output)

    def update(
        self, *, tools: Iterable[ToolLike] | None = None, **fields: Unpack[UpdateOptions]
    ) -> SessionResource:
        """`Chat.update`: change the given fields of the session's configuration, and its tools (None: they
        stay), for later turns; returns the whole configuration."""
        updated: SessionResource = self._portal.call(lambda: self.chat.update(tools=tools, **fields))
        return updated

    def lease(
        self, priority: int | None = None, ttl: float | None = None, returns_in: float | None = None
    ) -> server.SessionLeased:
        """`Chat.lease`: ask the server to keep this session's KV longer than that of others for `ttl` seconds
        (None: 300; 0 ends it). `returns_in`: seconds until the session is needed again. `priority`: of its
        turns meanwhile; higher goes first. Returns what the server grants."""
        return self._portal.call(self.chat.lease, priority, ttl, returns_in)

    def stage(self) -> server.SessionStaged:
        """`Chat.stage`: restore the session's KV to the device, and wait for it. Returns how many tokens are
        there, and from where they came (disk, host, or recomputed)."""
        return self._portal.call(self.chat.stage)

    def settle(self, tier: Literal["host", "disk"] = "disk") -> server.SessionSettled:
        """`Chat.settle`: offload the session's KV to `tier`, and wait for it. Returns how many tokens have KV
        in all tiers together, and the lowest tier that holds some."""
        return self._portal.call(self.chat.settle, tier)

    def blocks(self) -> server.SessionBlocksListed:
        """`Chat.blocks`: where the blocks of the session's KV lie."""
        return self._portal.call(self.chat.blocks)

    def close(self) -> None:
        """Close the session's connection; `client.resume(chat.handle)` opens the session again."""
        self._portal.call(self.chat.aclose)


class SyncClient:
    """Opens sessions on a server, for code without `async`. Made by `connect`."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self._portal = portal
        self._client = client

    def __repr__(self) -> str:
        return f"<Sync {self._client!r}>"

    @opens("with client.session(...) as chat:")
    def session(
        self,
        *,
        instructions: str | None = None,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
        **options: Unpack[SessionOptions],
    ) -> Iterator[SyncChat]:
        """Open a new session on a connection of its own, which is closed at the end of the block. `tools`:
        callables that are run when the model calls them, or dicts for calls that the caller answers.
        `max_tool_rounds`: how often a turn may run tools and go on. `options`: further fields of
        `session.update`. Raises what `Client.session` raises."""
        opened = self._client.session(
            instructions=instructions, tools=tools, max_tool_rounds=max_tool_rounds, **options
        )
        with self._portal.wrap_async_context_manager(opened) as chat:
            yield SyncChat(self._portal, chat)

    @opens("with client.resume(handle) as chat:")
    def resume(
        self, handle: str, *, tools: Iterable[ToolLike] = (), max_tool_rounds: int = MAX_TOOL_ROUNDS
    ) -> Iterator[SyncChat]:
        """Open the session of `handle` (from `SyncChat.handle`) again, as it was left; its connection is closed
        at the end of the block. `tools`: the callables to run from now on. `max_tool_rounds`: how often a turn
        may run tools and go on. Raises what `Client.resume` raises."""
        opened = self._client.resume(handle, tools=tools, max_tool_rounds=max_tool_rounds)
        with self._portal.wrap_async_context_manager(opened) as chat:
            yield SyncChat(self._portal, chat)

    @opens("with client.import_session(path) as chat:")
    def import_session(
        self,
        path: str | PathLike[str],
        *,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
    ) -> Iterator[SyncChat]:
        """Begin a new session with what `holdfast sessions export` wrote into the file `path`. Keyword
        arguments as in `resume`. Raises what `Client.import_session` raises."""
        opened = self._client.import_session(path, tools=tools, max_tool_rounds=max_tool_rounds)
        with self._portal.wrap_async_context_manager(opened) as chat:
            yield SyncChat(self._portal, chat)


@opens("with connect(...) as client:")
def connect(
    url: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    *,
    ssl: SSLContext | None = None,
    patience: Patience | None = None,
    msgpack: bool = False,
) -> Iterator[SyncClient]:
    """A client of the server at `url` for code without `async`. Its event loop runs in a thread, which ends
    with the block.

    `url`: by default `HOLDFAST_URL` of the environment, or else a server on this machine. `model`: a name of
    the served model; None: the server's first. `api_key`: by default `HOLDFAST_API_KEY` of the environment.
    `ssl`: checks the server's certificate; None: by the system's authorities. `patience`: for how long a lost
    connection is tried again. Raises `ConnectionFailed` if `url` is no address.
    """
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(
            connect_async(url, model, api_key, ssl=ssl, patience=patience, msgpack=msgpack)
        ) as client,
    ):
        yield SyncClient(portal, client)
