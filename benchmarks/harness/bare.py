"""A server that only sends frames, as the unit in which the gateway's cost is measured.

Run it with ``python -m``. It uses the same libraries as the gateway (uvicorn, websockets) and has nothing above
them. A client's message says how many frames to send and holds that frame; all connections get theirs in steps,
one whenever `lockstep` asks for it. A connection that has got all its frames waits for the next message.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import uvicorn

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]


@dataclass(slots=True)
class _BareAnswer:
    """The frames that one connection still gets: ``left`` times ``frame``."""

    send: Send
    frame: str
    left: int


class BareSender:
    """An ASGI application. A number at the socket ``pace`` asks for a step: when so many connections have
    frames to get, each of them gets one."""

    def __init__(self, pace: socket.socket) -> None:
        self._pace = pace
        self._answers: dict[int, _BareAnswer] = {}
        self._more = asyncio.Event()

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """Serve one WebSocket: take its messages as requests for frames."""
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            asked = json.loads(message["text"])
            self._answers[id(send)] = _BareAnswer(send, asked["frame"], asked["frames"])
            self._more.set()
        self._answers.pop(id(send), None)

    async def tick(self) -> None:
        """Make the steps that are asked for, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            wanted = int(await loop.sock_recv(self._pace, 16))
            while len(self._answers) < wanted:
                self._more.clear()
                await self._more.wait()
            for number, answer in list(self._answers.items()):
                answer.left -= 1
                if not answer.left:
                    del self._answers[number]
                await answer.send({"type": "websocket.send", "text": answer.frame})


async def serve(pace: socket.socket) -> None:
    """Serve until SIGTERM. The server's address is printed on stderr. ``pace``: a datagram socket at which
    steps are asked for."""
    sender = BareSender(pace)
    config = uvicorn.Config(
        sender,
        http="h11",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        ticking = asyncio.create_task(sender.tick())
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        print(f"sending at http://127.0.0.1:{sock.getsockname()[1]}", file=sys.stderr, flush=True)
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, server.handle_exit, signal.SIGTERM, None
        )
        await serving
        ticking.cancel()
        await asyncio.wait([ticking])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pace", required=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound, contextlib.suppress(KeyboardInterrupt):
        bound.bind(parser.parse_args().pace)
        bound.setblocking(False)
        asyncio.run(serve(bound))
