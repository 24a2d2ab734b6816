"""A client that does not read: its own replies wait, then it is dropped; the others notice nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.gateway.net.channel import ChannelClosed, MemoryChannel, memory_pair
from holdfast.gateway.service import Service, opened
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.thread import ThreadEngine
from holdfast.tests.threaded import serving

from .wires import wire

pytestmark = pytest.mark.anyio
CREATE = b'{"type": "response.create"}'
TIGHT = replace(ClientLimits(), outbox_events=4, stall_seconds=1.0)
"""The clients read in the server's own loop: when that loop is late, they must not count as slow readers."""


@pytest.fixture
async def service(pocket: EngineSettings) -> AsyncIterator[Service]:
    engine = ThreadEngine(pocket)
    service = Service(GatewaySettings(limits=TIGHT), "pocket", engine.link)
    async with opened(service, "pocket", engine):
        yield service


async def ended(channel: MemoryChannel) -> int:
    """Reads all that had left, then says how the connection ended."""
    try:
        while True:
            await channel.receive()
    except ChannelClosed as closed:
        await channel.close(1000, "")
        return closed.code


async def test_a_client_that_reads_nothing_is_dropped_and_the_others_go_on(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ours, theirs = memory_pair(depth=1)
    connection = asyncio.create_task(service.converse(ours))
    await theirs.send(CREATE)
    async with in_memory(service).session() as other:
        assert await other.say("My name is Marisol.").text()
        await connection
        assert await other.say("What is my name?").text()
    assert await ended(theirs) == 1006
    assert "took nothing for" in caplog.text
    assert (await service.snapshot()).gateway["slow_readers_dropped"] == 1


async def test_what_waits_for_a_slow_reader_is_bounded(service: Service) -> None:
    ours, theirs = memory_pair(depth=1)
    connection = asyncio.create_task(service.converse(ours))
    await theirs.send(CREATE)
    most = 0
    while not connection.done():
        most = max(most, int((await service.snapshot()).gateway["outbox_events"]))
    assert 0 < most <= TIGHT.outbox_events + 12, "one batch beyond the bound at most"
    await theirs.close(1000, "")


async def test_a_real_socket_that_is_not_read_is_dropped_too(pocket: EngineSettings) -> None:
    settings = GatewaySettings(
        port=0, limits=replace(ClientLimits(), stall_seconds=1.0, send_buffer_bytes=4096)
    )
    async with serving(settings, pocket) as running, wire(running.url, max_queue=1) as deaf:
        part = {"type": "input_text", "text": "x" * 1_000_000}
        item = {"type": "message", "role": "user", "content": [part]}
        create = {"type": "conversation.item.create", "item": item}
        sending = asyncio.gather(*(deaf.send(create) for _ in range(16)), return_exceptions=True)
        while (await running.service.snapshot()).gateway["sockets"]:
            pass  # each item is sent twice, and is not read
        deaf.socket.transport.abort()
        await sending
        async with wire(running.url) as other:
            assert (await other.say("My name is Marisol."))["status"] == "completed"
