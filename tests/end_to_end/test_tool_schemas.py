"""Tools and their schemas on every face: what is refused and under which name, what is left out, no parameters,
and no calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.gateway.server import Serving
from holdfast.runtime.grammar import queue
from holdfast.sdk import ServerError, connect

from .test_responses import asked
from .wires import Json

pytestmark = pytest.mark.anyio

UNIQUE = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {"enum": [7]}, "maxItems": 3, "uniqueItems": True}},
    "required": ["ids"],
    "additionalProperties": False,
}
SUM = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"]}
HI = "What is 2 + 3?"
CALL_OPENS = {1530: 100.0}
"""A bias by which the model opens a call at once: the token is ``<tool_call>``."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others use may take long over a good grammar."""
    monkeypatch.setattr(queue, "COMPILE_SECONDS", 30.0)


class Refused(Exception):
    """The field that an error names, and its text."""


async def posted(server: Serving, path: str, body: Json) -> Any:
    status, text = await asyncio.to_thread(asked, server.url, "POST", path, body)
    told = json.loads(text)
    if status != 200:
        error = told["error"]
        raise Refused(error.get("param") or error["details"]["param"], error["message"])
    return told


async def by_chat(server: Serving, tools: list[Json], choice: Any, **fields: Any) -> tuple[str, Json]:
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    body = {"messages": [{"role": "user", "content": HI}], "temperature": 0, "max_tokens": 99, **fields}
    body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    told = await posted(server, "/v1/chat/completions", {**body, "tool_choice": choice})
    message = told["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"] or "", {call["name"]: json.loads(call["arguments"]) for call in calls}


async def by_responses(server: Serving, tools: list[Json], choice: Any, **fields: Any) -> tuple[str, Json]:
    choice = {"type": "function", **choice} if isinstance(choice, dict) else choice
    body = {"input": HI, "temperature": 0, "max_output_tokens": 99, "tool_choice": choice, **fields}
    told = await posted(
        server, "/v1/responses", {**body, "tools": [{"type": "function", **tool} for tool in tools]}
    )
    calls = [item for item in told["output"] if item["type"] == "function_call"]
    text = "".join(item["content"][0]["text"] for item in told["output"] if item["type"] == "message")
    return text, {call["name"]: json.loads(call["arguments"]) for call in calls}


async def by_messages(server: Serving, tools: list[Json], choice: Any, **fields: Any) -> tuple[str, Json]:
    kinds = {"required": {"type": "any"}, "auto": {"type": "auto"}, "none": {"type": "none"}}
    body = {
        "messages": [{"role": "user", "content": HI}],
        "temperature": 0,
        "max_tokens": 99,
        "model": "pocket",
    }
    offered = [dict(tool) for tool in tools]
    for tool in offered:
        tool["input_schema"] = tool.pop("parameters", {"type": "object"})
    choice = {"type": "tool", **choice} if isinstance(choice, dict) else kinds[choice]
    told = await posted(server, "/v1/messages", {**body, "tools": offered, "tool_choice": choice})
    calls = {block["name"]: block["input"] for block in told["content"] if block["type"] == "tool_use"}
    return "".join(block.get("text", "") for block in told["content"]), calls


async def by_realtime(server: Serving, tools: list[Json], choice: Any, **fields: Any) -> tuple[str, Json]:
    choice = {"type": "function", **choice} if isinstance(choice, dict) else choice
    asked = {"temperature": 0, "max_output_tokens": 99, "tool_choice": choice, **fields}
    try:
        async with connect(server.url) as client, client.session() as chat:
            tools = [{"type": "function", **tool} for tool in tools]
            async for _ in chat.say(HI, tools=tools, **asked):
                pass
            return chat.last.text, {call.name: json.loads(call.arguments) for call in chat.last.calls}
    except ServerError as error:
        raise Refused(error.param, error.message) from None


Face = Callable[..., Awaitable[tuple[str, Json]]]
FACES: dict[Face, str] = {
    by_chat: "tools[{}].function.parameters",
    by_responses: "tools[{}].parameters",
    by_messages: "tools[{}].input_schema",
    by_realtime: "response.tools[{}].parameters",
}
faces = pytest.mark.parametrize("face", FACES, ids=[face.__name__ for face in FACES])


