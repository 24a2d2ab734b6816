"""Responses of a real server: killed and started again, left in the middle, two tenants, bad grammars."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.gateway.server import Serving

from .test_resume import served
from .wires import Json

pytestmark = pytest.mark.anyio

RESPONSES = "/v1/responses"
STORY = "Tell me the story of the fox."
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def asked(url: str, method: str, path: str, body: Json | None = None) -> tuple[int, str]:
    """Status and body of a request."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def ask(url: str, method: str, path: str, body: Json | None = None) -> Any:
    """The answer to a request that must succeed."""
    status, text = await asyncio.to_thread(asked, url, method, path, body)
    assert status == 200, text
    return json.loads(text)


async def create(url: str, given: Any, **fields: Any) -> Json:
    told: Json = await ask(url, "POST", RESPONSES, {"input": given, **fields})
    return told


async def stream(url: str, given: Any, **fields: Any) -> list[Json]:
    body = {"input": given, "stream": True, **fields}
    status, text = await asyncio.to_thread(asked, url, "POST", RESPONSES, body)
    assert status == 200, text
    return events_in(text)


def events_in(text: str) -> list[Json]:
    *events, last = text.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(event.split("\ndata: ")[1]) for event in events]


def text_of(response: Json) -> str:
    messages = (item for item in response["output"] if item["type"] == "message")
    return "".join(part["text"] for item in messages for part in item["content"])


async def test_what_was_told_outlives_a_killed_server_and_goes_on_in_its_session(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, url):
        first = await create(url, "My name is Marisol.", tools=[TOOL])
        kept = (await ask(url, "POST", "/v1/conversations", {"metadata": {"a": "b"}}))["id"]
        joined = await create(url, "My dog is called Rex.", conversation=kept)
        events = await stream(
            url, "What is the weather in Rome?", previous_response_id=first["id"], tools=[TOOL]
        )
        await server.kill()  # as soon as its end was told
        second = events[-1]["response"]
        (call,) = [item for item in second["output"] if item["type"] == "function_call"]
        url = await server.start()
        assert await ask(url, "GET", f"{RESPONSES}/{second['id']}") == second
        status, text = await asyncio.to_thread(
            asked, url, "GET", f"{RESPONSES}/{second['id']}?stream=true&starting_after=2"
        )
        assert (status, events_in(text)) == (200, events[3:])
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"temperature": 21}'}
        third = await create(url, [output], previous_response_id=second["id"], tools=[TOOL])
        assert "21" in text_of(third)
        print("KV", third["kv"], second["kv"], third["usage"])
        assert third["kv"]["prefilled"] == third["kv"]["new"] < third["usage"]["input_tokens"]
        fourth = await create(url, "What is my name?", previous_response_id=third["id"], tools=[TOOL])
        assert "Marisol" in text_of(fourth)
        assert fourth["kv"]["prefilled"] == fourth["kv"]["new"] and not fourth["kv"]["recomputed"]
        again = await create(url, "What is my dog called?", conversation=kept)
        assert "Rex" in text_of(again) and again["kv"]["prefilled"] == again["kv"]["new"]
        items = await ask(url, "GET", f"/v1/conversations/{kept}/items?order=asc")
        assert [item["type"] for item in items["data"]] == ["message"] * 4
        assert items["data"][1] == joined["output"][0]


async def test_a_background_response_of_a_killed_server_is_failed_in_the_next(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, url):
        begun = await create(url, STORY, background=True, min_output_tokens=1000, max_output_tokens=1500)
        await server.kill()
        url = await server.start()
        lost = await ask(url, "GET", f"{RESPONSES}/{begun['id']}")
        assert lost["status"] == "failed" and lost["error"]["code"] == "server_error"
        assert (await create(url, "Hello!", previous_response_id=begun["id"]))["status"] == "completed"


async def test_a_client_that_leaves_in_the_middle_ends_its_response(server: Serving) -> None:
    def leave() -> str:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        body = {"input": STORY, "stream": True, "min_output_tokens": 1000, "max_output_tokens": 1200}
        connection.request("POST", RESPONSES, json.dumps(body))
        answer = connection.getresponse()
        lines = [answer.readline().decode() for _ in range(40)]
        answer.close()
        connection.close()
        created: str = json.loads(lines[1].removeprefix("data: "))["response"]["id"]
        return created

    name = await asyncio.to_thread(leave)
    while (kept := await ask(server.url, "GET", f"{RESPONSES}/{name}"))["status"] == "in_progress":
        pass
    assert kept["status"] == "cancelled" and 0 < kept["usage"]["output_tokens"] < 1000
    assert (await create(server.url, "Hello!"))["status"] == "completed"


async def test_a_grammar_that_cannot_be_followed_is_refused(server: Serving) -> None:
    schema = {"type": "string", "enum": [1]}  # only its compiler finds out
    text = {"format": {"type": "json_schema", "name": "unique", "schema": schema, "strict": True}}
    status, told = await asyncio.to_thread(asked, server.url, "POST", RESPONSES, {"input": "x", "text": text})
    assert status == 400 and json.loads(told)["error"]["code"] == "invalid_grammar"
    last = (await stream(server.url, "x", text=text))[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["type"] == "invalid_grammar"


async def test_a_full_context_is_truncated_if_that_is_asked_for(server: Serving) -> None:
    said = [{"role": "user", "content": f"Note {number}: " + "fox " * 80} for number in range(40)]
    turns = [turn for one in said for turn in (one, {"role": "assistant", "content": "Noted."})]
    question = {"role": "user", "content": "Hello!"}
    status, told = await asyncio.to_thread(
        asked, server.url, "POST", RESPONSES, {"input": [*turns, question]}
    )
    assert status == 400 and json.loads(told)["error"]["code"] == "context_length_exceeded"
    fits = await create(server.url, [*turns, question], truncation="auto", max_output_tokens=20)
    assert fits["truncation"] == "auto" and fits["usage"]["input_tokens"] < 2048
