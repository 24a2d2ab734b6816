"""A client of a server, and sessions on it.

async with connect("ws://127.0.0.1:8040") as client:
    async with client.session(instructions="Be brief.", tools=[weather]) as chat:
        async for piece in chat.say("Hello!"):
            print(piece, end="")
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any, TypeAlias

from .chat import MAX_TOOL_ROUNDS, Chat
from .errors import ConnectionFailed
from .reconnect import Patience, Resumption
from .tools.tool import ToolLike
from .transport import DEFAULT_URL, Transport, dial, realtime_url

Dial: TypeAlias = Callable[[str | None], Awaitable[Transport]]


class Client:
    """Opens sessions. `dial` gives a fresh transport for a model (None: the server's default). `redial` gives
    a transport on which a session is resumed: with it a lost connection is made again."""

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
        """A new session, closed at the end of the block.

        `tools` are Python callables, which are run when the model calls them, or dicts in the Realtime form,
        for calls that the caller answers. `fields` are further fields of `session.update`, also sampling fields
        (temperature, seed, top_p, min_p, repetition_penalty, logit_bias, bad_words, top_logprobs, ...: see
        `frames.sampling.SamplingFields`); `chat.session` has the values in force.
        Raises `ConnectionFailed`, `ToolInvalid`, `FrameError`, `ServerError`.
        """
        transport = await self._dial(self._model)
        chat: Chat | None = None
        try:
            chat = await Chat.begin(transport, resumption=self._resumption(), max_tool_rounds=max_tool_rounds)
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
        """The session that `handle` opens (`chat.handle`), as it was left; also after a restart of the server.

        `tools` are the callables to run from now on; the session keeps its tool definitions. A reply that still
        runs is cancelled when the next turn begins. Raises `SessionLost`, `ConnectionFailed`.
        """
        resumption = self._resumption()
        if resumption is None:
            raise ConnectionFailed("This client cannot resume a session")
        chat = await Chat.resume(resumption, handle, tools=tools, max_tool_rounds=max_tool_rounds)
        try:
            yield chat
        finally:
            await chat.aclose()

    def _resumption(self) -> Resumption | None:
        redial = self._redial
        return None if redial is None else Resumption(lambda: redial(self._model), self._patience)


@asynccontextmanager
async def connect(
    url: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    *,
    ssl: SSLContext | None = None,
    patience: Patience | None = None,
) -> AsyncIterator[Client]:
    """A client of the server at `url`; each session opens a connection of its own.

    Without `url` the environment's `HOLDFAST_URL` is used, or else a server on this machine and the default
    port; without `api_key` the environment's `HOLDFAST_API_KEY`.

    With TLS (`wss://`, `https://`) the server's certificate is checked against the system's authorities, or by
    `ssl`: `ssl.create_default_context(cafile="ca.pem")` for an authority of your own.

    A lost connection is made again, and the session goes on where it was; `patience` sets for how long that is
    tried. Raises `ConnectionFailed` at once for an invalid address.
    """
    address = url or os.environ.get("HOLDFAST_URL") or DEFAULT_URL
    key = os.environ.get("HOLDFAST_API_KEY") if api_key is None else api_key
    realtime_url(address, model)

    async def open_transport(wanted: str | None) -> Transport:
        return await dial(address, wanted, key, ssl=ssl, resumable="true")

    async def return_transport(wanted: str | None) -> Transport:
        return await dial(address, wanted, key, ssl=ssl, resumable="true", resume="true")

    yield Client(open_transport, model, return_transport, patience)