@faces
async def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_field_and_keyword(
    server: Serving, face: Face
) -> None:
    tools = [{"name": "add", "parameters": SUM}, {"name": "now"}]
    tools.append({"name": "pick", "parameters": UNIQUE, "strict": True})
    for choice in ("auto", "required", {"name": "pick"}):
        with pytest.raises(Refused) as refused:
            await face(server, tools, choice)
        param, told = refused.value.args
        assert param == FACES[face].format(2) and "`uniqueItems` in `properties.ids`" in told
    assert await face(server, tools, {"name": "add"}) == ("", {"add": {"a": 5}}), "the others are served"


@faces
@pytest.mark.parametrize("strict", [{}, {"strict": False}], ids=["absent", "false"])
async def test_what_cannot_be_enforced_of_other_schemas_is_left_out_for_this_tool_alone(
    server: Serving, face: Face, strict: Json
) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer", "enum": ["x"]}}, "required": ["a"]}
    tools = [
        {"name": "add", "parameters": SUM, "strict": True},
        {"name": "pick", "parameters": UNIQUE, **strict},
    ]
    tools.append({"name": "odd", "parameters": odd, **strict})
    assert await face(server, tools, {"name": "add"}) == ("", {"add": {"a": 5}})
    _, calls = await face(server, tools, {"name": "pick"})
    assert (
        set(calls["pick"]) == {"ids"} and set(calls["pick"]["ids"]) <= {7} and len(calls["pick"]["ids"]) <= 3
    )
    _, calls = await face(server, tools, "required")
    assert calls.get("add", {"a": 5}) == {"a": 5}
    await face(server, tools, "auto")


@faces
async def test_a_tool_without_parameters_is_called_with_the_empty_object(server: Serving, face: Face) -> None:
    for given in ({}, {"parameters": {}}, {"parameters": {"type": "object"}}):
        if face is by_messages and given == {"parameters": {}}:
            given = {"parameters": {"type": "object", "description": "nothing"}}
        tools = [{"name": "now", **given}, {"name": "add", "parameters": SUM}]
        assert await face(server, tools, {"name": "now"}) == ("", {"now": {}})
        assert await face(server, [{"name": "now", **given}], "required") == ("", {"now": {}})


@pytest.mark.parametrize("face", [by_chat, by_responses, by_realtime])
async def test_where_no_tool_may_be_called_no_call_is_begun(server: Serving, face: Face) -> None:
    """Whatever the model would rather do."""
    tools = [{"name": "add", "parameters": SUM, "strict": True}]
    bias = CALL_OPENS if face is by_realtime else {str(token): value for token, value in CALL_OPENS.items()}
    _, calls = await face(server, tools, "auto", logit_bias=bias)
    assert calls == {"add": {"a": 5}}
    text, calls = await face(server, tools, "none", logit_bias=bias)
    assert text and calls == {} and "<tool_call>" not in text


@pytest.mark.parametrize("strict", [{}, {"strict": False}], ids=["absent", "false"])
async def test_the_schema_of_a_text_is_followed_as_far_as_it_can_be(server: Serving, strict: Json) -> None:
    named = {"name": "x", "schema": UNIQUE, **strict}
    body = {"messages": [{"role": "user", "content": HI}], "temperature": 0}
    form = {"type": "json_schema", "json_schema": named}
    told = await posted(server, "/v1/chat/completions", {**body, "response_format": form})
    assert set(json.loads(told["choices"][0]["message"]["content"])["ids"]) <= {7}
    flat = {"type": "json_schema", **named}
    told = await posted(server, "/v1/responses", {"input": HI, "text": {"format": flat}, "temperature": 0})
    assert set(json.loads(told["output"][0]["content"][0]["text"])["ids"]) <= {7}
    named["strict"] = flat["strict"] = True
    for path, asks, param in (
        ("/v1/chat/completions", {**body, "response_format": form}, "response_format.json_schema.schema"),
        ("/v1/responses", {"input": HI, "text": {"format": flat}}, "text.format.schema"),
    ):
        with pytest.raises(Refused) as refused:
            await posted(server, path, asks)
        assert refused.value.args[0] == param and "`uniqueItems`" in refused.value.args[1]
