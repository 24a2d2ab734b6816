"""A gateway end without a socket: the test reads what it writes and hands it what arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.link.gateway_end import GatewayEnd
from holdfast.runtime.link.messages import AnyReport, FrameReader, frame, verb_reader
from holdfast.runtime.verbs import AnyVerb, SequenceState


class MemoryTransport(asyncio.Transport):
    """Keeps what is written until ``taken``; ``abort`` loses the connection on the next turn of the loop."""

    def __init__(self, end: GatewayEnd) -> None:
        super().__init__()
        self.written = bytearray()
        self.aborted = False
        self._end = end
        end.connection_made(self)

    def write(self, data: object) -> None:
        assert isinstance(data, bytes) and not self.aborted
        self.written += data

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            asyncio.get_running_loop().call_soon(self._end.connection_lost, None)

    def taken(self, count: int | None = None) -> bytes:
        """The next ``count`` bytes on their way down."""
        count = len(self.written) if count is None else count
        data = bytes(self.written[:count])
        del self.written[:count]
        return data


class Bench:
    """A gateway end; the test plays the engine's end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = GatewayEnd(clock=clock)
        self.transport = MemoryTransport(self.end)
        self._reader: FrameReader[AnyVerb] = verb_reader()

    def sent(self) -> list[AnyVerb]:
        """Verbs that came down since the last time."""
        return list(self._reader.feed(self.transport.taken()))

    def up(self, *reports: AnyReport) -> None:
        """Let reports arrive in one read."""
        self.end.data_received(b"".join(map(frame, reports)))


async def settle() -> None:
    """Let every task run until it waits for something that is not here."""
    for _ in range(12):
        await asyncio.sleep(0)


async def extended(link: EngineLink, seq: int, tokens: list[int]) -> SequenceState:
    """What an extension left, once its reply has come."""
    state = (await link.extend(seq, tokens)).state
    assert state is not None
    return state
