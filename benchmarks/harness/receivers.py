"""A client process that reads replies: ``python -m`` with ``sdk|bare URL PACE SESSIONS TOKENS``.

``sdk`` is `holdfast.sdk`; ``bare`` decodes the same frames with the same codec, and does nothing else with
them. At the end it writes one JSON line: the CPU seconds of reading all replies, without connecting, and the
number of pieces of text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as dial

from holdfast.sdk import Chat, connect
from holdfast.sdk.connection.transport import realtime_url
from holdfast.sdk.frames import codec
from holdfast.sdk.frames.client import ResponseCreate
from holdfast.sdk.frames.items import MessageItem, TextPart
from holdfast.sdk.frames.response import ResponseParams
from holdfast.sdk.frames.server import ResponseDone, ServerEvent, TextDelta

from .lockstep import Lockstep


def asked(tokens: int) -> bytes:
    """The frame that asks for a turn with a reply of so many tokens, without events that repeat others: one
    event, as the SDK sends it."""
    item = MessageItem(role="user", content=[TextPart(type="input_text", text="go on")])
    params = ResponseParams(max_output_tokens=tokens, events="brief")
    return codec.encode(ResponseCreate(event_id="ask", items=[item], response=params))


async def opened(url: str) -> ClientConnection:
    """Connect to the server at ``url``. Returns the connection with a new session; its first two events are
    read."""
    connection = await dial(realtime_url(url), compression=None, max_queue=None, proxy=None)
    for _ in range(2):
        await connection.recv()
    return connection


async def reply(connection: ClientConnection, frame: bytes, step: Lockstep) -> list[bytes]:
    """Send ``frame`` and read the reply to its end. Returns those frames that are deltas of its text.
    `step.took` is called for each of them."""
    await connection.send(frame, text=True)
    deltas = []
    while True:
        read = await connection.recv(decode=False)
        if b"output_text.delta" in read[:120]:
            deltas.append(read)
            step.took()
        elif b"response.done" in read[:120]:
            return deltas


async def _bare(connection: ClientConnection, tokens: int, took: Callable[[], None]) -> int:
    await connection.send(asked(tokens), text=True)
    pieces = 0
    event: ServerEvent | None = None
    while not isinstance(event, ResponseDone):
        event = codec.decode_server(await connection.recv(decode=False))
        if isinstance(event, TextDelta):
            pieces += 1
            took()
    return pieces


async def _sdk(chat: Chat, took: Callable[[], None]) -> int:
    pieces = 0
    async for _ in chat.say("go on"):
        pieces += 1
        took()
    return pieces


async def measured(kind: str, url: str, pace: Path, sessions: int, tokens: int) -> dict[str, float]:
    """Open all sessions, then read one reply of each, all at once. ``kind``: ``sdk`` or ``bare``. ``pace``: the
    engine's socket at which steps are asked for. Returns the CPU seconds of reading and the number of text
    pieces."""
    steps: list[Lockstep] = []
    took = lambda: steps[0].took()
    async with AsyncExitStack() as stack:
        if kind == "sdk":
            client = await stack.enter_async_context(connect(url))
            session = client.session
            chats = [
                await stack.enter_async_context(session(max_output_tokens=tokens)) for _ in range(sessions)
            ]
            work = [_sdk(chat, took) for chat in chats]
        else:
            connections = [await stack.enter_async_context(await opened(url)) for _ in range(sessions)]
            work = [_bare(connection, tokens, took) for connection in connections]
        began = time.process_time()
        steps.append(Lockstep(pace, sessions, tokens))
        pieces = sum(await asyncio.gather(*work))
        return {"cpu_seconds": time.process_time() - began, "pieces": pieces}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("sdk", "bare"))
    parser.add_argument("url")
    parser.add_argument("pace", type=Path)
    parser.add_argument("sessions", type=int)
    parser.add_argument("tokens", type=int)
    chosen = parser.parse_args()
    print(
        json.dumps(
            asyncio.run(measured(chosen.kind, chosen.url, chosen.pace, chosen.sessions, chosen.tokens))
        )
    )
