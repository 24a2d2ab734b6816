"""A session as the client has it: say something, read what comes, never resend the history.

    async for piece in chat.say("What is the weather in Rome?"):
        print(piece, end="")
    print(chat.last.kv, chat.last.ttft_ms)

Knows nothing of sockets.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Literal, TypeAlias

import anyio

from . import branches, editing, keeping
from .agent.answers import Answers
from .agent.limits import RunLimits
from .agent.run import HINT_SECONDS, Run
from .agent.tracing import Tracer, Tracers
from .configuring import Configuration
from .connection import Connection
from .detached import Detached
from .errors import ChatBusy, ConnectionLost, SessionLost
from .frames.client import ClientEvent, ItemCreate, ResponseSteer, SessionFork, TypedRole
from .frames.items import AnyItem, FunctionCallItem, MessageItem
from .frames.server import (
    Fork,
    Relative,
    ServerEvent,
    SessionCreated,
    SessionForked,
    SessionLeased,
    SessionResumed,
    SessionRewound,
    SessionSettled,
    SessionStaged,
)
from .frames.session import SessionResource
from .params import create_of
from .reconnect import Return
from .reply import Finished, Progress, Reply, Rounds, characters_heard, place_in, said_in
from .text_input import TextInput
from .tools.tool import Tool, ToolLike, tools_of
from .transport import Transport
from .turn import Turn, named, output_of

MAX_TOOL_ROUNDS = 8
_Reading: TypeAlias = Turn | Run | Reply


class Chat:
    """One session on one connection, made by `Client.session`.

    One turn runs at a time. A turn that was begun and is no longer referenced, or whose reading was cancelled
    (by a timeout, say), is cut when the next begins; while one is still being read, another raises `ChatBusy`.
    """

    def __init__(
        self, connection: Connection, session: SessionResource, *, max_tool_rounds: int = MAX_TOOL_ROUNDS
    ) -> None:
        self._connection = connection
        self._max_tool_rounds = max_tool_rounds
        self._tools: dict[str, Tool] = {}
        self._current: weakref.ref[_Reading] | None = None
        self._answers: Answers | None = None  # of the last run's tools
        self._tracers = Tracers(())  # of the last run
        self._apart = Detached()  # tools that would not end
        self._leased = False
        self._claiming = anyio.Lock()
        self._configuration = Configuration(connection)
        self._turns: list[Rounds] = [Rounds()]  # rounds of the last turns; one that is steered ends late
        self._children: list[Chat] = []
        self.session = session

    @classmethod
    async def begin(
        cls, transport: Transport, *, back: Return | None = None, max_tool_rounds: int = MAX_TOOL_ROUNDS
    ) -> Chat:
        """The chat on a fresh connection, once the server has greeted; `ServerError`, `ConnectionLost`.

        `back` finds the way back when the connection is lost.
        """
        connection = Connection(transport, back)
        try:
            created = await connection.answer("", lambda event: isinstance(event, SessionCreated))
        except BaseException:
            await connection.aclose()
            raise
        assert isinstance(created, SessionCreated)
        return cls(connection, created.session, max_tool_rounds=max_tool_rounds)

    @classmethod
    async def resume(
        cls,
        back: Return,
        handle: str,
        *,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
    ) -> Chat:
        """The chat that `handle` opens; `SessionLost`, `ConnectionFailed`."""
        back.handle = handle
        chat = cls._come_back(*await back.connect(), back, max_tool_rounds)
        chat._tools = tools_of(tools)
        return chat

    @classmethod
    def _come_back(cls, transport: Transport, resumed: SessionResumed, back: Return, rounds: int) -> Chat:
        connection = Connection(transport, back, running=resumed.running)
        connection.buffer.stale = True
        return cls(connection, resumed.session, max_tool_rounds=rounds)

    @property
    def handle(self) -> str | None:
        """What opens this session again, on another connection or in another process; None: nothing does."""
        return self._connection.handle

    # --- turns ---

    @property
    def last(self) -> Finished:
        """The last response that ended: its text, usage, `kv`, `ttft_ms`, `logprobs`.

        A turn that was refused, or is still on its way, leaves it as it was. LookupError before there is one.
        """
        for rounds in reversed(self._turns):
            if rounds:
                return rounds[-1]
        raise LookupError("No response has ended yet")

    @property
    def rounds(self) -> list[Finished]:
        """The responses of the last turn: more than one where tools were run."""
        return list(self._turns[-1])

    def say(self, text: str | None = None, /, **overrides: Any) -> Turn:
        """Say `text` (None: let the model speak) and iterate over the pieces of its reply.

        Tools given as callables are run and the reply goes on with what they answer. `overrides` are fields
        of `response.create` for this turn alone, the sampling fields among them
        (`frames.sampling.SamplingFields`). Nothing is sent before the first piece is asked for.
        """
        first = [] if text is None else [ItemCreate(item=named(MessageItem.of("user", text)))]
        create, rounds = create_of(overrides), self._max_tool_rounds
        return Turn(self._connection, create, first, self._tools, rounds, self._claim, self._apart)

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
        """Let the model work on `prompt` with tools, until it is done or a limit is reached; iterate over
        typed events (`agent.events`), the last is `RunDone`.

        `tool` become the session's; None: those it has. A tool starts the moment its call is whole. `trace`
        are callables that are told of each event. A wait of at least `hint_seconds` is told to the server, so
        that KV is back in time (None, or a lease of your own: never). `overrides` as for `say`. Nothing is
        sent before the first event is asked for. Raises `ToolInvalid`; what `say` raises.
        """
        table = self._tools if tools is None else tools_of(tools)
        first = [] if prompt is None else [ItemCreate(item=named(MessageItem.of("user", prompt)))]

        async def claim(run: Run) -> None:
            await self._claim(run, self._connection.quiet)
            if not self._configuration.offers(self.session, table):
                self.session = await self._configuration.change({}, table)
            self._tools, self._answers, self._tracers = table, run.answers, tracers

        hints = None if self._leased else hint_seconds
        limits = limits or RunLimits()
        create, tracers = create_of(overrides), Tracers(trace)
        return Run(self._connection, create, first, table, limits, claim, tracers, hints, self._apart)

    def input(self, role: TypedRole = "user") -> TextInput:
        """A message sent while it is typed or spoken, and computed meanwhile: see `TextInput`.

        It may come while a reply runs, also in the loop that reads it, and nothing of that is lost: the item
        stands after that reply.
        """
        return TextInput(self._connection, role)

    def output(self, call: FunctionCallItem) -> TextInput:
        """What a tool answers to `call`, sent while it runs, and computed meanwhile: see `TextInput`.

        For calls that are answered here: tools with a callable stream what they yield by themselves, in `run`.
        """
        return TextInput(self._connection, call_id=call.call_id)

    async def cancel(self) -> None:
        """Cut the running reply short; what was said stays. Harmless when nothing runs."""
        current = self._reader()
        if isinstance(current, Turn | Run):
            current.stop()
        self._current = None
        await self._connection.cut()

    async def interrupt(self, heard: int | str | None = None) -> str:
        """Cut the last reply where it was heard or shown, whether it runs or is over; returns what stays.

        `heard`: how many characters of its text (Unicode code points), or that text itself; None: as much as
        was read. The model remembers no more than that. May be called from the loop that reads the turn, from
        another task, or behind a loop that was left by `break`: the reply that was left is the last one, and
        where it still runs it is stopped. Raises `ValueError` where the reply does not begin so, `LookupError`
        where there is none, `ServerError`.
        """
        reading = self._reader()
        if isinstance(reading, Turn | Run):
            reading.stop()
        reply = reading.reply if isinstance(reading, Turn | Run) else reading
        if reply is None and self._turns[-1].latest is not None:
            return await self._interrupt_left(self._turns[-1].latest, heard)
        said = reply.said if reply is not None else said_in(self.last)
        end = characters_heard("".join(said.values()), heard)
        witness = None if reply is None else reply.witness
        place = place_in(said, end)
        if place is None:  # not a word came
            await self.cancel()
            await self._connection.ended(witness)
            said_late = None if reply is None else place_in(reply.said, 0)
            if said_late is not None:
                await self._connection.truncate(*said_late, witness)
            return ""
        await self._connection.truncate(*place, witness)
        return "".join(said.values())[:end]

    async def _interrupt_left(self, left: Progress, heard: int | str | None) -> str:
        """Cut a reply that nobody reads any more, and stop it; where less has come than was `heard`, when that
        has."""
        wanted = len(left.text) if heard is None else len(heard) if isinstance(heard, str) else heard
        await self._connection.ended(left.take, lambda: len(left.text) >= wanted)
        end = characters_heard(left.text, wanted if heard is None else heard)
        if not left.texts:  # not a word came
            await self.cancel()
            await self._connection.ended(left.take)
        place = place_in(left.texts, end)
        if place is not None:
            await self._connection.truncate(*place, left.take)
            left.shorten(*place)
        return left.text

    async def rewind(self, to: AnyItem | str | int) -> SessionRewound:
        """Go back: the item `to` (or its id) is the last from now on; `"root"` forgets all.

        An int is a number of tokens, as `usage` counts them: `last.usage.input_tokens` takes the last reply
        back. What is said next follows on that: say it again, or something else. Raises `ServerError`.
        """
        await self._idle()
        target = to if isinstance(to, str | int) else to.id or ""
        return await branches.rewind(self._connection, target)

    def steer(self, text: str, **overrides: Any) -> Turn:
        """Say `text` while a turn is being read: that ends in order, and the reply to this one follows.

        Iterate over what is returned, and no more over the other; or let the other task that reads it read on:
        it comes to an end. `overrides` as for `say`.
        """
        create = create_of(overrides)
        steer = ResponseSteer(input=[named(MessageItem.of("user", text))], response=create.response)
        rounds, claim = self._max_tool_rounds, self._take_over
        return Turn(self._connection, create, [], self._tools, rounds, claim, self._apart, steer)

    async def fork(
        self, children: int = 1, at: AnyItem | str | None = None, *, shared: bool = False
    ) -> list[Chat]:
        """Sessions that go on from here, or from the item `at`, each with all that is known to this one.

        Also while a turn is read: as far as it has come it is theirs. They are closed with this chat, or
        before, as `async with` blocks. Each has a connection of its own, or they share this chat's; one that is
        lost is made again for each alone. Raises `ServerError`, `SessionLost`, `ConnectionFailed`.
        """
        back = self._connection.way_back()
        item_id = at if at is None or isinstance(at, str) else at.id
        forked = await self._connection.request(SessionFork(at=item_id, children=children), SessionForked)
        chats: list[Chat] = []
        for fork in forked.sessions:
            way = back.another(fork.handle)
            reached = (await self._beside(fork, way) if shared else None) or await way.persist()
            chat = self._come_back(*reached, way, self._max_tool_rounds)
            chat._tools = self._tools
            self._children.append(chat)
            chats.append(chat)
        return chats

    async def tree(self) -> list[Relative]:
        """All sessions that were forked from one another with this one among them, parents before children.

        Raises `ServerError`.
        """
        await self._idle()
        return await branches.tree(self._connection)

    async def name(self, name: str) -> None:
        """Name this branch of the tree; `""` takes the name back. Raises `ServerError`: another has it."""
        await self._idle()
        await branches.name(self._connection, name)

    async def prune(self, branch: Chat | Relative | str) -> None:
        """End another session of the tree for good, by its chat, its place in the tree or its id.

        What others share with it stays theirs. Raises `ServerError`.
        """
        await self._idle()
        if branch is self:
            branch = self.session.id or ""  # which is refused
        if isinstance(branch, Chat):
            others = [child for child in self._children if child is not branch]
            self._children, branch._children = others + branch._children, []  # its forks live on
            await branch.aclose()
            branch = branch.session.id or ""
        await branches.prune(self._connection, branch if isinstance(branch, str) else branch.id)

    # --- the conversation ---

    async def add(self, item: AnyItem, previous_item_id: str | None = None) -> AnyItem:
        """Add an item at the end, or after the one named; returns it as the server has it.

        It has the id that `item` names, or one made here. Raises `ServerError`.
        """
        await self._idle()
        return await editing.add(self._connection, item, previous_item_id)

    async def answer(self, call: FunctionCallItem, output: str) -> AnyItem:
        """Add what a tool answered; then `say()` or `respond()` lets the model go on."""
        return await self.add(output_of(call, output).item)

    async def retrieve(self, item_id: str) -> AnyItem:
        """An item as the server has it. Raises `ServerError`."""
        await self._idle()
        return await editing.retrieve(self._connection, item_id)

    async def delete(self, item_id: str) -> None:
        """Take an item out of the conversation. Raises `ServerError`."""
        await self._idle()
        await self._connection.delete(item_id)

    async def update(self, *, tools: Iterable[ToolLike] | None = None, **fields: Any) -> SessionResource:
        """Change the session's fields that are given. Raises `FrameError`, `ToolInvalid`, `ServerError`."""
        await self._idle()
        table = None if tools is None else tools_of(tools)
        self.session = await self._configuration.change(fields, table)
        self._tools = self._tools if table is None else table
        return self.session

    # --- where its KV is ---

    async def lease(
        self, priority: int | None = None, ttl: float | None = None, returns_in: float | None = None
    ) -> SessionLeased:
        """Have this session's KV kept first, and brought back first, for `ttl` seconds; the receipt says what
        is really promised. `ttl=0` gives the lease back; with `returns_in` it only says, and costs no budget,
        when the session is wanted again. Raises `ServerError`.
        """
        await self._idle()
        leased = await keeping.lease(self._connection, priority, ttl, returns_in)
        self._leased = leased.ttl > 0
        return leased

    async def stage(self) -> SessionStaged:
        """The next turn comes soon: have the session's KV brought up, and wait for it. Raises `ServerError`."""
        await self._idle()
        return await keeping.stage(self._connection)

    async def settle(self, tier: Literal["host", "disk"] = "disk") -> SessionSettled:
        """The next turn is far: have the session's KV sent down to `tier`, and wait. Raises `ServerError`."""
        await self._idle()
        return await keeping.settle(self._connection, tier)

    # --- by hand ---

    async def send(self, event: ClientEvent) -> str:
        """Send any client event; returns its `event_id`."""
        return await self._connection.send(event)

    async def events(self) -> AsyncIterator[ServerEvent]:
        """All events as they come, whatever they belong to."""
        while True:
            yield await self._connection.receive()

    async def aclose(self) -> None:
        """End the session's connection, and those of the sessions forked from it.

        A turn that was begun and that nobody reads any more is cut; one that is still read or held goes on for
        a while, for who opens the session again. Tools that were left behind are cancelled.
        """
        children, self._children = self._children, []
        if self._answers is not None:
            await self._answers.aclose()
        await self._apart.aclose()
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

    async def _beside(self, fork: Fork, back: Return) -> tuple[Transport, SessionResumed] | None:
        """A fork on this chat's connection; None where that is lost meanwhile."""
        try:
            shared = await self._connection.share(self.session.id or "")
            transport = await shared.attach(fork.id, fork.handle)
            return transport, await back.greeted(transport)
        except SessionLost:
            raise
        except ConnectionLost:
            return None

    # --- one turn at a time ---

    def _reader(self) -> _Reading | None:
        return None if self._current is None else self._current()

    async def _claim(self, reading: _Reading, clear: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let this turn, and no other, read from now on: of several that begin at once, one."""
        async with self._claiming:
            await self._idle(clear or self._connection.make_way)
            self._follow(reading)

    async def _take_over(self, reading: _Reading) -> None:
        """Let this turn read from now on: the one that is read now ends for it."""
        current = self._reader()
        if isinstance(current, Turn | Run):
            current.stop()
        self._follow(reading)

    def _follow(self, reading: _Reading) -> None:
        self._current = weakref.ref(reading)
        ended = [rounds for rounds in self._turns if rounds][-1:]
        self._turns = [*ended, self._turns[-1], reading.rounds]

    async def _idle(self, clear: Callable[[], Awaitable[None]] | None = None) -> None:
        """Make sure that nothing runs: cancel what nobody reads. Raises `ChatBusy` while somebody does."""
        current = self._reader()
        if current is not None and current.running:
            if not current.given_up:
                raise ChatBusy("A turn is being read on this chat: read it to its end or cancel it first")
            if isinstance(current, Turn | Run):
                current.close()
        self._current = None
        await (clear or self._connection.quiet)()
        answers, self._answers = self._answers, None
        if answers is not None:  # of a run that was left: the conversation owes no answers
            await answers.settle()
        await self._tracers.aclose()
