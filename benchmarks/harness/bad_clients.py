"""Clients that misbehave without sending much (slow readers, half-open requests), as a process; ``python -m``.

It prints a line when all of them are connected, goes on until SIGTERM, and then prints what they did, as a line
of JSON. The process runs at the lowest priority, because real clients compute on other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

from .flood import RETRY_SECONDS, RawSocket, SocketClosed, event

READ_BYTES, READ_SECONDS, READER_TOKENS = 64, 0.5, 500
RECEIVE_BYTES = 4096
"""The receive buffer of a slow reader's socket; Linux doubles it."""
DRIP_SECONDS = 1.0
AT_ONCE = 50
"""The most connections that are being made at the same time: no more than a listener's backlog has room for."""


class BadClients:
    """So many (``count``) clients of one kind against one server. ``counts``: how often each thing happened to
    them, by name. ``ready`` is set when all have connected."""

    def __init__(self, url: str, key: str, count: int) -> None:
        self.url = url
        self.key = key
        self.counts: Counter[str] = Counter()
        self._count = count
        self._connected = 0
        self._asked: set[int] = set()
        self._gate = asyncio.Semaphore(AT_ONCE)
        self.ready = asyncio.Event()

    async def run(self, kind: Callable[[BadClients, int], Awaitable[None]]) -> None:
        await asyncio.gather(*(self._again(kind, at) for at in range(self._count)))

    async def _again(self, kind: Callable[[BadClients, int], Awaitable[None]], at: int) -> None:
        while True:
            try:
                await kind(self, at)
            except (SocketClosed, OSError):
                self.counts["dropped"] += 1
                self._connected -= 1
                await asyncio.sleep(RETRY_SECONDS)

    async def slow_reader(self, at: int) -> None:
        """Ask for a reply, and read it at some bytes per second. One that is dropped comes back and asks for
        nothing, so that the engine has rest on a slow machine, too."""
        connection = RawSocket(self.url, self.key, RECEIVE_BYTES)
        try:
            async with self._gate:
                self._join()
                await connection.connect()
                await connection.open()
                await connection.until("session.created")
            item = {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": f"I am {at}."}],
            }
            lengths = {"min_output_tokens": READER_TOKENS, "max_output_tokens": READER_TOKENS}
            request = {"conversation": "none", "input": [item], **lengths}
            if at not in self._asked:
                self._asked.add(at)
                await connection.send(event("response.create", response=request))
            while True:
                self.counts["bytes"] += len(await connection.receive(READ_BYTES))
                await asyncio.sleep(READ_SECONDS)
        finally:
            connection.close()

    async def half_open(self, at: int) -> None:
        """Send the head of a request a byte per second, and never its end. ``at``: the client's number."""
        address = urlsplit(self.url)
        async with self._gate:
            self._join()
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            await asyncio.sleep(random.Random(at).random() * DRIP_SECONDS)
            while not reader.at_eof():
                writer.write(b"x")
                self.counts["bytes"] += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(DRIP_SECONDS):
                        await reader.read(1024)
            raise SocketClosed("closed")
        finally:
            writer.transport.abort()

    def _join(self) -> None:
        self.counts["connections"] += 1
        self._connected += 1
        if self._connected == self._count:
            self.ready.set()


KINDS: dict[str, Callable[[BadClients, int], Awaitable[None]]] = {
    "slow-readers": BadClients.slow_reader,
    "half-open": BadClients.half_open,
}


async def _run(url: str, key: str, kind: str, count: int) -> Counter[str]:
    clients = BadClients(url, key, count)
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    running = asyncio.ensure_future(clients.run(KINDS[kind]))
    try:
        await clients.ready.wait()
        print("ready", flush=True)
        await done.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return clients.counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--count", type=int, required=True)
    chosen = parser.parse_args()
    os.nice(19)
    print(json.dumps(asyncio.run(_run(chosen.url, chosen.key, chosen.kind, chosen.count))))


if __name__ == "__main__":
    main()
