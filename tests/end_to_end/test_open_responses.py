"""The cases of the neutral Open Responses suite by their names, against a real server: pictures are refused.

https://www.openresponses.org/compliance
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from websockets.asyncio.client import ClientConnection, connect

from holdfast.gateway.server import Serving
from holdfast.tests.gateway.responses.standard import ITEMS, check_response

from .wires import Json

pytestmark = pytest.mark.anyio

ENDS = ("response.completed", "response.incomplete", "response.failed")
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def said(text: str, role: str = "user", **fields: str) -> Json:
    return {"type": "message", "role": role, "content": text, **fields}


def checked(response: Json, *kinds: str) -> Json:
    """A completed response, held against the specification. ``kinds``: types of items that it must have."""
    check_response(response)
    assert response["status"] == "completed" and response["output"]
    assert {item["type"] for item in response["output"]} >= set(kinds)
    return response


def text_of(response: Json) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def in_order(events: list[Json]) -> Json:
    """The response at the end of its events, which come in the standard's order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == text_of(events[-1]["response"]) != ""
    return checked(events[-1]["response"], "message")


class Suite:
    """The server as the suite asks it."""

    def __init__(self, server: Serving) -> None:
        self.url = server.url

    async def post(self, body: Json, path: str = "/v1/responses") -> httpx2.Response:
        async with httpx2.AsyncClient(base_url=self.url, trust_env=False, timeout=60) as client:
            return await client.post(path, json=body)

    async def create(self, *items: Json, **fields: Any) -> Json:
        """A response that is answered."""
        answer = await self.post({"model": "pocket", "input": list(items), **fields})
        assert answer.status_code == 200, answer.text
        told: Json = answer.json()
        return told

    @asynccontextmanager
    async def socket(self) -> AsyncIterator[Lane]:
        address = self.url.replace("http", "ws", 1) + "/v1/responses"
        async with connect(address, compression=None, proxy=None) as opened:
            yield Lane(opened)


