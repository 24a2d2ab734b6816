"""An attacker: one process that floods a server in one named way; ``python -m``, one JSON line at the end.

Frames are written by hand, because no client library sends what an attacker sends: pings with unread answers,
empty fragments, rubbish. A socket that the server closes is opened again. The process runs at the lowest
priority, because a real attacker computes on another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

TEXT, PING, CONTINUATION = 1, 9, 0
CLOSE = 8
READ_BYTES = 1 << 16
SLOW_READ_BYTES, SLOW_READ_SECONDS = 1024, 0.02
RETRY_SECONDS = 0.05
PING_BYTES = 125
FORK_FRAMES, CHILDREN = 157, 64
HUGE_PROMPT, LONG_PROMPT = 960_000, 27_000
SOCKETS = 16
TALKERS, TALK_TOKENS, ASIDES, ASIDE_TOKENS = 64, 500, 8, 64
CONTEXT_PROMPT = 8_000  # characters: about 3,000 tokens of the pocket model


def frame(opcode: int, payload: bytes = b"", *, final: bool = True) -> bytes:
    """One WebSocket frame of a client (RFC 6455 §5.2), masked with zeros. ``final``: false for a fragment that
    is not the last one of its message."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 1 << 16:
        length = b"\xfe" + struct.pack(">H", size)
    else:
        length = b"\xff" + struct.pack(">Q", size)
    return bytes([(0x80 if final else 0) | opcode]) + length + bytes(4) + payload


def event(kind: str, **fields: Any) -> bytes:
    return frame(TEXT, json.dumps({"type": kind, **fields}).encode())


class SocketClosed(Exception):
    """The server closed the socket, or refused it."""


