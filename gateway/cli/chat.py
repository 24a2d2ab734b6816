"""``holdfast chat``: a conversation in a terminal with a running server.

    what is read ─▶ a message, or a command ─▶ the session ─▶ pieces of the reply

On a terminal one handler gets every Ctrl-C: at the prompt it is a key, else it cuts what runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import msgspec
from rich.console import Console

from ...kvstore.options import expanded
from ...sdk.chat import Chat
from ...sdk.client import connect
from ...sdk.connection.reconnect import Patience, Retry
from ...sdk.connection.responses import Finished
from ...sdk.connection.transport import DEFAULT_URL, realtime_url, shown
from ...sdk.errors import ConnectionFault, FieldInvalid, SDKError, SessionLost
from ...sdk.frames.items import MessageItem
from ...sdk.frames.sampling import SamplingFields
from ...sdk.params import SamplingOptions, UpdateOptions
from ..documents.schemas import fields_of, in_words
from .chat_state import LONGEST_TITLE, MOST_MARKS, ChatState, KeptSession, TypedLines
from .options import refused
from .terminal import PROMPT, Output, PlainLines, TerminalPrompt, in_units, printable

LAST_ITEMS = 8
"""In so many items of a conversation its last turn is looked for."""
LAST = "last"
"""Instead of a handle: the session that was used last."""
NAMES = {"max_tokens": "max_output_tokens"}
SETTABLE = [name for name in SamplingOptions.__annotations__ if name != "top_logprobs"]
"""The parameters that `/set` sets; log probabilities are not shown here."""
ALONE = frozenset({"/fork", "/back", "/sessions", "/help"})
"""The commands that take nothing behind their names."""
BEGIN = "holdfast chat alone begins a new session, in which /sessions lists those that are kept"
HELP = """\
/rewind [N]       take the last turn back, or the last N
/fork             go on in a copy of this conversation; /back returns to where it was copied
/save FILE        write the conversation to a new file: JSON for a name that ends in .json, else text
/system [TEXT]    show or replace the system prompt, for the replies from now on
/set [NAME VALUE] show the parameters, or set one: /set temperature 0.2; without a value: the model's own
/sessions         the sessions of earlier chats, for holdfast chat --resume ID
/quit             leave, as Ctrl-D does, or Ctrl-C twice
//TEXT            say a text that begins with a slash
Ctrl-C clears what is typed, and cuts a reply short. Alt-Enter, or \\ at a line's end, begins a new line.
A paste is one message."""


def run(url: str | None, api_key: str | None, resume: str | None, fields: UpdateOptions) -> int:
    """Open a session and talk until /quit, Ctrl-D or the end of stdin. Returns the exit code: 0; 1 if a reply
    failed and stdin is no terminal; 2 with the cause on stderr if no session could be opened.

    ``url``: of the server; None: that of the resumed session, or of this machine. ``api_key``: None if the
    server has no keys. ``resume``: a handle, an id of `/sessions`, or `LAST`. ``fields``: of the session."""
    state = ChatState()
    try:
        kept = None if resume is None else _kept(state, resume, url)
        return asyncio.run(_chat(url or (kept.url if kept else DEFAULT_URL), api_key, kept, fields, state))
    except SDKError as error:
        begin = f"; {BEGIN}" if isinstance(error, SessionLost) else ""
        return refused(f"{told(error)}{begin}")
    except LookupError as error:
        return refused(f"{error.args[0]}; {BEGIN}")


def _kept(state: ChatState, wanted: str, url: str | None) -> KeptSession:
    """The session that ``--resume WANTED`` means. Raises ``LookupError`` with the cause."""
    kept = state.read().sessions
    server = None if url is None else shown(realtime_url(url))
    here = [one for one in kept if server is None or one.url == server]
    if wanted == LAST and here:
        return here[0]
    if found := [one for one in kept if wanted in (one.handle, one.id)]:
        return found[0]
    if wanted.startswith("hold_"):
        return KeptSession(id="", handle=wanted, url=url or DEFAULT_URL)
    which = "no session" if wanted == LAST else f"no session {wanted!r}"
    raise LookupError(f"--resume: {state.file} has {which}" + (f" of {server}" if server else ""))


async def _chat(
    url: str, api_key: str | None, kept: KeptSession | None, fields: UpdateOptions, state: ChatState
) -> int:
    terminal: TerminalChat | None = None

    def retrying(retry: Retry | None) -> None:
        if terminal is not None:
            terminal.retrying(retry)

    patience = Patience(tell=retrying)
    async with connect(url, api_key=api_key, patience=patience) as client, AsyncExitStack() as stack:
        if kept is None:
            chat = await stack.enter_async_context(client.session())
            kept = KeptSession("", "", shown(realtime_url(url)), head="root")
        else:
            try:
                chat = await stack.enter_async_context(client.resume(kept.handle))
            except SessionLost:
                state.forget(kept.handle)
                raise
        if fields:
            await update(chat, fields)
        kept.id, kept.model = chat.session.id or "", chat.session.model
        talks, able = sys.stdin.isatty(), os.environ.get("TERM", "dumb") != "dumb"
        out = Output(sys.stdout)
        notes = Console(highlight=False, stderr=not sys.stdout.isatty())
        reader = TerminalPrompt(TypedLines(state)) if talks and able else PlainLines(PROMPT if talks else "")
        reopened = lambda handle: stack.enter_async_context(client.resume(handle))
        terminal = TerminalChat(chat, notes, out, reader, state, kept, reopened)
        with reader.opened():
            return await terminal.talk()


@dataclass(slots=True)
class ShownBranch:
    """A conversation, or a fork of it. ``chat``: its session. ``kept``: what is kept of it for ``--resume``;
    its ``marks`` are where a rewind of each turn goes back to, ``root`` before the first."""

    chat: Chat
    kept: KeptSession

    async def messages(self, most: int | None = None) -> list[MessageItem]:
        """The messages among the last ``most`` items of the conversation; None: of all."""
        return [item for item in await self.chat.history(most) if isinstance(item, MessageItem)]

    async def last_turn(self) -> list[MessageItem]:
        """The last message of the user and those behind it; none at the beginning."""
        messages = await self.messages(LAST_ITEMS)
        turns = [at for at, item in enumerate(messages) if item.role == "user"]
        return messages[turns[-1] :] if turns else []


class TerminalChat:
    """Takes what ``reader`` reads, sends it to the model or runs it as a command, writes replies to ``out``,
    and all else to ``console``. ``kept``: what ``state`` keeps of the session. ``reopened`` opens a session by
    its handle, for the next line after its connection was lost for good."""

    def __init__(
        self,
        chat: Chat,
        console: Console,
        out: Output,
        reader: TerminalPrompt | PlainLines,
        state: ChatState,
        kept: KeptSession,
        reopened: Callable[[str], Awaitable[Chat]] | None = None,
    ) -> None:
        self._reopened = reopened
        self._lost = False  # the branch's connection will not come back by itself
        self._console = console
        self._out = out
        self._reader = reader
        self._state = state
        self._branches = [ShownBranch(chat, kept)]
        self._work: asyncio.Task[None] | None = None
        self._cut: asyncio.Task[None] | None = None  # what cancels the reply
        self._replying = False
        self._retrying = False
        self._failed = False

    @property
    def _branch(self) -> ShownBranch:
        return self._branches[-1]

    async def talk(self) -> int:
        """Serve until /quit, Ctrl-D, or Ctrl-C twice at the empty prompt. Returns the exit code."""
        branch = self._branch
        if self._reader.interactive:
            self._tell(f"{branch.chat.session.model} · Ctrl-C cuts a reply short, Ctrl-D leaves, /help")
        await self._recall()
        loop = asyncio.get_running_loop()
        if self._reader.interactive:  # a pipe is left, as by any program
            loop.add_signal_handler(signal.SIGINT, self._interrupted)
        struck = False
        try:
            while True:
                try:
                    line = (await self._reader.read()).strip()
                except EOFError:
                    break
                except KeyboardInterrupt:
                    if struck:
                        break
                    struck = True
                    self._tell("Ctrl-C again, or Ctrl-D, leaves")
                    continue
                struck = False
                if line == "/quit":
                    break
                if not await self._do(line):
                    return 1
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        if self._reader.interactive and self._branch.kept.handle:
            self._tell("holdfast chat --resume goes on here")
        return 1 if self._failed and not self._reader.interactive else 0

    async def _do(self, line: str) -> bool:
        """Say a line or run it as a command, in a task that Ctrl-C can cut. Returns whether to go on."""
        said = not line.startswith("/") or line.startswith("//")
        if not said:
            work = self._command(*line.split(maxsplit=1))
        elif line:
            work = self._turn(line.removeprefix("/") if line.startswith("//") else line)
        else:
            return True
        self._work = asyncio.ensure_future(self._at_server(work))
        try:
            self._reader.pause()
            await self._work
        except asyncio.CancelledError:
            if (chat := asyncio.current_task()) is not None and chat.cancelling():
                raise
            self._count_down("")
            stays = "the server reads your message when it is back" if said and self._retrying else ""
            self._tell(f"stopped waiting; {stays or 'the session stays'}")
        except SDKError as error:
            self._count_down("")
            self._failed = True
            self._lost = isinstance(error, ConnectionFault)
            self._note(f"{error.code}: {told(error)}", "red")
            return self._reader.interactive or not isinstance(error, ConnectionFault)
        finally:
            self._work, self._retrying = None, False
            if self._cut is not None:
                self._cut.cancel()
                self._cut = None
        return True

    async def _at_server(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``, after the session was opened again if its connection was lost for good."""
        try:
            handle = self._branch.chat.handle
            if self._lost and self._reopened is not None and handle:
                self._branch.chat = await self._reopened(handle)
                self._tell("the connection is back")
            self._lost = False
            await work
        finally:
            work.close()

    def _interrupted(self) -> None:
        """Called at Ctrl-C: a key for the prompt. Else it cancels the reply; or, if that was done, the server
        is gone, or a command runs, it ends the waiting."""
        if self._work is None:
            self._reader.interrupt()
        elif self._cut is None and not self._retrying and self._replying:
            self._cut = asyncio.ensure_future(self._cancel())
        else:
            self._work.cancel()

    async def _cancel(self) -> None:
        with suppress(SDKError):  # the reader gets it too
            await self._branch.chat.cancel()

    def retrying(self, retry: Retry | None) -> None:
        """Called before each try to reach the server again, and with None when that has succeeded."""
        if self._work is None:  # nothing waits for it any more
            return
        if retry is None:
            self._count_down("")
            self._tell("the connection is back")
            self._retrying = False
            return
        if not self._retrying:
            self._out.end_line()
            self._tell(told(retry.fault))
        self._retrying = True
        self._count_down(f"trying again: try {retry.number}, {retry.left:.0f} s left; Ctrl-C stops")

    def _count_down(self, text: str) -> None:
        """While the connection is tried again, show ``text`` on the last line of a terminal, instead of what
        was shown there before."""
        if self._console.is_terminal and self._retrying:
            width = self._console.width - 1
            self._console.file.write(f"\r{text[:width]:<{width}}\r")
            self._console.file.flush()

    async def _command(self, name: str, rest: str = "") -> None:
        commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/rewind": self._rewind,
            "/fork": self._fork,
            "/back": self._back,
            "/save": self._save,
            "/system": self._system,
            "/set": self._set,
            "/sessions": self._sessions,
            "/help": self._help,
        }
        if name in ALONE and rest:
            self._tell(f"{name} takes nothing behind it")
        elif name in commands:
            await commands[name](rest.strip())
        else:
            self._tell(f"there is no command {name}: /help lists them")

    # --- what is said ---------------------------------------------------------------------------------------

    async def _turn(self, text: str) -> None:
        branch = self._branch
        kept = branch.kept
        self._replying = True
        try:
            async for piece in branch.chat.say(text):
                self._out.write(piece)
        finally:
            self._replying = False
            self._out.end_line()
        last = branch.chat.last
        kept.marks.append(kept.head)
        items = [item.id for item in last.response.output if item.id]
        kept.head = items[-1] if items else kept.head
        kept.last = " ".join(text.split())[:LONGEST_TITLE]
        kept.title = kept.title or kept.last
        self._keep(branch)
        self._tell(cost(last))

    def _keep(self, branch: ShownBranch) -> None:
        branch.kept.id, branch.kept.handle = branch.chat.session.id or "", branch.chat.handle or ""
        if branch.kept.handle:
            self._state.keep(branch.kept)

    async def _recall(self) -> None:
        """Show where a resumed session stands: its last turn, marked as past."""
        kept = self._branch.kept
        if not kept.handle:
            return
        self._keep(self._branch)
        self._tell(f"resumed: {kept.title or kept.id}")
        with suppress(SDKError):
            turn = await self._branch.last_turn()
            earlier = len(kept.marks) - 1
            bound = "at least " if len(kept.marks) == MOST_MARKS else ""
            left = f", {bound}{earlier} {_plural('turn', earlier)} before it left out" if earlier > 0 else ""
            if turn:
                self._tell(f"said before (the last turn{left}):\n{indent(_written(turn).rstrip(), '    ')}")

    # --- commands -------------------------------------------------------------------------------------------

    async def _help(self, rest: str) -> None:
        self._tell(HELP)

    async def _rewind(self, rest: str) -> None:
        branch, marks = self._branch, self._branch.kept.marks
        turns = int(rest) if rest.isdecimal() else 1 if not rest else 0
        known = len(marks) - (1 + max((at for at, mark in enumerate(marks) if not mark), default=-1))
        if not 1 <= turns <= known:
            self._tell(f"/rewind takes a number from 1 to {known}, the turns so far")
            return
        mark = marks[-turns]
        await branch.chat.rewind(mark)
        branch.kept.head = mark
        del marks[-turns:]
        self._keep(branch)
        self._tell(f"{turns} {_plural('turn', turns)} taken back; {await self._last_said()}")

    async def _last_said(self) -> str:
        turn = await self._branch.last_turn()
        return f"the last line was: {turn[0].text if turn else 'none, this is the beginning'}"

    async def _fork(self, rest: str) -> None:
        branch = self._branch
        (copy,) = await branch.chat.fork()
        title = branch.kept.title and f"fork of {branch.kept.title.removeprefix('fork of ')}"
        kept = msgspec.structs.replace(branch.kept, marks=[*branch.kept.marks], title=title)
        self._branches.append(ShownBranch(copy, kept))
        self._tell("this is a copy of the conversation; /back returns to where it was copied")

    async def _back(self, rest: str) -> None:
        if len(self._branches) == 1:
            self._tell("this is no copy: /fork makes one")
            return
        await self._branches.pop().chat.aclose()
        self._tell(f"back where the copy was made; {await self._last_said()}")

    async def _save(self, rest: str) -> None:
        told = _saved(await self._branch.messages(), rest) if rest else "/save takes a file's name"
        self._tell(told)

    async def _system(self, rest: str) -> None:
        chat = self._branch.chat
        if rest:
            await chat.update(instructions=rest)
        self._tell(f"system prompt: {chat.session.instructions or 'none'}")

    async def _set(self, rest: str) -> None:
        chat = self._branch.chat
        given, _, value = rest.partition(" ")
        name = given.replace("-", "_").lower()
        name = NAMES.get(name, name)
        if given and name not in SETTABLE:
            self._tell(f"there is no parameter {given}: {', '.join(SETTABLE)}")
            return
        if given:
            try:
                read = json.loads(value) if value.strip() else None
            except ValueError:
                read = value.strip()
            await update(chat, {name: read})
        for one in [name] if given else SETTABLE:
            self._tell(f"{one} {_plain(getattr(chat.session, one))}")

    async def _sessions(self, rest: str) -> None:
        kept = self._state.read().sessions
        for one in kept:
            last = f" … {one.last}" if one.last not in ("", one.title) else ""
            seconds = time.time() - one.used
            ago = f"{in_units(seconds)} ago" if seconds >= 60 else "just now"
            self._tell(f"{one.id}  {ago}  {one.model} at {one.url}  {one.title}{last}")
        self._tell("holdfast chat --resume ID goes on with one" if kept else "no session is kept yet")

    def _tell(self, text: str) -> None:
        self._note(text, "dim")

    def _note(self, text: str, style: str) -> None:
        """Print a text that is no reply. On a terminal its lines break between words."""
        self._console.print(
            printable(text), style=style, markup=False, soft_wrap=not self._console.is_terminal
        )