class Lane:
    """A WebSocket that asks for one response after the other."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def events(self, given: Any, **fields: Any) -> list[Json]:
        """What is sent for one `response.create`, to its end."""
        asked = {"type": "response.create", "model": "pocket", "input": given, **fields}
        await self._socket.send(json.dumps(asked))
        events = [json.loads(await self._socket.recv())]
        while events[-1]["type"] not in (*ENDS, "error"):
            events.append(json.loads(await self._socket.recv()))
        return events

    async def response(self, given: Any, **fields: Any) -> Json:
        return in_order(await self.events(given, **fields))

    async def refused(self, given: Any, **fields: Any) -> str:
        """The code of the error that answers one `response.create`."""
        (error,) = await self.events(given, **fields)
        assert error["type"] == "error" and error["status"] == 400
        code: str = error["error"]["code"]
        return code


@pytest.fixture
def suite(server: Serving) -> Suite:
    return Suite(server)


async def test_basic_response(suite: Suite) -> None:
    checked(await suite.create(said("Say hello in exactly 3 words.")), "message")


async def test_assistant_phase(suite: Suite) -> None:
    first = said("I should answer with the saved number.", "assistant", phase="commentary")
    second = said("The number is four.", "assistant", phase="final_answer")
    checked(await suite.create(first, second, said("Repeat only the number.")), "message")


async def test_response_output_phase_schema(suite: Suite) -> None:
    """The suite reads an example of its own here. Ours is a conversation, in which phases are told again."""
    items = [said("Hm.", "assistant", phase="commentary"), said("Four.", "assistant", phase="final_answer")]
    made = (await suite.post({"items": items}, "/v1/conversations")).json()
    async with httpx2.AsyncClient(base_url=suite.url, trust_env=False) as client:
        listed = (await client.get(f"/v1/conversations/{made['id']}/items?order=asc")).json()["data"]
    assert [item["phase"] for item in listed] == ["commentary", "final_answer"]
    for item in listed:
        assert ITEMS["message"] <= set(item)
        assert item["content"][0]["type"] == "output_text" and item["content"][0]["annotations"] == []


async def test_streaming_response(suite: Suite) -> None:
    answer = await suite.post({"model": "pocket", "input": [said("Count from 1 to 5.")], "stream": True})
    *events, last = answer.text.strip().split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream") and last == "data: [DONE]"
    told = [event.split("\n", 1) for event in events]
    data = [json.loads(second.removeprefix("data: ")) for _, second in told]
    assert [first for first, _ in told] == [f"event: {event['type']}" for event in data]
    in_order(data)


async def test_system_prompt(suite: Suite) -> None:
    system = said("The user's dog is called Tamu.", "system")
    response = checked(await suite.create(system, said("What is my dog called?")), "message")
    assert "Tamu" in text_of(response)


async def test_tool_calling(suite: Suite) -> None:
    response = await suite.create(said("What is the weather in Rome?"), tools=[WEATHER])
    (call,) = [item for item in checked(response, "function_call")["output"] if "call_id" in item]
    assert call["name"] == "get_weather" and json.loads(call["arguments"]) == {"city": "Rome"}


async def test_image_input(suite: Suite) -> None:
    """Refused by name: the server serves models of text."""
    parts = [
        {"type": "input_text", "text": "What do you see in this image?"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
    ]
    asked = [{"type": "message", "role": "user", "content": parts}]
    answer = await suite.post({"model": "pocket", "input": asked})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["code"], error["param"]) == ("unsupported_field", "input[0].content[1].type")
    assert "'input_image'" in error["message"]
    async with suite.socket() as lane:
        assert await lane.refused(asked) == "unsupported_field"


async def test_multi_turn(suite: Suite) -> None:
    turns = [said("My name is Marisol."), said("Hello Marisol!", "assistant"), said("What is my name?")]
    assert "Marisol" in text_of(checked(await suite.create(*turns), "message"))


async def test_compact_response(suite: Suite) -> None:
    items = [said("We agreed to launch on Tuesday."), said("Understood.", "assistant")]
    body = {"model": "pocket", "prompt_cache_key": "a-key", "input": items}
    compacted = await suite.post(body, "/v1/responses/compact")
    told = compacted.json()
    assert (compacted.status_code, told["object"]) == (200, "response.compaction")
    assert {"id", "output", "created_at", "usage"} <= set(told)
    assert {item["type"] for item in told["output"]} == {"compaction"}
    assert all(ITEMS["compaction"] <= set(item) for item in told["output"])


async def test_compact_missing_model(suite: Suite) -> None:
    refused = await suite.post({"input": [said("Compact this conversation.")]}, "/v1/responses/compact")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"


async def test_websocket_response(suite: Suite) -> None:
    async with suite.socket() as lane:
        await lane.response([said("Count from 1 to 3.")])


async def test_websocket_sequential_responses(suite: Suite) -> None:
    async with suite.socket() as lane:
        first = await lane.response("Reply with exactly: first", store=False)
        second = await lane.response("Reply with exactly: second", store=False)
        assert first["id"] != second["id"] and second["previous_response_id"] is None


async def test_websocket_continuation(suite: Suite) -> None:
    async with suite.socket() as lane:
        first = await lane.response("My name is Marisol.", store=False)
        second = await lane.response("What is my name?", store=False, previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"] and "Marisol" in text_of(second)


async def test_websocket_reconnect_store_false_recovery(suite: Suite) -> None:
    async with suite.socket() as lane:
        first = await lane.response("My name is Marisol.", store=False)
    async with suite.socket() as lane:
        again = {"store": False, "previous_response_id": first["id"]}
        assert await lane.refused("Go on.", **again) == "previous_response_not_found"
        recovered = await lane.response([said("Hello!")], store=False)
        assert recovered["previous_response_id"] is None


async def test_websocket_previous_response_not_found(suite: Suite) -> None:
    async with suite.socket() as lane:
        missing = {"store": False, "previous_response_id": "resp_openresponses_missing"}
        assert await lane.refused("This fails.", **missing) == "previous_response_not_found"


async def test_websocket_failed_continuation_evicts_cache(suite: Suite) -> None:
    async with suite.socket() as lane:
        first = await lane.response("My name is Marisol.", store=False)
        output = {"type": "function_call_output", "call_id": "call_missing", "output": "None."}
        again = {"store": False, "previous_response_id": first["id"]}
        assert await lane.refused([output], **again) == "invalid_value"
        assert await lane.refused("Go on.", **again) == "previous_response_not_found"


async def test_websocket_compact_new_chain(suite: Suite) -> None:
    body = {"model": "pocket", "input": [said("My name is Marisol.")]}
    compacted = (await suite.post(body, "/v1/responses/compact")).json()["output"]
    async with suite.socket() as lane:
        response = await lane.response([*compacted, said("Hello!")], store=False)
        assert response["previous_response_id"] is None
