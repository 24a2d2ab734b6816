"""A raw HTTP connection to a server: sends any bytes as a body, reads whole answers and streams."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class Reply:
    """An answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class HttpWire:
    """One connection at a time, made again when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, leave: int | None = None, **headers: str
    ) -> Reply | None:
        """One request and its answer. ``leave``: close the connection after so many bytes of the answer, which
        is None then."""
        lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        request = (head + "".join(lines) + "\r\n").encode() + body
        if leave is not None:
            reader, writer = await self._connected()
            writer.write(request)
            if leave:
                await reader.read(leave)
            await self.close()
            return None
        reused = self._streams is not None
        try:
            reply = await self._exchange(request)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            await self.close()
            if not reused or getattr(error, "partial", b""):
                raise
            reply = await self._exchange(request)  # the server had closed it, because it was idle
        if reply.headers.get("connection") == "close":
            await self.close()
        return reply

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams

    async def _exchange(self, request: bytes) -> Reply:
        reader, writer = await self._connected()
        writer.write(request)
        return await self._reply(reader)

    async def _reply(self, reader: asyncio.StreamReader) -> Reply:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        reply = Reply(int(first.split()[1]), {name.lower(): value for name, _, value in pairs})
        if "content-length" in reply.headers:
            reply.body = await reader.readexactly(int(reply.headers["content-length"]))
        elif reply.headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                reply.body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        return reply

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
