"""The front door: a server, and sessions on it.

async with connect("ws://127.0.0.1:8421") as client:
    async with client.session(instructions="Be brief.", tools=[weather]) as chat:
        async for piece in chat.say("Hello!"):
            print(piece, end="")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from .chat import MAX_TOOL_ROUNDS, Chat
from .tools import ToolLike
from .transport import Transport, dial, realtime_url

Dial: TypeAlias = Callable[[str | None], Awaitable[Transport]]


class Client:
    """Opens sessions through `dial`, which gives a fresh transport for a model (None: the server's own)."""

    def __init__(self, dial: Dial, model: str | None = None) -> None:
        self._dial = dial
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

        `tools` are Python callables, which are run when the model calls them, or dicts in the Realtime form,
        whose calls the caller answers. `fields` are more fields of `session.update`, the sampling fields among
        them (temperature, seed, top_p, min_p, repetition_penalty, logit_bias, bad_words, top_logprobs, ...:
        see `frames.sampling.SamplingFields`); `chat.session` shows what is in force.
        Raises `ConnectionFailed`, `ToolInvalid`, `FrameError`, `ServerError`.
        """
        transport = await self._dial(self._model)
        try:
            chat = await Chat.begin(transport, max_tool_rounds=max_tool_rounds)
            if instructions is not None:
                fields["instructions"] = instructions
            tools = list(tools)
            if tools or fields:
                await chat.update(tools=tools or None, **fields)
            yield chat
        finally:
            await transport.aclose()


@asynccontextmanager
async def connect(url: str, model: str | None = None, api_key: str | None = None) -> AsyncIterator[Client]:
    """A client of the server at `url`; each session opens a connection of its own.

    Raises `ConnectionFailed` at once for an address that cannot be one.
    """
    realtime_url(url, model)

    async def open_transport(wanted: str | None) -> Transport:
        return await dial(url, wanted, api_key)

    yield Client(open_transport, model)
