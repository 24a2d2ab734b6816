"""A server that is asked to leave: told to clients, replies end or are cut by name, and a second signal."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.tests.threaded import serving

from .test_processes import SMALL, children_of, command
from .wires import LONG, Json, address_of, text_of, wire

pytestmark = pytest.mark.anyio

STORY: list[Json] = [
    {
        "type": "conversation.item.create",
        "item": {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Tell me the story of the fox."}],
        },
    },
    {"type": "response.create", "response": LONG},
]


async def test_replies_that_do_not_end_in_time_are_cut_by_name_and_new_ones_refused(
    pocket: EngineSettings,
) -> None:
    async with (
        serving(GatewaySettings(port=0, drain_seconds=0.0), pocket) as server,
        wire(server.url) as talking,
        wire(server.url) as idle,
    ):
        for event in STORY:
            await talking.send(event)
        before = await talking.until("response.output_text.delta")
        draining = asyncio.create_task(server.service.drain())
        (going,) = await idle.until("server.going_away")
        assert going["seconds"] == 0.0
        events = before + await talking.until("response.done")
        assert "server.going_away" in [event["type"] for event in events]
        done = events[-1]["response"]
        assert done["status"] == "incomplete"
        assert done["status_details"]["error"]["code"] == "server_going_away"
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert text_of(done) == "".join(deltas) != "", "what was said stays"
        await draining
        await idle.send({"type": "response.create"})
        (refused,) = await idle.until("error")
        assert refused["error"]["code"] == "server_going_away"


async def test_a_second_signal_leaves_at_once_and_leaves_no_child() -> None:
    async with command("serve", "pocket", "--port", "0", *SMALL) as process:
        url = await address_of(process)
        (child,) = children_of(process.pid)
        async with wire(url) as connection:
            for event in STORY:
                await connection.send(event)
            await connection.until("response.output_text.delta")
            os.kill(int(child), signal.SIGSTOP)  # so that the reply cannot end
            process.send_signal(signal.SIGTERM)
            await connection.until("server.going_away")
            pidfd = os.pidfd_open(int(child))
            process.send_signal(signal.SIGTERM)
            os.kill(int(child), signal.SIGCONT)  # it holds the pipe that `wait` waits for
            assert await process.wait() == 1
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        await ended.wait()
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
