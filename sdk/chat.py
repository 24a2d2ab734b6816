"""A session as a client has it: say something, read what comes; the history is never sent again.

async for piece in chat.say("What is the weather in Rome?"):
    print(piece, end="")
print(chat.last.kv, chat.last.ttft_ms)
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias, Unpack

import anyio
import msgspec
from msgspec import UNSET, UnsetType

from .agent.calls import CallOutputs
from .agent.run import HINT_SECONDS, Run, RunLimits
from .agent.tracing import Tracer, Tracers
from .connection.connection import Connection
from .connection.reconnect import Resumption
from .connection.responses import Finished, Progress, Rounds, characters_heard, end_in, is_aside
from .connection.transport import Transport
from .errors import ChatBusy, ConnectionLost, FrameError, NoSummary, ServerError, SessionLost
from .frames import client, server
from .frames.items import AnyItem, FunctionCallItem, MessageItem
from .frames.session import SessionPatch, SessionResource
from .params import (
    ResponseOptions,
    RunOptions,
    UpdateOptions,
    converted,
    create_of,
    named,
    output_of,
)
from .reading import Unread
from .reply import Reply
from .text_input import TextInput
from .tools.running import Detached
from .tools.tool import Tool, ToolLike, tools_of
from .turn import Turn

MAX_TOOL_ROUNDS = 8
NO_ITEM = "item_not_found"
"""The code of the error with which the server answers that it has no such item."""
MAX_LISTED = 1000
"""At most so many sessions are in one page of `Chat.tree`."""
SUMMARY_REQUEST = (
    "Summarise this conversation so far, for yourself: you will go on from your summary and the last turns. "
    "Keep names, numbers, decisions, open questions and results of tools. Write only the summary."
)
"""What `Chat.compact` asks the model for, if the caller gives no other request."""
SUMMARY_HEADING = "Summary of the conversation so far:\n"
"""What `Chat.compact` writes before the summary, in the message of the user that holds both."""
SUMMARY_TOKENS = 512
"""The `max_output_tokens` of a summary, if the caller sets none."""
_Reading: TypeAlias = Turn | Run | Reply


class Chat:
    """One session on one connection; `Client.session` makes it. `session`: its configuration, as the server
    told it last.

    One turn is read at a time. While that lasts, another turn raises `ChatBusy`, as do methods that say so;
    `steer` does not, and responses out of band (`respond`) run beside the turn. A turn that was left unread,
    because its object was freed or the task that read it was cancelled (for example by a timeout), is cancelled
    when the next begins.
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
    def resumed(
        cls,
        resumption: Resumption,
        opened: tuple[Transport, server.SessionResumed],
        tools: dict[str, Tool],
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
    ) -> Chat:
        """The chat of a session that was resumed. `opened`: its connection, and the server's answer;
        `resumption` makes the connection after each loss. `tools`: those to run from now on, by name."""
        transport, resumed = opened
        connection = Connection(transport, resumption, running=resumed.running)
        connection.buffer.stale = True
        chat = cls(connection, resumed.session, max_tool_rounds=max_tool_rounds)
        chat._tools = tools
        return chat

    def __repr__(self) -> str:
        current = self._reader()
        busy = "a turn is being read" if current is not None and current.running else "idle"
        state = "closed" if self._connection.closed else busy
        return f"<Chat {self.session.id} with {self.session.model}, {state}>"

    @property
    def handle(self) -> str | None:
        """A secret with which `Client.resume` opens this session again, also in another process; each use makes
        a new one, which is then here. None if the connection cannot be made again."""
        return self._connection.handle

    # --- turns ---

    @property
    def last(self) -> Finished:
        """The last response that ended: its text, usage, `kv`, `ttft_ms`, `logprobs`. A response that was
        refused or still runs does not change it; nor does one out of band that began while a turn was being
        read. Raises `LookupError` before the first."""
        for rounds in reversed(self._turns):
            if rounds:
                return rounds[-1]
        raise LookupError("No response has ended yet")

    @property
    def rounds(self) -> list[Finished]:
        """The responses of the last turn that have ended, in order: several if tools were run in between. A new
        list."""
        return list(self._turns[-1])

    def say(self, text: str | None = None, /, **overrides: Unpack[ResponseOptions]) -> Turn:
        """Begin a turn: `text` becomes a message of the user (None: no message is added), and the model
        replies. Iterate over the pieces of the reply's text, or `await` the turn: that reads to the end and
        gives the last response. Nothing is sent before the first piece is read.

        If the model calls a tool of the session that has a callable, the tool is run, and the reply goes on
        with its output. `overrides`: fields of `response.create` for this turn alone
        (`frames.response.ResponseParams`), with the sampling fields (`frames.sampling.SamplingFields`). Raises
        `FrameError` or `ToolInvalid` at once if they are wrong; reading raises what `Turn` raises.
        """
        return self._turn(create_of(overrides), _said(text), self._claim, Unread("chat.say(...)"))

    def respond(self, **overrides: Unpack[ResponseOptions]) -> Reply:
        """Ask for one response, without a new message. Iterate over its server events, or `await` the finished
        response. Tools are not run: the calls are in `last.calls`. `overrides`: fields of `response.create`,
        also sampling fields, for this response alone. Nothing is sent before the first event is read.

        With `conversation="none"` the response is out of band: it changes no history, and runs and is read
        beside a turn and beside others. A turn that begins does not cancel it. If it is not read to its end, it
        goes on at the server until it ends or the chat is closed.
        """
        create, unread = create_of(overrides), Unread("chat.respond(...)")
        if is_aside(create):
            return Reply(self._connection, create, claim=self._begin_aside, unread=unread, beside=True)
        return Reply(self._connection, create, claim=self._claim, unread=unread)

    def run(
        self,
        prompt: str | None = None,
        tools: Iterable[ToolLike] | None = None,
        *,
        limits: RunLimits | None = None,
        trace: Iterable[Tracer] = (),
        hint_seconds: float | None = HINT_SECONDS,
        **overrides: Unpack[RunOptions],
    ) -> Run:
        """Let the model work with tools until it is done or a limit is reached. `prompt` becomes a message of
        the user (None: no message is added). Iterate over typed events (`agent.events`), of which the last is
        `RunDone`, or `await` that. Nothing is sent before the first event is read.

        `tools` replace the session's, also for later turns (None: they stay). A tool starts as soon as its call
        is complete. `limits`: None: those of `RunLimits()`. Each event is also given to the callables in
        `trace`. If the tools of a step are expected to take `hint_seconds` or more, the server is told when the
        session is needed again, so that it restores the KV in time (None, or while you hold a lease: it is not
        told). `overrides`: fields of `response.create`, also sampling fields, for each response of the run.
        Raises `ToolInvalid` or `FrameError` at once; reading raises what `Run` raises.
        """
        table = self._tools if tools is None else tools_of(tools)

        async def claim(run: Run) -> None:
            await self._claim(run, self._connection.quiet)
            if not (self._updated and [one.definition for one in table.values()] == self.session.tools):
                self.session = await self._update({}, table)
            self._tools, self._outputs, self._tracers = table, run.outputs, tracers

        create, tracers = create_of(overrides), Tracers(trace)
        return Run(
            self._connection,
            create,
            _said(prompt),
            table,
            limits or RunLimits(),
            claim,
            tracers,
            None if self._leased else hint_seconds,
            self._detached,
            Unread("chat.run(...)"),
        )

    def input(self, role: client.TypedRole = "user") -> TextInput:
        """A message of `role` that is sent in pieces, while it is typed or spoken; the server prefills it
        meanwhile. Nothing is sent before its first piece.

        A reply may run meanwhile, and its reader may send the pieces: the message stands after the reply.
        `say()` then asks for an answer to the message.
        """
        return TextInput(self._connection, role)

    def output(self, call: FunctionCallItem) -> TextInput:
        """The output of the tool call `call`, sent in pieces while the tool runs; the server prefills it
        meanwhile. It is for calls that you answer yourself: `run` sends what tools with a callable yield."""
        return TextInput(self._connection, call_id=call.call_id)

    async def cancel(self) -> None:
        """Cancel the running turn; its text so far stays in the conversation, and it asks for no further
        response. Returns when the cancel is sent, before the reply has ended. Responses out of band go on. Does
        nothing if no turn runs."""
        if (current := self._reader()) is not None:
            current.stop()
        self._current = None
        await self._connection.cut()

    async def interrupt(self, heard: int | str | None = None) -> str:
        """Cut the last reply, whether it runs or is over, after what the user has heard or seen of it. Returns
        the text that stays: the model remembers no more of that reply. A running reply is cancelled, and its
        turn asks for no further response.

        `heard`: how many characters of the reply's text (Unicode code points), or the beginning of the text
        itself; None: as much as was read here. It may be called from the loop that reads the turn, from another
        task, or after `break` left that loop. Raises `ValueError` if the reply is shorter or begins in another
        way, `LookupError` if there was none, `ServerError`.
        """
        reading = self._reader()
        reply = reading.reply if isinstance(reading, Turn | Run) else reading
        progress = self._turns[-1].latest if reply is None else reply.progress
        if progress is None:
            progress = Progress(self.last.response.id, self.last.messages)
        elif reply is None and heard is not None:  # no task reads it: wait until so much has come
            await self._connection.ended(progress.take, partial(progress.has, heard))
        take = progress.take if reply is None else reply.witness
        text = progress.text[: characters_heard(progress.text, heard)]
        if reading is not None:
            reading.stop()
        point = end_in(progress.texts, len(text))
        if point is None:  # no text came
            await self.cancel()
            await self._connection.ended(take)
            point = end_in(progress.texts, 0)
        if point is not None:
            item_id, end = point
            cut = client.ItemTruncate(item_id=item_id, text_end=end)
            matches = lambda event: event.item_id == item_id
            await self._connection.request(cut, server.ItemTruncated, matches, take)
            if reply is None:
                progress.shorten(item_id, end)
        return text

    async def rewind(self, to: AnyItem | str | int) -> server.SessionRewound:
        """Remove the end of the conversation: the item `to` (or the item with that id) becomes the last;
        `"root"` removes all.

        An int is a number of tokens that stay, counted from the beginning as `usage` counts them:
        `last.usage.input_tokens` takes the last reply back. Returns the server's answer: the last item and the
        tokens that are left. Raises `ChatBusy`, `ServerError`.
        """
        await self._idle()
        target = to if isinstance(to, str | int) else to.id or ""
        return await self._connection.request(client.SessionRewind(to=target), server.SessionRewound)

    def steer(self, text: str, /, **overrides: Unpack[ResponseOptions]) -> Turn:
        """End the turn that is being read, and let the model reply to `text`, a message of the user. The server
        ends the running response in order (`incomplete`, for the reason `steered`), keeps its text, and begins
        the next. Nothing is sent before the first piece of the returned turn is read.

        Iterate over the returned turn instead of the first one. If another task reads the first one, let it
        read to the end. `overrides`: fields of `response.create`, also sampling fields, for the new turn alone.
        """
        create = create_of(overrides)
        steer = client.ResponseSteer(input=[named(MessageItem.of("user", text))], response=create.response)
        return self._turn(create, [], self._take_over, Unread("chat.steer(...)"), steer)

    def _turn(
        self,
        create: client.ResponseCreate,
        first: list[client.ItemCreate],
        claim: Callable[[Turn], Awaitable[None]],
        unread: Unread,
        steer: client.ResponseSteer | None = None,
    ) -> Turn:
        rounds, apart = self._max_tool_rounds, self._detached
        return Turn(self._connection, create, first, self._tools, rounds, claim, apart, steer, unread)

    async def fork(
        self,
        children: int = 1,
        at: AnyItem | str | None = None,
        *,
        shared: bool = False,
        adapter: str | UnsetType | None = UNSET,
    ) -> list[Chat]:
        """Make `children` new sessions with this session's history, up to now or up to and with the item `at`
        (or the item with that id), and with its tools. Returns a chat for each. `adapter`: the name of the
        adapter (LoRA) that they are computed with; None: with none. Unset: with that of this session, whose KV
        they then share.

        While a turn runs, they have as much of its reply as has come. Each has a connection of its own; with
        `shared` they use this chat's, and one that loses it gets its own. They are closed with this chat, or
        earlier by `async with` or `aclose`. Raises `ServerError`, `SessionLost`, `ConnectionFailed`,
        `ConnectionLost`.
        """
        item_id = at if at is None or isinstance(at, str) else at.id
        fork = client.SessionFork(at=item_id, children=children, adapter=adapter)
        return await self._fork(fork, shared=shared)

    async def compact(
        self,
        turns: int = 2,
        *,
        request: str = SUMMARY_REQUEST,
        shared: bool = False,
        **overrides: Unpack[ResponseOptions],
    ) -> Chat:
        """Make a new session from this one with a shorter context: a summary, which the model writes now,
        stands for all turns but the last `turns` ones. Instructions and tools stay. This session
        does not change.

        The model answers `request` out of band, behind this session's context, so that only the request and the
        summary are computed. `overrides`: fields of `response.create` for that answer; `max_output_tokens` is
        512 unless given. The response with the summary becomes `last`. In the new session the summary is the
        first item of the context; the items that it stands for stay in the conversation, but the model does not
        read them.

        The new session is closed with this chat, or earlier. It has a connection of its own; with `shared` it
        uses this chat's. Raises `NoSummary` if the model wrote no text, and what `respond` and `fork` raise.
        """
        asked = MessageItem.of("user", request)
        fields: ResponseOptions = {"tool_choice": "none", "max_output_tokens": SUMMARY_TOKENS, **overrides}
        fields["conversation"] = "none"
        create = create_of(fields)
        reply = Reply(self._connection, msgspec.structs.replace(create, items=[asked]), claim=self._claim)
        async for _ in reply:
            pass
        text = "" if reply.finished is None else reply.finished.text.strip()
        if not text:
            raise NoSummary("The model wrote no summary: ask for one in other words")
        summary = MessageItem.of("user", SUMMARY_HEADING + text)
        compaction = client.ForkCompaction(summary=summary, turns=turns)
        (child,) = await self._fork(client.SessionFork(compact=compaction), shared=shared)
        return child

    async def _fork(self, fork: client.SessionFork, *, shared: bool) -> list[Chat]:
        resumption = self._connection.resumption()
        forked = await self._connection.request(fork, server.SessionForked)
        chats: list[Chat] = []
        for made in forked.sessions:
            own = resumption.another(made.handle)
            opened = await (self._attach(made, own) if shared else own.patience.retry(own.connect))
            chat = Chat.resumed(own, opened, self._tools, self._max_tool_rounds)
            self._children.append(chat)
            chats.append(chat)
        return chats

    async def tree(self) -> list[server.Relative]:
        """All sessions of this one's fork tree, parents before children: those that were forked from one first
        session, directly or through other forks. Raises `ChatBusy`, `ServerError`."""
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
        """Name this session in its fork tree; `""` removes the name. Raises `ServerError` if another session of
        the tree has the name, `ChatBusy`."""
        await self._idle()
        await self._connection.request(client.SessionName(name=name), server.SessionNamed)

    async def prune(self, branch: Chat | server.Relative | str) -> None:
        """Delete another session of the fork tree, given by its chat, its entry in `tree` or its id. A chat
        that is given is closed first. Its forks stay, and are now closed with this chat; what the session
        shares with others stays too. Raises `ServerError`, also for this session itself, and `ChatBusy`."""
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
        """Add `item` to the conversation, at the end or after the item `previous_item_id` (`"root"`: at the
        beginning). Returns the item as the server has it; one without an id gets a random one. Raises
        `ChatBusy`, `ServerError`."""
        await self._idle()
        item = named(item)
        create = client.ItemCreate(item=item, previous_item_id=previous_item_id)
        done = await self._connection.request(create, server.ItemDone, lambda event: event.item.id == item.id)
        return done.item

    async def answer(self, call: FunctionCallItem, output: str) -> AnyItem:
        """Add `output` as the output of the tool call `call`, at the end of the conversation; returns the item.
        The model goes on when you call `say()` or `respond()`. Raises what `add` raises."""
        return await self.add(output_of(call, output).item)

    async def retrieve(self, item_id: str) -> AnyItem:
        """The item with the id `item_id`, as the server has it. Raises `ServerError` if there is none,
        `ChatBusy`."""
        return (await self._retrieved(item_id)).item

    async def history(self, most: int | None = None) -> list[AnyItem]:
        """The last `most` items of the conversation (None: all of them), in order, as the server has them; also
        those that are out of the context. Each is asked for by itself. Raises `ServerError`, `ChatBusy`."""
        try:
            answer = await self._retrieved(None)
        except ServerError as error:
            if error.code != NO_ITEM:
                raise
            return []
        found = [answer.item]
        while answer.previous_item_id is not None and (most is None or len(found) < most):
            answer = await self._retrieved(answer.previous_item_id)
            found.append(answer.item)
        return found[::-1]

    async def _retrieved(self, item_id: str | None) -> server.ItemRetrieved:
        await self._idle()
        retrieve = client.ItemRetrieve(item_id=item_id)
        return await self._connection.request(
            retrieve, server.ItemRetrieved, lambda event: item_id in (None, event.item.id)
        )

    async def delete(self, item_id: str) -> None:
        """Remove the item with the id `item_id` from the conversation. Raises `ServerError` if there is none,
        `ChatBusy`."""
        await self._idle()
        await self._connection.delete(item_id)

    async def update(
        self, *, tools: Iterable[ToolLike] | None = None, **fields: Unpack[UpdateOptions]
    ) -> SessionResource:
        """Change the given fields of the session's configuration, for later turns; a field that is None gets
        the server's default. `tools` replace the session's tools and callables (None: they stay). Returns the
        whole configuration, which is in `session` too. Raises `FrameError`, `ToolInvalid`, `ServerError`,
        `ChatBusy`."""
        await self._idle()
        table = None if tools is None else tools_of(tools)
        self.session = await self._update({**fields}, table)
        self._tools = self._tools if table is None else table
        return self.session

    async def _update(
        self, fields: dict[str, Any], tools: Mapping[str, Tool] | None = None
    ) -> SessionResource:
        """Send `session.update` with these fields, and `tools` if not None, and return the whole configuration
        that answers it; the caller stores it. Until the answer is read `_updated` is false, so that the next
        run sends its tools again. Raises `FrameError`, `ServerError`."""
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
        """Ask the server to keep this session's KV longer than that of others, and to restore it first, for
        `ttl` seconds (None: 300). Returns what the server grants. A later lease replaces an earlier one;
        `ttl=0` ends it.

        `returns_in`: seconds until the session is needed again; its KV is restored shortly before. Together
        with `ttl=0` it makes no lease and costs no budget: it is only a hint, by which the server chooses the
        idle session that loses its KV first. `priority`: of the turns while the lease lasts; higher goes first.
        Raises `ServerError`, `ChatBusy`.
        """
        await self._idle()
        lease = client.SessionLease(priority=priority, ttl=ttl, returns_in=returns_in)
        leased = await self._connection.request(lease, server.SessionLeased)
        self._leased = leased.ttl > 0
        return leased

    async def stage(self) -> server.SessionStaged:
        """Restore the session's KV to the device now, because the next turn comes soon. Returns, when that is
        done, how many tokens are there, from where they came (disk, host, or recomputed), and how long it took.
        Raises `ServerError`, `ChatBusy`."""
        await self._idle()
        return await self._connection.request(client.SessionStage(), server.SessionStaged)

    async def settle(self, tier: Literal["host", "disk"] = "disk") -> server.SessionSettled:
        """Offload the session's KV to `tier` now, and free it on the device, because the next turn is far.
        Returns, when that is done, how many tokens have KV in all tiers together, the lowest tier that holds
        some, and how long it took. Raises `ServerError`, `ChatBusy`."""
        await self._idle()
        return await self._connection.request(client.SessionSettle(tier=tier), server.SessionSettled)

    async def blocks(self) -> server.SessionBlocksListed:
        """Where the blocks of the session's KV lie: device, host, disk or none, and which are shared. Nothing
        moves; it may be asked while a turn is being read. Raises `ServerError`."""
        return await self._connection.request(client.SessionBlocks(), server.SessionBlocksListed)

    # --- by hand ---

    async def send(self, event: client.ClientEvent) -> str:
        """Send any client event, and do not wait for an answer: `events` has it. Returns the event's id, which
        is made if it has none. Raises `FrameError` if the event is invalid, `ConnectionLost`."""
        return await self._connection.send(event)

    async def events(self) -> AsyncIterator[server.ServerEvent]:
        """Yields all server events as they come, without end; not those of responses out of band that `respond`
        asked for, and no answers that another call waits for. Raises `ChatBusy` while a turn is being read,
        `ConnectionLost`."""
        while True:
            yield await self._connection.receive()

    async def aclose(self) -> None:
        """Close the connection, and the chats that were forked from this one. The session stays at the server:
        `handle` opens it again.

        A running turn goes on at the server for a while. One that was left unread, because its object was freed
        or the task that read it was cancelled, is cancelled, and so are responses out of band. Tools that still
        run are cancelled.
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

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _attach(
        self, fork: server.Fork, resumption: Resumption
    ) -> tuple[Transport, server.SessionResumed]:
        """Attach the session `fork` to this chat's connection, or, if that is lost meanwhile, to one of its
        own; returns its transport and the server's answer. Raises what `Patience.retry` raises."""
        try:
            shared = await self._connection.share(self.session.id or "")
            transport = await shared.attach(fork.id, fork.handle)
            return transport, await resumption.greeted(transport)
        except SessionLost:
            raise
        except ConnectionLost:
            return await resumption.patience.retry(resumption.connect)

    # --- one turn at a time ---

    def _reader(self) -> _Reading | None:
        return None if self._current is None else self._current()

    async def _claim(self, reading: _Reading, clear: Callable[[], Awaitable[None]] | None = None) -> None:
        """Make `reading` the one turn that is read from now on. Before that, a turn that was left unread is
        ended by `clear` (None: `Connection.make_way`, which cancels it without waiting for its end). Raises
        `ChatBusy` while another turn is being read, also one that began just before."""
        async with self._claiming:
            await self._idle(clear or self._connection.make_way)
            self._follow(reading)

    async def _take_over(self, reading: _Reading) -> None:
        """Make `reading`, a turn that `steer` made, the one turn that is read from now on. The turn before
        begins no further response; the server ends the running one."""
        if (current := self._reader()) is not None:
            current.stop()
        self._follow(reading)

    async def _begin_aside(self, reply: Reply) -> None:
        """Called when `reply`, which is out of band, begins. If no turn is being read, `last` and `rounds` show
        it from now on."""
        current = self._reader()
        if current is None or not current.running:
            self._remember(reply)

    def _follow(self, reading: _Reading) -> None:
        self._current = weakref.ref(reading)
        self._remember(reading)

    def _remember(self, reading: _Reading) -> None:
        ended = [rounds for rounds in self._turns if rounds][-1:]
        self._turns = [*ended, self._turns[-1], reading.rounds]

    async def _idle(self, clear: Callable[[], Awaitable[None]] | None = None) -> None:
        """Make sure that no turn runs: cancel one that was left unread, and give each tool call of a run that
        was left an output. `clear` does the cancelling; None: `Connection.quiet`, which waits for its end.
        Raises `ChatBusy` while a turn is being read."""
        current = self._reader()
        if current is not None and current.running:
            if not current.given_up:
                raise ChatBusy("A turn is being read on this chat: read it to its end or cancel it first")
            current.close()
        self._current = None
        await (clear or self._connection.quiet)()
        outputs, self._outputs = self._outputs, None
        if outputs is not None:  # each call of a run that was left gets an output
            await outputs.finish()
        await self._tracers.aclose()


def _said(text: str | None) -> list[client.ItemCreate]:
    """What adds `text` as a message of the user; nothing for None."""
    return [] if text is None else [client.ItemCreate(item=named(MessageItem.of("user", text)))]
