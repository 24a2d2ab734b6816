"""A session as a client has it: say something, read what comes; the history is never sent again.

async for piece in chat.say("What is the weather in Rome?"):
    print(piece, end="")
print(chat.last.kv, chat.last.ttft_ms)
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, TypeAlias

import anyio

from .agent.calls import CallOutputs
from .agent.run import HINT_SECONDS, Run, RunLimits
from .agent.tracing import Tracer, Tracers
from .connection import Connection
from .errors import ChatBusy, ConnectionLost, FrameError, ServerError, SessionLost
from .frames import client, server
from .frames.items import AnyItem, FunctionCallItem, MessageItem
from .frames.session import SessionPatch, SessionResource
from .params import converted, create_of, named, output_of
from .reconnect import Resumption
from .reply import Reply
from .responses import Finished, Progress, Rounds, characters_heard, place_in
from .text_input import TextInput
from .tools.running import Detached
from .tools.tool import Tool, ToolLike, tools_of
from .transport import Transport
from .turn import Turn

MAX_TOOL_ROUNDS = 8
MAX_LISTED = 1000
"""Sessions of a tree in one page."""
_Reading: TypeAlias = Turn | Run | Reply


class Chat:
    """One session on one connection, made by `Client.session`.

    One turn runs at a time; while it is being read, another raises `ChatBusy`. A turn that is no longer
    referenced, or was cancelled while it was read (for example by a timeout), is cut when the next begins.
    """

    def __init__(
        self, connection: Connection, session: SessionResource, *, max_tool_rounds: int = MAX_TOOL_ROUNDS
    ) -> None:
        self._connection = connection
        self._max_tool_rounds = max_tool_rounds
        self._tools: dict[str, Tool] = {}
        self._current: weakref.ref[_Reading] | None = None
        self._outputs: CallOutputs | None = None  # of the last run
        self._tracers = Tracers(())  # of the last run
        self._detached = Detached()  # tools that did not end
        self._leased = False
        self._claiming = anyio.Lock()
        self._updated = True  # whether the answer to the last `session.update` was read
        self._turns: list[Rounds] = [Rounds()]  # rounds of the last turns; one that is steered ends late
        self._children: list[Chat] = []
        self.session = session

    @classmethod
    async def begin(
        cls,
        transport: Transport,
        *,
        resumption: Resumption | None = None,
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
    ) -> Chat:
        """The chat on a fresh connection, after `session.created`. Raises `ServerError`, `ConnectionLost`.
        With a `resumption` a lost connection is made again."""
        connection = Connection(transport, resumption)
        try:
            created = await connection.answer("", lambda event: isinstance(event, server.SessionCreated))
        except BaseException:
            await connection.aclose()
            raise
        assert isinstance(created, server.SessionCreated)
        return cls(connection, created.session, max_tool_rounds=max_tool_rounds)

    @classmethod
    async def resume(
        cls,
        resumption: Resumption,
        handle: str,
        *,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
    ) -> Chat:
        """The chat that `handle` opens. Raises `SessionLost`, `ConnectionFailed`."""
        resumption.handle = handle
        chat = cls._resumed(*await resumption.connect(), resumption, max_tool_rounds)
        chat._tools = tools_of(tools)
        return chat

    @classmethod
    def _resumed(
        cls,
        transport: Transport,
        resumed: server.SessionResumed,
        resumption: Resumption,
        max_tool_rounds: int,
    ) -> Chat:
        connection = Connection(transport, resumption, running=resumed.running)
        connection.buffer.stale = True
        return cls(connection, resumed.session, max_tool_rounds=max_tool_rounds)

    @property
    def handle(self) -> str | None:
        """Opens this session again, also from another process; None where the server gave none."""
        return self._connection.handle

    # --- turns ---

    @property
    def last(self) -> Finished:
        """The last response that ended: its text, usage, `kv`, `ttft_ms`, `logprobs`. A turn that was refused
        or still runs does not change it. Raises `LookupError` before the first."""
        for rounds in reversed(self._turns):
            if rounds:
                return rounds[-1]
        raise LookupError("No response has ended yet")

    @property
    def rounds(self) -> list[Finished]:
        """The responses of the last turn: more than one where tools were run."""
        return list(self._turns[-1])

    def say(self, text: str | None = None, /, **overrides: Any) -> Turn:
        """Say `text` (None: only ask for a reply) and iterate over the pieces of the reply.

        Tools with a callable are run, and the reply goes on with their outputs. `overrides` are fields of
        `response.create` for this turn alone (`frames.response.ResponseParams`), with the sampling fields
        (`frames.sampling.SamplingFields`). Nothing is sent before the first piece is read.
        """
        first = [] if text is None else [client.ItemCreate(item=named(MessageItem.of("user", text)))]
        create, rounds = create_of(overrides), self._max_tool_rounds
        return Turn(self._connection, create, first, self._tools, rounds, self._claim, self._detached)

    def respond(self, **overrides: Any) -> Reply:
        """Ask for one response and iterate over its typed events. Tools are not run: see `last.calls`."""
        return Reply(self._connection, create_of(overrides), claim=self._claim)

    def run(
        self,
        prompt: str | None = None,
        tools: Iterable[ToolLike] | None = None,
        *,
        limits: RunLimits | None = None,
        trace: Iterable[Tracer] = (),
        hint_seconds: float | None = HINT_SECONDS,
        **overrides: Any,
    ) -> Run:
        """Let the model work on `prompt` with tools until it is done or a limit is reached.

        Iterate over typed events (`agent.events`); the last is `RunDone`. `tools` replace the session's (None:
        keep them). A tool starts as soon as its call is complete. Each event is also given to the callables in
        `trace`. The server is sent a hint of waits of at least `hint_seconds`, so that KV is restored in time
        (None, or a lease of your own: no hints). `overrides` as for `say`. Nothing is sent before the first
        event is read. Raises `ToolInvalid` and what `say` raises.
        """
        table = self._tools if tools is None else tools_of(tools)
        first = [] if prompt is None else [client.ItemCreate(item=named(MessageItem.of("user", prompt)))]

        async def claim(run: Run) -> None:
            await self._claim(run, self._connection.quiet)
            if not (self._updated and [one.definition for one in table.values()] == self.session.tools):
                self.session = await self._update({}, table)
            self._tools, self._outputs, self._tracers = table, run.outputs, tracers

        hints = None if self._leased else hint_seconds
        limits = limits or RunLimits()
        create, tracers = create_of(overrides), Tracers(trace)
        return Run(self._connection, create, first, table, limits, claim, tracers, hints, self._detached)

    def input(self, role: client.TypedRole = "user") -> TextInput:
        """A message that is sent while it is typed or spoken; the server prefills it meanwhile (`TextInput`).

        It may be sent while a reply runs, also from the loop that reads the reply: the item stands after it.
        """
        return TextInput(self._connection, role)

    def output(self, call: FunctionCallItem) -> TextInput:
        """The output of `call`, sent while the tool runs; the server prefills it meanwhile (`TextInput`). For
        calls that the caller answers. `run` streams what tools with a callable yield by itself."""
        return TextInput(self._connection, call_id=call.call_id)

    async def cancel(self) -> None:
        """Cut the running reply; the text so far stays. Does nothing when nothing runs."""
        current = self._reader()
        if isinstance(current, Turn | Run):
            current.stop()
        self._current = None
        await self._connection.cut()

    async def interrupt(self, heard: int | str | None = None) -> str:
        """Cut the last reply, running or over, where it was heard or shown; returns the text that stays.

        `heard`: how many characters of its text (Unicode code points), or that text itself; None: as much as
        was read. The model remembers no more than that. May be called from the loop that reads the turn, from
        another task, or after a loop that was left by `break`; a running reply is stopped. Raises `ValueError`
        where the reply does not begin so, `LookupError` where there is none, `ServerError`.
        """
        reading = self._reader()
        if isinstance(reading, Turn | Run):
            reading.stop()
        reply = reading.reply if isinstance(reading, Turn | Run) else reading
        if reply is None and self._turns[-1].latest is not None:
            return await self._interrupt_left(self._turns[-1].latest, heard)
        texts = reply.texts if reply is not None else self.last.messages
        end = characters_heard("".join(texts.values()), heard)
        witness = None if reply is None else reply.witness
        place = place_in(texts, end)
        if place is None:  # no text came
            await self.cancel()
            await self._connection.ended(witness)
            late = None if reply is None else place_in(reply.texts, 0)
            if late is not None:
                await self._connection.truncate(*late, witness)
            return ""
        await self._connection.truncate(*place, witness)
        return "".join(texts.values())[:end]

    async def _interrupt_left(self, left: Progress, heard: int | str | None) -> str:
        """Stop and cut a reply that no task reads any more, once as much has come as was `heard`."""
        wanted = len(left.text) if heard is None else len(heard) if isinstance(heard, str) else heard
        await self._connection.ended(left.take, lambda: len(left.text) >= wanted)
        end = characters_heard(left.text, wanted if heard is None else heard)
        if not left.texts:  # no text came
            await self.cancel()
            await self._connection.ended(left.take)
        place = place_in(left.texts, end)
        if place is not None:
            await self._connection.truncate(*place, left.take)
            left.shorten(*place)
        return left.text

    async def rewind(self, to: AnyItem | str | int) -> server.SessionRewound:
        """Go back: the item `to` (or its id) becomes the last; `"root"` removes all.

        An int is a number of tokens, as `usage` counts them: `last.usage.input_tokens` takes the last reply
        back. Raises `ServerError`.
        """
        await self._idle()
        target = to if isinstance(to, str | int) else to.id or ""
        return await self._connection.request(client.SessionRewind(to=target), server.SessionRewound)

    def steer(self, text: str, **overrides: Any) -> Turn:
        """Say `text` while a turn is being read: that turn ends in order, and the reply to `text` follows.

        Iterate over what is returned and no longer over the first turn; or, where another task reads that one,
        let it read to the end. `overrides` as for `say`.
        """
        create = create_of(overrides)
        steer = client.ResponseSteer(input=[named(MessageItem.of("user", text))], response=create.response)
        rounds, claim = self._max_tool_rounds, self._take_over
        return Turn(self._connection, create, [], self._tools, rounds, claim, self._detached, steer)

    async def fork(
        self, children: int = 1, at: AnyItem | str | None = None, *, shared: bool = False
    ) -> list[Chat]:
        """New sessions that go on from here, or from the item `at`, with this session's history.

        While a turn runs, they have as much of it as has come. They are closed with this chat, or before, as
        `async with` blocks. Each has a connection of its own, or with `shared` they share this chat's; a lost
        one is made again for each alone. Raises `ServerError`, `SessionLost`, `ConnectionFailed`.
        """
        resumption = self._connection.resumption()
        item_id = at if at is None or isinstance(at, str) else at.id
        forked = await self._connection.request(
            client.SessionFork(at=item_id, children=children), server.SessionForked
        )
        chats: list[Chat] = []
        for fork in forked.sessions:
            own = resumption.another(fork.handle)
            attached = await self._attach(fork, own) if shared else None
            if attached is None:
                attached = await own.patience.retry(own.connect)
            chat = self._resumed(*attached, own, self._max_tool_rounds)
            chat._tools = self._tools
            self._children.append(chat)
            chats.append(chat)
        return chats

    async def tree(self) -> list[server.Relative]:
        """All sessions of this one's fork tree, parents before children. Raises `ServerError`."""
        await self._idle()
        found: list[server.Relative] = []
        after: str | None = None
        while True:
            page = await self._connection.request(
                client.SessionTree(limit=MAX_LISTED, after=after), server.SessionTreeListed
            )
            found += page.sessions
            if not page.has_more:
                return found
            after = page.next

    async def name(self, name: str) -> None:
        """Name this session in its fork tree; `""` removes the name. Raises `ServerError` for a used name."""
        await self._idle()
        await self._connection.request(client.SessionName(name=name), server.SessionNamed)

    async def prune(self, branch: Chat | server.Relative | str) -> None:
        """Delete another session of the fork tree, by its chat, its entry in `tree` or its id. What other
        sessions share with it stays. Raises `ServerError`."""
        await self._idle()
        if branch is self:
            branch = self.session.id or ""  # which is refused
        if isinstance(branch, Chat):
            others = [child for child in self._children if child is not branch]
            self._children, branch._children = others + branch._children, []  # its forks live on
            await branch.aclose()
            branch = branch.session.id or ""
        session_id = branch if isinstance(branch, str) else branch.id
        prune = client.SessionPrune(session=session_id)
        await self._connection.request(prune, server.SessionPruned, lambda event: event.session == session_id)

    # --- the conversation ---

    async def add(self, item: AnyItem, previous_item_id: str | None = None) -> AnyItem:
        """Add an item at the end, or after `previous_item_id`; returns it as the server has it. An item
        without an id gets a new one. Raises `ServerError`."""
        await self._idle()
        item = named(item)
        create = client.ItemCreate(item=item, previous_item_id=previous_item_id)
        done = await self._connection.request(create, server.ItemDone, lambda event: event.item.id == item.id)
        return done.item

    async def answer(self, call: FunctionCallItem, output: str) -> AnyItem:
        """Add the output of a call; then `say()` or `respond()` lets the model go on."""
        return await self.add(output_of(call, output).item)

    async def retrieve(self, item_id: str) -> AnyItem:
        """An item as the server has it. Raises `ServerError`."""
        await self._idle()
        retrieve = client.ItemRetrieve(item_id=item_id)
        found = await self._connection.request(
            retrieve, server.ItemRetrieved, lambda event: event.item.id == item_id
        )
        return found.item

    async def delete(self, item_id: str) -> None:
        """Take an item out of the conversation. Raises `ServerError`."""
        await self._idle()
        await self._connection.delete(item_id)

    async def update(self, *, tools: Iterable[ToolLike] | None = None, **fields: Any) -> SessionResource:
        """Change the given fields of the session. Raises `FrameError`, `ToolInvalid`, `ServerError`."""
        await self._idle()
        table = None if tools is None else tools_of(tools)
        self.session = await self._update(fields, table)
        self._tools = self._tools if table is None else table
        return self.session

    async def _update(
        self, fields: dict[str, Any], tools: Mapping[str, Tool] | None = None
    ) -> SessionResource:
        """Change the given fields and tools; the whole configuration. Raises `FrameError`, `ServerError`."""
        if tools is not None:
            fields = {**fields, "tools": [tool.definition for tool in tools.values()]}
        update = client.SessionUpdate(session=converted(fields, SessionPatch, "session"))
        before, self._updated = self._updated, False

        def matches(
            event: server.SessionUpdated,
        ) -> bool:  # not the answer to an update that was not waited for
            return tools is None or [tool.name for tool in event.session.tools] == list(tools)

        try:
            updated = await self._connection.request(update, server.SessionUpdated, matches)
        except FrameError:
            self._updated = before  # nothing was sent
            raise
        except ServerError:
            self._updated = True  # nothing has changed
            raise
        self._updated = True
        return updated.session

    # --- where its KV is ---

    async def lease(
        self, priority: int | None = None, ttl: float | None = None, returns_in: float | None = None
    ) -> server.SessionLeased:
        """Keep this session's KV before that of others, and restore it first, for `ttl` seconds.

        The receipt says what the server grants. `ttl=0` ends the lease; with `returns_in` (seconds) it only
        hints when the session is needed again, which costs no budget. Raises `ServerError`.
        """
        await self._idle()
        lease = client.SessionLease(priority=priority, ttl=ttl, returns_in=returns_in)
        leased = await self._connection.request(lease, server.SessionLeased)
        self._leased = leased.ttl > 0
        return leased

    async def stage(self) -> server.SessionStaged:
        """Restore the session's KV to the device, as the next turn comes soon. Raises `ServerError`."""
        await self._idle()
        return await self._connection.request(client.SessionStage(), server.SessionStaged)

    async def settle(self, tier: Literal["host", "disk"] = "disk") -> server.SessionSettled:
        """Offload the session's KV to `tier`, as the next turn is far. Raises `ServerError`."""
        await self._idle()
        return await self._connection.request(client.SessionSettle(tier=tier), server.SessionSettled)

    # --- by hand ---

    async def send(self, event: client.ClientEvent) -> str:
        """Send any client event; returns its `event_id`."""
        return await self._connection.send(event)

    async def events(self) -> AsyncIterator[server.ServerEvent]:
        """All events as they come. Raises `ChatBusy` while a turn is being read."""
        while True:
            yield await self._connection.receive()

    async def aclose(self) -> None:
        """Close the session's connection, and those of the sessions forked from it.

        A running turn that no task reads and no variable holds is cut; another goes on at the server for a
        while, so that the session can be resumed. Tools that still run are cancelled.
        """
        children, self._children = self._children, []
        if self._outputs is not None:
            await self._outputs.aclose()
        await self._detached.aclose()
        await self._tracers.aclose()
        for child in children:
            await child.aclose()
        begun, reading = self._current is not None, self._reader()
        await self._connection.aclose(cut=begun and (reading is None or reading.given_up))

    async def __aenter__(self) -> Chat:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _attach(
        self, fork: server.Fork, resumption: Resumption
    ) -> tuple[Transport, server.SessionResumed] | None:
        """A fork on this chat's connection; None where that is lost meanwhile."""
        try:
            shared = await self._connection.share(self.session.id or "")
            transport = await shared.attach(fork.id, fork.handle)
            return transport, await resumption.greeted(transport)
        except SessionLost:
            raise
        except ConnectionLost:
            return None

    # --- one turn at a time ---

    def _reader(self) -> _Reading | None:
        return None if self._current is None else self._current()

    async def _claim(self, reading: _Reading, clear: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let this turn, and no other, read from now on. Of several that begin at once, one is let."""
        async with self._claiming:
            await self._idle(clear or self._connection.make_way)
            self._follow(reading)

    async def _take_over(self, reading: _Reading) -> None:
        """Let this turn read from now on; the server ends the one that is read now."""
        current = self._reader()
        if isinstance(current, Turn | Run):
            current.stop()
        self._follow(reading)

    def _follow(self, reading: _Reading) -> None:
        self._current = weakref.ref(reading)
        ended = [rounds for rounds in self._turns if rounds][-1:]
        self._turns = [*ended, self._turns[-1], reading.rounds]

    async def _idle(self, clear: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel what runs and is no longer read. Raises `ChatBusy` while a turn is being read."""
        current = self._reader()
        if current is not None and current.running:
            if not current.given_up:
                raise ChatBusy("A turn is being read on this chat: read it to its end or cancel it first")
            if isinstance(current, Turn | Run):
                current.close()
        self._current = None
        await (clear or self._connection.quiet)()
        outputs, self._outputs = self._outputs, None
        if outputs is not None:  # each call of a run that was left gets an output
            await outputs.finish()
        await self._tracers.aclose()
