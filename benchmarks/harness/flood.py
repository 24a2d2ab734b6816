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
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

UPGRADE = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
TEXT, PING, CONTINUATION = 1, 9, 0
CLOSE = 8
READ_BYTES = 1 << 16
SLOW_READ_BYTES, SLOW_READ_SECONDS = 1024, 0.02
RETRY_SECONDS = 0.05
PING_BYTES = 125
FORK_FRAMES, CHILDREN = 157, 64
HUGE_PROMPT, LONG_PROMPT = 960_000, 27_000
SOCKETS = 16
HELD, HOLD_SECONDS = 600, 1.0
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

    async def connect(self) -> None:
        """Connect, and send nothing. Raises ``SocketClosed``."""
        self._socket = socket.socket()
        if self._receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        self._socket.setblocking(False)
        try:
            await self._loop.sock_connect(self._socket, (self._address.hostname, self._address.port))
        except OSError as fault:
            raise SocketClosed(str(fault)) from None

    def head(self, method: str, path: str, *more: str) -> bytes:
        """The head of a request, with the key and these lines ``more``."""
        address = self._address
        words = (f"{method} {path} HTTP/1.1", f"Host: {address.hostname}:{address.port}")
        return "\r\n".join((*words, f"Authorization: Bearer {self._key}", *more, "", "")).encode()

    async def open(self) -> None:
        """Make the handshake of a WebSocket. Raises ``SocketClosed``."""
        key = base64.b64encode(os.urandom(16)).decode()
        await self.send(self.head("GET", "/v1/realtime", *UPGRADE, f"Sec-WebSocket-Key: {key}"))
        if await self.answered() != 101:
            raise SocketClosed("the handshake was refused")

    async def answered(self) -> int:
        """Read the head of an answer. Returns its status. Raises ``SocketClosed``."""
        while b"\r\n\r\n" not in self._read:
            await self._more()
        head, _, rest = bytes(self._read).partition(b"\r\n\r\n")
        self._read = bytearray(rest)
        return int(head.split(b" ")[1])

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
        self.made: dict[str, bytes] = {}  # bodies that are sent again and again, by path

    async def run(self, name: str) -> None:
        attack = (FLOODS | CROWDS)[name]
        workers = [self._again(attack, at) for at in range(attack.sockets)]
        with suppress(TimeoutError):
            async with asyncio.timeout(self.end - time.monotonic()):
                await asyncio.gather(*workers)

    async def _again(self, attack: Attack, at: int) -> None:
        if attack.held:  # it is about connections that stay, not about many at once
            await asyncio.sleep(HOLD_SECONDS * random.random())
        while time.monotonic() < self.end:
            connection = RawSocket(self.url, self.key, attack.receive_bytes)
            try:
                await connection.connect()
                if attack.opens:
                    await connection.open()
                self.counts["sockets"] += 1
                await attack.run(self, connection, at)
            except SocketClosed as cut:
                self.counts["cut"] += 1
                self.counts[f"cut: {cut}"[:100]] += 1
                await asyncio.sleep(2 * HOLD_SECONDS * random.random() if attack.held else RETRY_SECONDS)
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


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to attack. ``sockets``: how many there are at a time. ``run``: what each of them does, with its
    number. ``receive_bytes``: its receive buffer; None: the system's default. ``opens``: it is a WebSocket,
    with its handshake made; else it is only connected. ``held``: connections without a key, which the server
    must not keep."""

    sockets: int
    run: Callable[[Flood, RawSocket, int], Awaitable[None]]
    receive_bytes: int | None = None
    opens: bool = True
    held: bool = False


def _holding(*sent: bytes, reads: bool = True) -> Attack:
    """Connections on each of which one of these is sent, and then nothing more. ``reads``: until they are
    closed, answers are read."""

    async def hold(flood: Flood, connection: RawSocket, at: int) -> None:
        await connection.send(sent[at % len(sent)])
        while True:
            if reads:
                await connection.receive()
            await asyncio.sleep(HOLD_SECONDS if not reads else 0)

    return Attack(HELD, hold, 4096, opens=False, held=True)


def _posting(*bodies: tuple[str, Callable[[], bytes]], sockets: int = 4) -> Attack:
    """Requests with these bodies, by path, one after another on each of so many connections."""

    async def post(flood: Flood, connection: RawSocket, at: int) -> None:
        path, made = bodies[at % len(bodies)]
        if path not in flood.made:
            flood.made[path] = made()
        body = flood.made[path]
        await connection.send(
            connection.head("POST", path, f"Content-Length: {len(body)}", "Connection: close")
        )
        sending = asyncio.ensure_future(connection.send(body))
        try:
            flood.counts[f"{path} {await connection.answered()}"] += 1
            while True:
                await connection.receive()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    return Attack(sockets, post, opens=False)


def _words(size: int) -> str:
    return " ".join(f"alpha {at} beta" for at in range(size // 12))[:size]


def _json(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields).encode()


def _numbers(field: str, count: int) -> Callable[[], bytes]:
    return lambda: b'{"%s":[%s7]}' % (field.encode(), b"7," * (count - 1))


MIB = 1 << 20
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
OPENING = GET + "\r\n".join((*UPGRADE, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "")).encode()
FLOODS: dict[str, Attack] = {
    "forks": Attack(1, Flood.forks),
    "pings": Attack(4, Flood.pings, 4096),
    "fragments": Attack(2, Flood.fragments),
    "rubbish": Attack(2, Flood.rubbish),
    "huge prompts": Attack(2, Flood.huge_prompts),
    "long prompts": Attack(SOCKETS, Flood.long_prompts),
    "trees": Attack(2, Flood.trees),
    "grammars": Attack(SOCKETS, Flood.grammars),
    "held: silent": _holding(b"", b"G", b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", b"\x16\x03\x01"),
    "held: heads": _holding(GET, GET + b"Cookie: " + b"c" * 30_000, OPENING),
    "held: upgrades": _holding(
        OPENING + b"Transfer-Encoding: chunked\r\n\r\n",
        OPENING + b"Cookie: " + b"c" * 9000 + b"\r\n\r\n",
        OPENING.replace(b"dGhl", b"d" * 9000) + b"\r\n",
    ),
    "held: bodies": _holding(
        POST + b"Content-Length: 5\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ),
    "held: answers": _holding(
        GET + b"\r\n", GET.replace(b"/", b"/asyncapi.json", 1) + b"\r\n", (GET + b"\r\n") * 3, reads=False
    ),
    "bodies: 30 MB": _posting(
        ("/tokenize", _json(prompt="a" * (30 * MIB))),
        ("/v1/completions", _json(prompt="a " * (15 * MIB))),
        ("/v1/chat/completions", _json(messages=[{"role": "user", "content": "a " * (15 * MIB)}])),
        ("/v1/responses", _json(input="a " * (15 * MIB))),
    ),
    "bodies: text": _posting(("/tokenize", _json(prompt=_words(500_000)))),
    "bodies: ids": _posting(
        ("/detokenize", _numbers("tokens", 8_000_000)), ("/v1/completions", _numbers("prompt", 4_000_000))
    ),
    "bodies: most ids": _posting(
        ("/detokenize", _numbers("tokens", 8_000)), ("/v1/completions", _numbers("prompt", 80_000))
    ),
    "bodies: prompts": _posting(
        ("/v1/completions", _json(prompt=[_words(6_000)] * 50)),
        (
            "/v1/messages/count_tokens",
            _json(model="pocket", messages=[{"role": "user", "content": _words(MIB)}]),
        ),
    ),
    "bodies: messages": _posting(
        ("/v1/chat/completions", _json(messages=[{"role": "user", "content": "a"}] * 8_000)),
        ("/v1/responses/input_tokens", _json(input=[{"role": "user", "content": "a"}] * 8_000)),
    ),
    "bodies: values": _posting(
        ("/v1/chat/completions", _numbers("x", 700_000)),
        ("/v1/responses", lambda: b'{"input":[' + b"[]," * 400_000 + b"0]}"),
        ("/v1/messages", lambda: b'{"messages":[' + b'{"a":1},' * 180_000 + b"0]}"),
    ),
}
"""The attacks by name."""

CROWDS: dict[str, Attack] = {
    "talkers": Attack(TALKERS, Flood.talkers),
    "asides": Attack(SOCKETS * 2, Flood.asides),
    "prompts": Attack(SOCKETS, Flood.prompts),
}
"""Further attacks by tenants that send only what is allowed, but more than the engine can compute at once."""


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