async def update(chat: Chat, fields: Mapping[str, Any]) -> None:
    """Change the session's configuration. Raises `FieldInvalid`, with the values that are allowed, for a
    parameter that cannot have this one."""
    for name, value in fields.items():
        try:
            if name in SETTABLE:
                msgspec.convert({name: value}, SamplingFields, str_keys=True)
        except msgspec.ValidationError:
            allowed = next(one.type for one in fields_of(SamplingFields) if one.name == name)
            words = f"{name} cannot be {_plain(value)}; allowed: {in_words(allowed)}"
            raise FieldInvalid(words, name) from None
    await chat.update(**fields)


def _saved(messages: list[MessageItem], name: str) -> str:
    """Write messages to a new file. Returns what to tell of it."""
    path = expanded(name)
    text = _written(messages)
    if path.suffix == ".json":
        said = [{"role": item.role, "text": item.text} for item in messages]
        text = json.dumps(said, ensure_ascii=False, indent=1) + "\n"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return f"{path} exists and stays as it is: /save takes the name of a new file"
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    turns = sum(item.role == "user" for item in messages)
    return f"{turns} {_plural('turn', turns)} written to {path}"


def _written(messages: Iterable[MessageItem]) -> str:
    """Messages as text, with an empty line behind each reply."""
    forms = {"user": PROMPT + "{}\n", "assistant": "{}\n\n", "system": "system> {}\n"}
    return "".join(forms[item.role].format(item.text) for item in messages)


