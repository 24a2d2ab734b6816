"""The front door: a server, and sessions on it.

async with connect("ws://127.0.0.1:8421") as client:
    async with client.session(instructions="Be brief.", tools=[weather]) as chat:
        async for piece in chat.say("Hello!"):
            print(piece, end="")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any, TypeAlias

from .chat import MAX_TOOL_ROUNDS, Chat
from .errors import ConnectionFailed
from .reconnect import Patience, Return
from .tools.tool import ToolLike
from .transport import Transport, dial, realtime_url

Dial: TypeAlias = Callable[[str | None], Awaitable[Transport]]


class Client:
    """Opens sessions through `dial`, which gives a fresh transport for a model (None: the server's own).

    `redial` gives one on which a session is resumed: with it a lost connection is made again, unnoticed.
    """

    def __init__(
        self,
        dial: Dial,
        model: str | None = None,
        redial: Dial | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._dial = dial
        self._patience = patience
        self._redial = redial
        self._model = model

    @asynccontextmanager
    async def session(
        self,
        *,
        instructions: str | None = None,
        tools: Iterable[ToolLike] = (),
        max_tool_rounds: int = MAX_TOOL_ROUNDS,
        **fields: Any,
    ) -> AsyncIterator[Chat]:
        """A fresh session, closed at the end of the block.

        `tool` are Python callables, which are run when the model calls them, or dicts in the Realtime form,
        whose calls the caller answers. `fields` are more fields of `session.update`, the sampling fields among
        them (temperature, seed, top_p, min_p, repetition_penalty, logit_bias, bad_words, top_logprobs, ...:
        see `frames.sampling.SamplingFields`); `chat.session` shows what is in force.
        Raises `ConnectionFailed`, `ToolInvalid`, `FrameError`, `ServerError`.
        """
        transport = await self._dial(self._model)
        chat: Chat | None = None
        try:
            chat = await Chat.begin(transport, back=self._way_back(), max_tool_rounds=max_tool_rounds)
            if instructions is not None:
                fields["instructions"] = instructions
            tools = list(tools)
            if tools or fields:
                await chat.update(tools=tools or None, **fields)
            yield chat
        finally:
            await (transport if chat is None else chat).aclose()

    @asynccontextmanager
    async def resume(
        self, handle: str, *, tools: Iterable[ToolLike] = (), max_tool_rounds: int = MAX_TOOL_ROUNDS
    ) -> AsyncIterator[Chat]:
        """The session that `handle` opens (`chat.handle`), as it was left; also after the server's restart.

        `tool` are the callables to run from now on; they are not sent: the session knows its tools. A reply
        that still runs is cancelled when the next turn begins. Raises `SessionLost`, `ConnectionFailed`.
        """
        back = self._way_back()
        if back is None:
            raise ConnectionFailed("This client has no way to resume a session")
        chat = await Chat.resume(back, handle, tools=tools, max_tool_rounds=max_tool_rounds)
        try:
            yield chat
        finally:
            await chat.aclose()

    def _way_back(self) -> Return | None:
        redial = self._redial
        return None if redial is None else Return(lambda: redial(self._model), self._patience)


@asynccontextmanager
async def connect(
    url: str,
    model: str | None = None,
    api_key: str | None = None,
    *,
    ssl: SSLContext | None = None,
    patience: Patience | None = None,
) -> AsyncIterator[Client]:
    """A client of the server at `url`; each session opens a connection of its own.

    With TLS (`wss://`, `https://`) the server's certificate is checked against the machine's authorities, or as
    `ssl` says: `ssl.create_default_context(cafile="ca.pem")` for an authority of your own.

    A connection that is lost is made again, and the session goes on where it was; `patience` says for how long
    that is tried. Raises `ConnectionFailed` at once for an address that cannot be one.
    """
    realtime_url(url, model)

    async def open_transport(wanted: str | None) -> Transport:
        return await dial(url, wanted, api_key, ssl=ssl, resumable="true")

    async def return_transport(wanted: str | None) -> Transport:
        return await dial(url, wanted, api_key, ssl=ssl, resumable="true", resume="true")

    yield Client(open_transport, model, return_transport, patience)
