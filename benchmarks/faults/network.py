"""A network that fails: a proxy on loopback that breaks each connection after a number of bytes.

It forwards bytes of any protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Proxy:
    """Forwards bytes to the server at the URL ``target``. ``allowance`` is called for each connection, and
    returns after how many bytes it breaks; None: never. ``cuts``: how many connections were broken so. ``url``:
    of the proxy."""

    def __init__(self, target: str, allowance: Callable[[], int | None]) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._allowance = allowance
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.url = ""

    def retarget(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until it is broken or ends."""
        left = self._allowance()
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, there_writer}

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            with suppress(OSError):
                while data := await source.read(1024):
                    if left is not None:
                        data, left = data[:left], left - len(data)
                    sink.write(data)
                    await sink.drain()
                    if left is not None and left <= 0:
                        self.cuts += 1
                        break
            for end in (writer, there_writer):
                end.transport.abort()

        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))
        self._open -= {writer, there_writer}

    def cut_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()


@asynccontextmanager
async def proxy(target: str, allowance: Callable[[], int | None] = lambda: None) -> AsyncIterator[Proxy]:
    """Run a proxy on a free port, for the block; clients use its ``url`` instead of the server's."""
    made = Proxy(target, allowance)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        made.cut_all()
        server.close()
        await server.wait_closed()
