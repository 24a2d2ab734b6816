"""Sessions with more KV than the device holds: it goes to the host tier and back, and replies are the same.

The pocket model in float32, in debug (arena poisoned with NaN, audits when idle), with room for one or two
sessions at a time.
"""

from __future__ import annotations

import mmap
import os
from contextlib import AsyncExitStack, suppress

import msgspec
import numpy as np
import pytest

from holdfast.gateway.embedded import embedded
from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.kvstore.host.slots import ENTRY_BYTES, HEADER, PAGE
from holdfast.runtime.errors import EngineGone
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client

from .wires import text_of, wire

pytestmark = pytest.mark.anyio

SMALL = EngineSettings(
    model="pocket", dtype="float32", blocks=24, max_context=384, host_bytes=64 << 20, debug=True
)
LINES = ("My name is Marisol.", "My locker code is 4821.", "What is my name?", "What is my locker code?")


async def talk(client: Client, sessions: int, name: str) -> tuple[list[list[str]], int]:
    """Each session says each line, alternately: their replies, and the tokens brought up from the host tier."""
    replies: list[list[str]] = [[] for _ in range(sessions)]
    host = 0
    async with AsyncExitStack() as stack:
        chats = [
            await stack.enter_async_context(client.session(instructions=f"{name} {number}."))
            for number in range(sessions)
        ]
        for turn, line in enumerate(LINES):
            for said, chat in zip(replies, chats, strict=True):
                said.append(await chat.say(line).text())
                kv = chat.last.kv
                assert kv is not None and not kv.recomputed and kv.miss_reason is None
                assert kv.prefilled == kv.new or turn == 0, "later turns prefill exactly what is new"
                assert kv.prefilled + kv.resident + kv.host == chat.last.usage.input_tokens
                host += kv.host
    return replies, host


async def test_sessions_that_evict_each_other_say_what_they_would_alone(client: Client) -> None:
    expected, _ = await talk(client, 4, "Number")
    async with embedded(engine=SMALL) as crowded:
        said, host = await talk(crowded, 4, "Number")
        assert said == expected and host > 100


async def test_without_a_host_tier_they_are_computed_again_and_say_the_same(client: Client) -> None:
    expected, _ = await talk(client, 1, "Alone")
    without = msgspec.structs.replace(SMALL, host_bytes=0)
    async with embedded(engine=without) as crowded, crowded.session(instructions="Alone 0.") as chat:
        said = []
        for line in LINES:
            said.append(await chat.say(line).text())
            async with crowded.session(instructions="Another caller entirely. " * 20) as other:
                await other.say("Tell me the story of the fox.").text()
        assert said == expected[0]
        assert chat.last.kv.recomputed > 0 and chat.last.kv.host == 0


async def died(engine: ChildEngine) -> None:
    """Kill it once what the last turn left has gone down, and wait until the link knows."""
    for _ in range(2):  # whatever was to be done when the first was answered is done before the second
        await engine.link.statistics()
    engine.kill()
    with suppress(EngineGone):
        while True:
            await engine.link.statistics()


def host_memory(size: int) -> int:
    """The descriptor of this size that outlives the engine."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # of the listing itself
            found += [fd] * (os.fstat(fd).st_size == size)
    (memory,) = found
    return memory


def flip_every_slot(memory: int) -> None:
    """One bit in each slot's bytes, as a memory that rots would."""
    with mmap.mmap(memory, 0) as mapped:
        *_, block_bytes, slots = HEADER.unpack_from(mapped)
        first = PAGE + -(-slots * ENTRY_BYTES // PAGE) * PAGE
        stride = -(-block_bytes // PAGE) * PAGE
        states = np.frombuffer(mapped[PAGE : PAGE + slots * ENTRY_BYTES], np.uint8).reshape(slots, -1)[:, 20]
        assert states.any()
        for slot in np.nonzero(states)[0].tolist():
            mapped[first + slot * stride + 7] ^= 16


@pytest.mark.more
async def test_an_engine_that_died_is_followed_by_one_that_has_its_slots_and_checks_them() -> None:
    async with serving(GatewaySettings(port=0), SMALL) as server, wire(server.url) as one:
        await one.say(LINES[0])
        await one.say(LINES[1])
        await died(server.engine)
        await server.engine.link.wait_ready()
        again = await one.say(LINES[2])
        assert "Marisol" in text_of(again)
        kv = again["kv"]
        assert kv["host"] > 0 and kv["resident"] == 0 and kv["prefilled"] == kv["new"]

        await died(server.engine)
        flip_every_slot(host_memory(SMALL.host_bytes))
        await server.engine.link.wait_ready()
        damaged = await one.say(LINES[3])
        assert "4821" in text_of(damaged)
        kv = damaged["kv"]
        assert kv["host"] == 0 and kv["prefilled"] > kv["new"]
        assert kv["miss_reason"] == "engine_restarted"
        statistics = await server.engine.link.statistics()
        assert statistics["host_damaged"] > 0
