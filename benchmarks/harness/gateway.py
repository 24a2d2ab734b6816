"""Our server through the SDK, as a worker: SDK, WebSocket, gateway process, engine process; run it with
``python -m``.

The toys' language has one character per token (`toys.teach`), so the length of a text is its number of tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from holdfast.sdk import Chat, connect

from ..peers.worker import answer_all
from ..toys import ASSISTANT, USER, ids_of, text_of
from .ours import KV_BYTES
from .servers import Server, server

Json = dict[str, Any]
T = TypeVar("T")


class ThroughGateway:
    """`peers.worker.PeerEngine` for a real server; the client's event loop runs in a thread, so that pings are
    answered while no request is served."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: Server
        self._connection = AsyncExitStack()
        self._chat: Chat | None = None

    def load(self, folder: Path, dtype: str, threads: int) -> Json:
        """Start a server on the model in ``folder`` with its defaults, except for the memory for KV."""
        words = ("--device", "cpu", "--dtype", dtype, "--kv-bytes", str(KV_BYTES))
        self._server = self._stack.enter_context(server(str(folder), threads, *words))
        versions = {name: version(name) for name in ("holdfast-llm", "torch", "websockets", "uvicorn")}
        return {"versions": versions, "precision": {"weights": dtype, "kv": dtype}}

    def begin(self) -> None:
        """Close the session; the next turn begins another."""
        self._run(self._connection.aclose())
        self._chat = None

    def turn(self, tokens: list[int], out: int) -> tuple[float, list[int]]:
        """Send the text of ``tokens`` without the two marks around it, which the chat template writes. Returns
        the seconds to the first text, and the reply's tokens."""
        assert tokens[0] == USER and tokens[-1] == ASSISTANT, "a turn as the toys' template writes it"
        return self._run(self._say(text_of(tokens[1:-1]), out, len(tokens)))

    def decode(self, prompts: list[list[int]], out: int) -> int:
        """Take a turn in a session of its own for each prompt, all at once. Returns the number of generated
        tokens."""
        return self._run(self._say_all(prompts, out))

    def close(self) -> None:
        self.begin()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _say(self, text: str, out: int, new: int) -> tuple[float, list[int]]:
        first = self._chat is None
        if self._chat is None:
            self._chat = await self._enter(self._connection, out)
        said = ids_of(await self._chat.say(text).text())
        finished = self._chat.last
        wanted = new if first else new + 1  # and the pending token
        if finished.kv is None or finished.kv.new != wanted or finished.ttft_ms is None:
            raise RuntimeError(f"the turn has {finished.kv and finished.kv.new} new tokens, not {wanted}")
        return finished.ttft_ms / 1000, said

    async def _say_all(self, prompts: list[list[int]], out: int) -> int:
        async with AsyncExitStack() as stack:
            chats = [await self._enter(stack, out) for _ in prompts]
            texts = (chat.say(text_of(said[1:-1])).text() for chat, said in zip(chats, prompts, strict=True))
            return sum(len(text) for text in await asyncio.gather(*texts))

    async def _enter(self, stack: AsyncExitStack, out: int) -> Chat:
        client = await stack.enter_async_context(connect(self._server.url))
        return await stack.enter_async_context(client.session(temperature=0, max_output_tokens=out))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


if __name__ == "__main__":
    with ExitStack() as servers:
        through = ThroughGateway(servers)
        try:
            answer_all(through)
        finally:
            through.close()