def told(error: SDKError) -> str:
    """What went wrong, in one line, with what to type to go on with the session."""
    if not isinstance(error, ConnectionFault):
        return error.message
    known = error.handle and not isinstance(error, SessionLost)
    return error.summary + (f"; holdfast chat --resume {error.handle} goes on" if known else "")


def cost(finished: Finished) -> str:
    """One line about a finished response: the time to the first text, the reply's tokens, and how many tokens
    of the prompt were computed and how many had cached KV."""
    parts = []
    if finished.status != "completed":
        details = finished.response.status_details
        reason = None if details is None else details.reason
        parts.append(f"{finished.status}: {reason}" if reason else finished.status)
    if finished.ttft_ms is not None:
        parts.append(f"first text after {finished.ttft_ms:.0f} ms")
    if finished.usage is not None:
        tokens = finished.usage.output_tokens
        parts.append(f"{tokens} {_plural('token', tokens)} in {finished.total_ms:.0f} ms")
    kv = finished.kv
    if kv is not None and kv.miss_reason != "unreported":
        computed, known = kv.prefilled + kv.recomputed, kv.resident + kv.host + kv.disk
        read = f"{computed} {_plural('token', computed)} read, {known} known before"
        back = [f"{count} from {where}" for count, where in ((kv.host, "host"), (kv.disk, "disk")) if count]
        read += f" ({', '.join(back)})" if back else ""
        again = computed - kv.new
        parts.append(read + (f"; {again} of those read were known once" if again > 0 else ""))
    return " · ".join(parts)


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _plain(value: object) -> str:
    return "not set" if value is None else json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