class RawSocket:
    """A WebSocket without a library: a handshake, then bytes both ways. ``key``: the API key.
    ``receive_bytes``: the socket's receive buffer; None: the system's default."""

    def __init__(self, url: str, key: str, receive_bytes: int | None = None) -> None:
        self._address = urlsplit(url)
        self._key = key
        self._receive_bytes = receive_bytes
        self._socket: socket.socket
        self._read = bytearray()
        self._loop = asyncio.get_running_loop()

    async def open(self) -> RawSocket:
        """Connect and make the handshake. Returns itself. Raises ``SocketClosed``."""
        self._socket = socket.socket()
        if self._receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        self._socket.setblocking(False)
        host, port = self._address.hostname, self._address.port
        words = (
            "GET /v1/realtime HTTP/1.1",
            f"Host: {host}:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
            "Sec-WebSocket-Version: 13",
            f"Authorization: Bearer {self._key}",
        )
        try:
            await self._loop.sock_connect(self._socket, (host, port))
            await self.send(("\r\n".join(words) + "\r\n\r\n").encode())
            while b"\r\n\r\n" not in self._read:
                await self._more()
        except OSError as fault:
            raise SocketClosed(str(fault)) from None
        head, _, rest = bytes(self._read).partition(b"\r\n\r\n")
        self._read = bytearray(rest)
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise SocketClosed(head.split(b"\r\n")[0].decode(errors="replace"))
        return self

    async def send(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError as fault:
            raise SocketClosed(str(fault)) from None

    async def receive(self, most: int = READ_BYTES) -> bytes:
        """The next bytes, at most so many, whatever they belong to. Raises ``SocketClosed``."""
        try:
            data = await self._loop.sock_recv(self._socket, most)
        except OSError as fault:
            raise SocketClosed(str(fault)) from None
        if not data:
            raise SocketClosed("closed")
        return data

    async def event(self) -> dict[str, Any]:
        """The next event that the server sends, decoded. Raises ``SocketClosed``."""
        while True:
            opcode, payload = await self._frame()
            if opcode == TEXT:
                return dict(json.loads(payload))
            if opcode == CLOSE:
                raise SocketClosed(payload[2:].decode(errors="replace"))

    async def until(self, *kinds: str) -> dict[str, Any]:
        """The next event that is of one of these types or is an ``error``; others are skipped. Raises
        ``SocketClosed``."""
        while True:
            found = await self.event()
            if found["type"] in (*kinds, "error"):
                return found

    def close(self) -> None:
        self._socket.close()

    async def _more(self) -> None:
        self._read += await self.receive()

    async def _frame(self) -> tuple[int, bytes]:
        while True:
            if len(self._read) >= 2:
                size, start = self._read[1] & 0x7F, 2
                wide = {126: (">H", 2), 127: (">Q", 8)}.get(size)
                if wide is None or len(self._read) >= 2 + wide[1]:
                    if wide is not None:
                        (size,), start = struct.unpack_from(wide[0], self._read, 2), 2 + wide[1]
                    if len(self._read) >= start + size:
                        payload = bytes(self._read[start : start + size])
                        opcode = self._read[0] & 0x0F
                        del self._read[: start + size]
                        return opcode, payload
            await self._more()


class Flood:
    """One attack on one server, until the moment ``end`` by ``time.monotonic()``. ``tokens``: of a talker's
    reply. ``counts``: how often each thing was sent or answered, by name."""

    def __init__(self, url: str, key: str, end: float, tokens: int = TALK_TOKENS) -> None:
        self.url = url
        self.key = key
        self.end = end
        self.tokens = tokens
        self.counts: Counter[str] = Counter()

    async def run(self, name: str) -> None:
        sockets, attack, receive_bytes = (FLOODS | CROWDS)[name]
        workers = [self._again(attack, at, receive_bytes) for at in range(sockets)]
        with suppress(TimeoutError):
            async with asyncio.timeout(self.end - time.monotonic()):
                await asyncio.gather(*workers)

    async def _again(self, attack: Attack, at: int, receive_bytes: int | None) -> None:
        while time.monotonic() < self.end:
            connection = RawSocket(self.url, self.key, receive_bytes)
            try:
                await connection.open()
                self.counts["sockets"] += 1
                await attack(self, connection, at)
            except SocketClosed as cut:
                self.counts["cut"] += 1
                self.counts[f"cut: {cut}"[:100]] += 1
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                connection.close()

    # --- the ways -------------------------------------------------------------------------------------------

    async def forks(self, connection: RawSocket, _: int) -> None:
        """10,048 forks of one session, 64 with each event, all asked for at once and their answers read; then
        the same with another session."""
        await connection.until("session.created")
        await connection.send(event("session.fork", children=CHILDREN) * FORK_FRAMES)
        for _ in range(FORK_FRAMES):
            await self._count(connection, "session.forked")

    async def pings(self, connection: RawSocket, _: int) -> None:
        """Send pings, and hardly read their answers."""
        ping = frame(PING, bytes(PING_BYTES))
        await self._blast(connection, b"", ping, 500, SLOW_READ_BYTES, SLOW_READ_SECONDS)

    async def fragments(self, connection: RawSocket, _: int) -> None:
        """Send a message of empty fragments that never ends."""
        await self._blast(connection, frame(TEXT, b"{", final=False), frame(CONTINUATION, final=False))

    async def rubbish(self, connection: RawSocket, _: int) -> None:
        """Send text frames that are no events."""
        await self._blast(connection, b"", frame(TEXT, b'{"type":"no.such.event"}') + frame(TEXT, b"}{"))

    async def huge_prompts(self, connection: RawSocket, at: int) -> None:
        """Send prompts far beyond the context, one after another. ``at``: the socket's number."""
        await self._prompts(connection, HUGE_PROMPT, at)

    async def long_prompts(self, connection: RawSocket, at: int) -> None:
        """Send prompts a few times as long as the context, one after another. ``at``: the socket's number."""
        await self._prompts(connection, LONG_PROMPT, at)

    async def trees(self, connection: RawSocket, _: int) -> None:
        """Fork a session as often as is allowed, then list its fork tree again and again."""
        await connection.until("session.created")
        for _ in range(FORK_FRAMES):
            await connection.send(event("session.fork", children=CHILDREN))
            if (await self._count(connection, "session.forked"))["type"] == "error":
                break
        while True:
            await connection.send(event("session.tree") * 4)
            for _ in range(4):
                await self._count(connection, "session.tree.listed")

    async def grammars(self, connection: RawSocket, at: int) -> None:
        """Ask for short replies, each with another regular expression that is expensive to compile. ``at``: the
        socket's number."""
        rng = random.Random(at)
        await connection.until("session.created")
        while True:
            one, two = rng.randrange(20, 60), rng.randrange(10**9)
            pattern = f"(?:[a-z]{{1,{one}}}[0-9 ]{{1,{one + 7}}}(?:x|yy|zzz)?){{1,{one}}}{two}"
            request = {"conversation": "none", "max_output_tokens": 4}
            grammar = {"type": "regex", "pattern": pattern}
            await connection.send(event("response.create", response={**request, "grammar": grammar}))
            await self._count(connection, "response.done")

    async def talkers(self, connection: RawSocket, at: int) -> None:
        """Ask for long replies, one after another. ``at``: the socket's number."""
        await self._replies(connection, 1, self.tokens, f"I am number {at}. Tell me a long story.")

    async def asides(self, connection: RawSocket, at: int) -> None:
        """Keep as many replies out of band running as a session may have. ``at``: the socket's number."""
        await self._replies(connection, ASIDES, ASIDE_TOKENS, f"I am number {at}. What is my number?")

    async def prompts(self, connection: RawSocket, at: int) -> None:
        """Send prompts that nearly fill the context, one after another, each a new one. ``at``: the socket's
        number."""
        await self._prompts(connection, CONTEXT_PROMPT, at)

    async def _replies(self, connection: RawSocket, beside: int, tokens: int, text: str) -> None:
        """Keep ``beside`` replies of exactly ``tokens`` tokens to the message ``text`` running, for ever."""
        await connection.until("session.created")
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        lengths = {"min_output_tokens": tokens, "max_output_tokens": tokens}
        request = event("response.create", response={"conversation": "none", "input": [item], **lengths})
        await connection.send(request * beside)
        while True:
            await self._count(connection, "response.done")
            await connection.send(request)

    async def _prompts(self, connection: RawSocket, size: int, at: int) -> None:
        rng = random.Random(at)
        await connection.until("session.created")
        while True:
            text = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(size // 5))[:size]
            content = [{"type": "input_text", "text": text}]
            item = {"type": "message", "role": "user", "content": content}
            request = {"conversation": "none", "input": [item], "max_output_tokens": 1}
            await connection.send(event("response.create", response=request))
            await self._count(connection, "response.done")

    async def _count(self, connection: RawSocket, *kinds: str) -> dict[str, Any]:
        found = await connection.until(*kinds)
        kind = found["type"]
        self.counts[kind if kind != "error" else f"error: {found['error'].get('code')}"] += 1
        return found

    async def _blast(
        self,
        connection: RawSocket,
        first: bytes,
        rest: bytes,
        count: int = 2000,
        read_bytes: int = READ_BYTES,
        pause: float = 0.0,
    ) -> None:
        """Send ``first``, and then ``rest`` for ever, ``count`` times in each write. Meanwhile read at most
        ``read_bytes`` at a time, with pauses of so many seconds."""
        many = rest * count

        async def read() -> None:
            while True:
                await connection.receive(read_bytes)
                await asyncio.sleep(pause)

        async def write() -> None:
            await connection.send(first)
            while True:
                await connection.send(many)
                self.counts["frames"] += count
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(work) for work in (read(), write())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


Attack = Callable[[Flood, RawSocket, int], Awaitable[None]]
FLOODS: dict[str, tuple[int, Attack, int | None]] = {
    "forks": (1, Flood.forks, None),
    "pings": (4, Flood.pings, 4096),
    "fragments": (2, Flood.fragments, None),
    "rubbish": (2, Flood.rubbish, None),
    "huge prompts": (2, Flood.huge_prompts, None),
    "long prompts": (SOCKETS, Flood.long_prompts, None),
    "trees": (2, Flood.trees, None),
    "grammars": (SOCKETS, Flood.grammars, None),
}
"""The attacks by name: how many sockets, what each of them does, and its receive buffer in bytes (None: the
system's default)."""

CROWDS: dict[str, tuple[int, Attack, int | None]] = {
    "talkers": (TALKERS, Flood.talkers, None),
    "asides": (SOCKETS * 2, Flood.asides, None),
    "prompts": (SOCKETS, Flood.prompts, None),
}
"""Further attacks, in the same form, by tenants that send only what is allowed, but more than the engine can
compute at once."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=(*FLOODS, *CROWDS))
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tokens", type=int, default=TALK_TOKENS, help="of a talker's reply")
    chosen = parser.parse_args()
    os.nice(19)

    async def attack() -> Counter[str]:
        flood = Flood(chosen.url, chosen.key, time.monotonic() + chosen.seconds, chosen.tokens)
        await flood.run(chosen.name)
        return flood.counts

    print(json.dumps(asyncio.run(attack())))


if __name__ == "__main__":
    main()
