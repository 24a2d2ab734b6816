"""A socket that floods a real server is closed with 1008 and the reason, and another client's turn goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from holdfast.gateway.server import Serving

from .wires import Wire, wire

pytestmark = pytest.mark.anyio
MANY = 100_000


def invalid() -> Iterator[str]:
    for _ in range(MANY):
        yield '{"type": "nothing"}'


async def invalid_frames(socket: ClientConnection) -> None:
    for frame in invalid():
        await socket.send(frame)


async def empty_fragments(socket: ClientConnection) -> None:
    await socket.send("" for _ in range(MANY))


async def pings(socket: ClientConnection) -> None:
    for number in range(MANY):
        await socket.ping(b"%d" % number)


async def ended(flooding: Wire) -> int:
    """Read to the end; how many errors there were."""
    errors = 0
    try:
        while True:
            errors += (await flooding.receive())["type"] == "error"
    except ConnectionClosed:
        return errors


@pytest.mark.parametrize(
    ("flood", "reason"),
    [
        (invalid_frames, "too_many_invalid_events"),
        (empty_fragments, "too_many_fragments"),
        (pings, "too_many_control_frames"),
    ],
)
async def test_a_flood_is_cut_and_another_clients_turn_goes_on(
    server: Serving, flood: Callable[[ClientConnection], asyncio.Future[None]], reason: str
) -> None:
    async with wire(server.url) as other, wire(server.url) as flooding:
        talking = asyncio.create_task(other.say("My name is Marisol."))
        sending = asyncio.gather(flood(flooding.socket), return_exceptions=True)
        errors = await ended(flooding)
        await sending
        assert (flooding.socket.close_code, flooding.socket.close_reason) == (1008, reason)
        assert (0 < errors <= 150) == (flood is invalid_frames)
        assert (await talking)["status"] == "completed"
        assert (await other.say("What is my name?"))["status"] == "completed"
