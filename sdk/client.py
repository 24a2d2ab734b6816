"""A client of a server, and sessions on it.

async with connect("ws://127.0.0.1:8040") as client:
    async with client.session(instructions="Be brief.", tools=[weather]) as chat:
        async for piece in chat.say("Hello!"):
            print(piece, end="")
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from os import PathLike
from ssl import SSLContext
from typing import Any, TypeAlias, Unpack

import anyio
import msgspec

from .chat import MAX_TOOL_ROUNDS, Chat
from .connection.connection import Connection
from .connection.reconnect import Patience, Resumption
from .connection.transport import DEFAULT_URL, Transport, dial, realtime_url, requested, shown
from .errors import ConnectionFailed
from .frames.exported import SESSIONS, ImportedSession, read_export
from .frames.server import SessionCreated
from .opening import opens_async
from .params import SessionOptions
from .tools.tool import ToolLike, tools_of

Dial: TypeAlias = Callable[[str | None], Awaitable[Transport]]
Importing: TypeAlias = Callable[[bytes], Awaitable[bytes]]


class Client:
    """Opens sessions on one server; `connect` makes it. `dial` opens a connection for a new session on a
    `model` (None: the server's default).

    `redial` opens a connection on which an earlier session is resumed; without it, `resume` fails and a lost
    connection is not made again. `patience`: for how long that is tried. `address`: what `repr` and errors
    show. `importing` sends an exported session to the server and returns the answer, an `ImportedSession`.
    """

    def __init__(
        self,
        dial: Dial,
        model: str | None = None,
        redial: Dial | None = None,
        patience: Patience | None = None,
        address: str = "",
        importing: Importing | None = None,
    ) -> None:
        self._address = address
        self._importing = importing
        self._dial = dial
        self._patience = patience
        self._redial = redial
        self._model = model

    def __repr__(self) -> str:
        return f"<Client of {self._address or 'a transport'}" + (
            f", model {self._model}>" if self._model else ">"
        )

    @opens_async("async with client.session(...) as chat:")
    async def session(
        self,
        *,
        instructions: str | None = None,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
        adapter: str | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncIterator[Chat]:
        """Open a new session on a connection of its own, which is closed at the end of the block; `resume`
        opens the session again.

        `tools`: Python callables, which are run when the model calls them, or dicts in the Realtime form, for
        calls that the caller answers. `max_tool_rounds`: how often a turn may run tools and go on. `adapter`:
        the name of an adapter (LoRA) of the server, with which the session is computed. `options`:
        further fields of `session.update` (`frames.session.SessionPatch`), also sampling ones
        (`frames.sampling.SamplingFields`); `chat.session` has the values in force. Raises `ConnectionFailed`,
        `ConnectionLost`, `ToolInvalid`, `FrameError`, `ServerError`.
        """
        connection = Connection(await self._dial(adapter or self._model), self._resumption())
        chat: Chat | None = None
        try:
            created = await connection.answer("", lambda event: isinstance(event, SessionCreated))
            assert isinstance(created, SessionCreated)
            chat = Chat(connection, created.session, max_tool_rounds=max_tool_rounds)
            fields: dict[str, Any] = {**options}
            if instructions is not None:
                fields["instructions"] = instructions
            tools = list(tools)
            if tools or fields:
                await chat.update(tools=tools or None, **fields)
            yield chat
        finally:
            await (connection if chat is None else chat).aclose()

    @opens_async("async with client.resume(handle) as chat:")
    async def resume(
        self, handle: str, *, tools: Iterable[ToolLike] = (), max_tool_rounds: int = MAX_TOOL_ROUNDS
    ) -> AsyncIterator[Chat]:
        """Open the session of `handle` (from `chat.handle`) again, as it was left; also after a restart of the
        server. Its connection is closed at the end of the block.

        `tools`: the callables to run from now on; the definitions that the model sees stay as they are. A reply
        that still runs is cancelled when the next turn begins. It is tried once. Raises `SessionLost` if the
        handle opens nothing, `ConnectionFailed`, `ConnectionLost`, `ToolInvalid`.
        """
        resumption, table = self._resumption(handle), tools_of(tools)
        if resumption is None:
            raise ConnectionFailed("This client cannot resume a session")
        chat = Chat.resumed(resumption, await resumption.connect(), table, max_tool_rounds)
        try:
            yield chat
        finally:
            await chat.aclose()

    @opens_async("async with client.import_session(path) as chat:")
    async def import_session(
        self,
        path: str | PathLike[str],
        *,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
    ) -> AsyncIterator[Chat]:
        """Begin a new session with what `holdfast sessions export` wrote into the file `path`: its
        instructions, tools, settings and items, and the tokens of its replies if the server's model has the
        same tokenizer and template. The file is checked before anything is sent. Keyword arguments as in
        `resume`.

        Raises `ExportInvalid` for a file that is no exported session, was cut off or has another version's
        form, `OSError` if it cannot be read; `ServerError` if the server refuses it, for example for a token
        that its model does not have; then no session was made. Raises `ConnectionFailed`, and what `resume`
        raises.
        """
        if self._importing is None:
            raise ConnectionFailed("This client cannot import a session")
        data = await anyio.Path(path).read_bytes()
        read_export(data)
        made = msgspec.json.decode(await self._importing(data), type=ImportedSession)
        async with self.resume(made.handle, tools=tools, max_tool_rounds=max_tool_rounds) as chat:
            yield chat

    def _resumption(self, handle: str | None = None) -> Resumption | None:
        redial = self._redial
        if redial is None:
            return None
        return Resumption(lambda: redial(self._model), self._patience, self._address or None, handle)


@opens_async("async with connect(...) as client:")
async def connect(
    url: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    *,
    ssl: SSLContext | None = None,
    patience: Patience | None = None,
    msgpack: bool = False,
) -> AsyncIterator[Client]:
    """A client of the server at `url`. Nothing is sent yet: each session opens a connection of its own.

    `url`: by default `HOLDFAST_URL` of the environment, or else a server on this machine at the default port.
    `model`: a name of the served model, which sessions then carry; None: the server's first. `api_key`: by
    default `HOLDFAST_API_KEY` of the environment.

    With TLS (`wss://`, `https://`) the server's certificate is checked against the system's authorities, or by
    `ssl`: `ssl.create_default_context(cafile="ca.pem")` for an authority of your own.

    A lost connection is made again, and the session goes on where it was; `patience` sets for how long that is
    tried. The first connection of a session is tried once. `msgpack`: send and receive MessagePack instead of
    JSON, if the server has it. Raises `ConnectionFailed` at once if `url` is no address.
    """
    address = url or os.environ.get("HOLDFAST_URL") or DEFAULT_URL
    key = os.environ.get("HOLDFAST_API_KEY") if api_key is None else api_key
    realtime_url(address, model)

    dialling = partial(dial, address, api_key=key, ssl=ssl, msgpack=msgpack, resumable="true")
    importing = partial(requested, address, "POST", SESSIONS, key, ssl=ssl)
    back = partial(dialling, resume="true")
    yield Client(dialling, model, back, patience, shown(realtime_url(address)), importing)
