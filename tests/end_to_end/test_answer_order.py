"""Events that are sent at once are answered in the order in which they were sent, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.server import Serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.tests.threaded import serving

from .wires import LONG, Json, Wire, wire

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory, pocket: EngineSettings) -> AsyncIterator[Serving]:
    """A server with a journal, so that acknowledgements wait for a disk."""
    store: Path = tmp_path_factory.mktemp("store")
    async with serving(GatewaySettings(port=0, store=store), pocket) as running:
        yield running


def said(text: str, item_id: str | None = None) -> Json:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return {"type": "conversation.item.create", "item": {**item, "id": item_id} if item_id else item}


def update(**fields: Any) -> Json:
    return {"type": "session.update", "session": {"type": "realtime", **fields}}


async def answers(wire: Wire, *kinds: str) -> list[str]:
    """The types of the next events that are of one of these types, one for each of them; errors by their id."""
    found: list[str] = []
    while len(found) < len(kinds):
        event = await wire.receive()
        if event["type"] == "error":
            found.append(f"error {event['error']['event_id']}")
        elif event["type"] in kinds:
            found.append(event["type"])
    return found


async def test_update_item_and_response_sent_at_once_are_answered_in_this_order(kept: Serving) -> None:
    asked = ["session.updated", "conversation.item.done", "response.created"]
    for _ in range(20):
        async with wire(kept.url) as socket:
            await socket.send(update(instructions="Be brief."))
            await socket.send(said("Hello!"))
            await socket.send({"type": "response.create"})
            assert await answers(socket, *asked) == asked


async def test_what_comes_after_a_response_create_is_answered_after_it(kept: Serving) -> None:
    """Long input takes a while to tokenize. The events behind it are served meanwhile; their answers wait."""
    async with wire(kept.url) as socket:
        await socket.send(said("Hello!", "first"))
        await socket.until("conversation.item.done")
        long = {**said("word " * 1500)["item"]}
        await socket.send(
            {"type": "response.create", "response": {"conversation": "none", "input": [long], **LONG}}
        )
        await socket.send({"type": "conversation.item.retrieve", "item_id": "first"})
        await socket.send({"type": "response.create", "response": {"max_output_tokens": 4}})
        await socket.send({"type": "conversation.item.retrieve", "item_id": "no_such", "event_id": "wrong"})
        await socket.send(update(instructions="Be polite."))
        asked = [
            "response.created",
            "conversation.item.retrieved",
            "response.created",
            "error",
            "session.updated",
        ]
        wanted = [kind if kind != "error" else "error wrong" for kind in asked]
        assert await answers(socket, *asked) == wanted


async def test_a_refused_response_is_answered_where_it_stands(kept: Serving) -> None:
    """One that does not fit the context is known late, one with unknown tools at once."""
    async with wire(kept.url) as socket:
        long = said("word " * 4000)["item"]
        aside = {"conversation": "none", "input": [long]}
        await socket.send({"type": "response.create", "response": aside, "event_id": "late"})
        await socket.send(said("Hello!"))
        choice = {"tool_choice": {"type": "function", "name": "none"}}
        await socket.send({"type": "response.create", "response": choice, "event_id": "at_once"})
        await socket.send(update(instructions="Be brief."))
        assert await answers(socket, "error", "conversation.item.done", "error", "session.updated") == [
            "error late",
            "conversation.item.done",
            "error at_once",
            "session.updated",
        ]


async def test_a_cut_of_a_running_reply_is_answered_before_what_came_after_it(kept: Serving) -> None:
    async with wire(kept.url) as socket:
        await socket.ask("Tell me a story.", **LONG)
        begun = (await socket.until("response.output_text.delta"))[-1]
        cut = {"type": "conversation.item.truncate", "item_id": begun["item_id"], "text_end": 1}
        await socket.send(cut)
        await socket.send(update(instructions="Be brief."))
        await socket.send(said("Stop!"))
        asked = ["conversation.item.truncated", "session.updated"]
        assert await answers(socket, *asked) == asked


async def test_a_cancel_is_served_although_answers_before_it_wait(kept: Serving) -> None:
    async with wire(kept.url) as socket:
        await socket.send(said("Tell me a story."))
        await socket.send({"type": "response.create", "response": LONG})
        await socket.send({"type": "response.cancel"})
        await socket.send({"type": "response.cancel", "response_id": "no_such", "event_id": "nothing"})
        asked = ["conversation.item.done", "response.created", "error", "response.done"]
        told: list[str] = []
        status = ""
        while len(told) < len(asked):
            event = await socket.receive()
            if event["type"] in asked and not (event["type"] == asked[0] and asked[0] in told):
                told.append(event["type"])
            status = event.get("response", {}).get("status", status)
        assert told.index("response.created") < told.index("error"), told
        assert status == "cancelled"
