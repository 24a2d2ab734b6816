"""What clients send and the server does not serve: fields that have no effect, and tools that it cannot run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.gateway.clients import CHAT, COMPLETIONS, IGNORED, MESSAGES, RESPONSES, Ignored
from holdfast.tests.gateway.messages.messages_stage import Stage, stage
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
PATHS = {
    CHAT: "/v1/chat/completions",
    COMPLETIONS: "/v1/completions",
    MESSAGES: "/v1/messages",
    RESPONSES: "/v1/responses",
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HOSTED: dict[str, Json] = {
    CHAT: {"type": "custom", "custom": {"name": "hosted", "format": {"type": "text"}}},
    MESSAGES: {"type": "web_search_20250305", "name": "hosted", "max_uses": 1},
    RESPONSES: {"type": "custom", "name": "hosted", "format": {"type": "text"}},
}
SERVED: dict[str, Json] = {
    CHAT: {"type": "function", "function": {"name": "served", "parameters": SCHEMA}},
    MESSAGES: {"name": "served", "input_schema": SCHEMA},
    RESPONSES: {"type": "function", "name": "served", "parameters": SCHEMA},
}
FACES = list(SERVED)
BUILT_IN = {
    "web_search",
    "web_search_preview",
    "local_shell",
    "mcp",
    "computer_use_preview",
    "code_interpreter",
    "image_generation",
    "file_search",
    "tool_search",
}
SENT: Mapping[str, Any] = {
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []},
    "diagnostics": {"previous_message_id": "msg_1"},
    "max_tool_calls": 3,
    "metadata": {"user_id": "me"},
    "client_metadata": {"session_id": "one"},
    "output_config.effort": "high",
    "reasoning": {"effort": "high", "summary": "auto"},
    "store": True,
    "text.verbosity": "low",
    "thinking.budget_tokens": 4096,
}
"""A value of each field in the table that is no text."""


def body_of(face: str) -> Json:
    asked = "What is the weather in Rome?"
    match face:
        case "Completions":
            return {"prompt": asked}
        case "Responses":
            return {"input": asked}
        case "Messages":
            said = [{"type": "text", "text": asked}]
            system = [{"type": "text", "text": "Be brief."}]
            messages = [{"role": "user", "content": said}]
            return {"model": "scripted", "max_tokens": 50, "system": system, "messages": messages}
    return {"messages": [{"role": "user", "content": asked}]}


def with_field(row: Ignored) -> Json:
    """A body with the field of a row."""
    body = body_of(row.face)
    name = row.path.rpartition("[].")[2] or row.path
    value = SENT.get(name, "auto")
    if name == "thinking.budget_tokens":
        return {**body, "thinking": {"type": "enabled", "budget_tokens": value}}
    part_of_body: Any = body
    for part in row.path.removesuffix(name).split("[].")[:-1]:
        part_of_body = part_of_body[part][0]
    outer, _, inner = name.partition(".")
    part_of_body[outer] = {inner: value} if inner else value
    return body


def prompts(on: Stage) -> list[list[int]]:
    """The prompts that the engine has read."""
    read: list[list[int]] = on.link.model.prompts  # type: ignore[attr-defined]
    return read


def written(prompt: list[int]) -> str:
    """The text of a prompt."""
    return str(ours("chatml").backend.decode(prompt, skip_special_tokens=False))


async def post(on: Stage, face: str, body: Json) -> Any:
    return await on.http.post(PATHS[face], json=body)


@pytest.mark.parametrize("row", IGNORED, ids=lambda row: f"{row.face} {row.path}")
async def test_a_field_of_the_table_changes_no_prompt(row: Ignored) -> None:
    async with stage("one", "one") as on:
        plain = await post(on, row.face, body_of(row.face))
        with_it = await post(on, row.face, with_field(row))
        assert (plain.status_code, with_it.status_code) == (200, 200), with_it.text
        assert prompts(on)[0] == prompts(on)[-1]


async def test_the_table_is_sorted_and_documented() -> None:
    assert [(row.face, row.path) for row in IGNORED] == sorted({(row.face, row.path) for row in IGNORED})
    async with stage() as on:
        schemas = (await on.http.get("/openapi.json")).json()["components"]["schemas"]
    names = {
        CHAT: "ChatRequest",
        COMPLETIONS: "CompletionRequest",
        MESSAGES: "MessagesRequest",
        RESPONSES: "CreateBody",
    }
    for row in IGNORED:
        if row.form is not None:
            assert row.why in schemas[names[row.face]]["properties"][row.path]["description"]


@pytest.mark.parametrize("path", PATHS.values())
async def test_other_unknown_fields_are_refused(path: str) -> None:
    face = next(face for face, one in PATHS.items() if one == path)
    async with stage() as on:
        answer = await post(on, face, {**body_of(face), "clientele": 1})
        assert answer.status_code == 400 and "clientele" in answer.text


# --- tools --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["absent", "auto", "none", "required"])
@pytest.mark.parametrize("face", FACES)
async def test_a_tool_that_cannot_be_run_is_left_out_and_named(face: str, choice: str) -> None:
    call = '<tool_call>\n{"name": "served", "arguments": {"city": "Rome"}}\n</tool_call>'
    async with stage(call) as on:
        body = {**body_of(face), "tools": [SERVED[face], HOSTED[face]]}
        if choice != "absent":
            words = {"required": "any"} if face == MESSAGES else {}
            word = words.get(choice, choice)
            body["tool_choice"] = {"type": word} if face == MESSAGES else word
        answer = await post(on, face, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["unserved"] == [f"tools[1]: {HOSTED[face]['type']}"]
        assert answer.headers["x-holdfast-unserved"] == HOSTED[face]["type"]
        assert "hosted" not in written(prompts(on)[0])


@pytest.mark.parametrize("face", FACES)
async def test_a_request_with_no_other_tool_is_one_without_tools(face: str) -> None:
    auto: Any = {"type": "auto"} if face == MESSAGES else "auto"
    async with stage("one", "one") as on:
        await post(on, face, body_of(face))
        answer = await post(on, face, {**body_of(face), "tools": [HOSTED[face]], "tool_choice": auto})
        assert answer.status_code == 200 and len(answer.json()["unserved"]) == 1
        assert prompts(on)[0] == prompts(on)[-1]


@pytest.mark.parametrize("face", FACES)
async def test_a_stream_names_them_where_it_begins(face: str) -> None:
    async with stage("one two three") as on:
        body = {**body_of(face), "tools": [HOSTED[face]], "stream": True}
        answer = await post(on, face, body)
        lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
        first, *others = [json.loads(line.removeprefix("data: ")) for line in lines]
        told = first.get("message") or first.get("response") or first
        assert told["unserved"] == [f"tools[0]: {HOSTED[face]['type']}"]
        assert answer.headers["x-holdfast-unserved"] == HOSTED[face]["type"]
        if face == CHAT:
            assert not any("unserved" in other for other in others)


NAMED: dict[str, Any] = {
    CHAT: {"type": "custom", "custom": {"name": "hosted"}},
    MESSAGES: {"type": "tool", "name": "hosted"},
    RESPONSES: {"type": "custom", "name": "hosted"},
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("others", [True, False])
async def test_a_tool_that_must_be_called_is_refused(face: str, others: bool) -> None:
    required: Any = {"type": "any"} if face == MESSAGES else "required"
    tools = [HOSTED[face], SERVED[face]][: 1 + others]
    async with stage() as on:
        for choice in [NAMED[face], *([] if others else [required])]:
            answer = await post(on, face, {**body_of(face), "tools": tools, "tool_choice": choice})
            assert answer.status_code == 400
            assert "unsupported_field" in answer.text and '"tools[0].type"' in answer.text
        assert prompts(on) == []


@pytest.mark.parametrize("face", FACES)
async def test_errors_number_tools_as_the_client_does(face: str) -> None:
    bad = {**SERVED[face], "shape": "round"}
    async with stage() as on:
        answer = await post(on, face, {**body_of(face), "tools": [HOSTED[face], SERVED[face], bad]})
        assert answer.status_code == 400 and answer.text.count("tools[2].shape") == 2
        assert "tools[1]" not in answer.text


async def test_every_type_of_the_standard_is_left_out_and_no_other() -> None:
    async with stage("one", "two") as on:
        tools = [{"type": kind, "any": [1, {"field": None}]} for kind in sorted(BUILT_IN)]
        answer = await post(on, RESPONSES, {**body_of(RESPONSES), "tools": tools})
        assert answer.status_code == 200 and answer.json()["tools"] == []
        assert answer.headers["x-holdfast-unserved"].split(", ") == sorted(BUILT_IN)
        dated = ["bash_20250124", "text_editor_20250728", "code_execution_20250825", "computer_20250124"]
        tools = [{"type": kind, "name": kind} for kind in dated]
        answer = await post(on, MESSAGES, {**body_of(MESSAGES), "tools": tools})
        assert answer.status_code == 200
        assert answer.json()["unserved"] == [f"tools[{at}]: {kind}" for at, kind in enumerate(dated)]
        for face, kind in ((RESPONSES, "magic"), (MESSAGES, "magic_20250101"), (MESSAGES, "bash_ü")):
            answer = await post(on, face, {**body_of(face), "tools": [{"type": kind, "name": "m"}]})
            assert answer.status_code == 400, kind


async def test_the_header_is_short_however_many_tools_there_are() -> None:
    tools = [{"type": f"bash_{number}", "name": "bash"} for number in range(900)]
    async with stage("one") as on:
        answer = await post(on, MESSAGES, {**body_of(MESSAGES), "tools": tools})
        assert len(answer.json()["unserved"]) == 900
        assert len(answer.headers["x-holdfast-unserved"]) < 300


async def test_counting_leaves_tools_out_too() -> None:
    async with stage() as on:
        for path, face in (
            ("/v1/messages/count_tokens", MESSAGES),
            ("/v1/responses/input_tokens", RESPONSES),
        ):
            body = body_of(face)
            body.pop("max_tokens", None)
            plain = await on.http.post(path, json=body)
            counted = await on.http.post(path, json={**body, "tools": [HOSTED[face]]})
            assert counted.json() == plain.json() and counted.status_code == 200
            assert counted.headers["x-holdfast-unserved"] == HOSTED[face]["type"]


async def test_arguments_of_earlier_calls_keep_their_bytes() -> None:
    """The prompt is the same as without the tool that is left out, to the byte."""
    given = '{"a" :  1.50, "b": 123456789012345678901234567890}'
    called = f'{{"type": "tool_use", "id": "t", "name": "served", "input": {given}}}'
    output = '{"type": "tool_result", "tool_use_id": "t", "content": "1"}'
    messages = f"""[{{"role": "user", "content": "Go."}}, {{"role": "assistant", "content": [{called}]}},
        {{"role": "user", "content": [{output}]}}]"""
    async with stage("one", "one") as on:
        for tools in ([SERVED[MESSAGES]], [SERVED[MESSAGES], HOSTED[MESSAGES]]):
            fields = f'"model": "scripted", "max_tokens": 9, "tools": {json.dumps(tools)}'
            body = f'{{{fields}, "messages": {messages}}}'.encode()
            answer = await on.http.post(PATHS[MESSAGES], content=body)
            assert answer.status_code == 200, answer.text
        assert prompts(on)[0] == prompts(on)[-1]


# --- namespaces ---------------------------------------------------------------------------------------------

SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Tools for agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Begin one.", "parameters": SCHEMA},
        {"type": "function", "name": "wait", "description": "Wait for one.", "parameters": SCHEMA},
    ],
}
SPAWN = '<tool_call>\n{"name": "agents.spawn", "arguments": {"city": "Rome"}}\n</tool_call>'


async def test_a_function_of_a_namespace_is_called_by_both_its_names() -> None:
    async with stage(SPAWN, "two", "three") as on:
        body = {**body_of(RESPONSES), "tools": [SPACE, SERVED[RESPONSES]]}
        first = (await post(on, RESPONSES, body)).json()
        (call,) = first["output"]
        assert (call["namespace"], call["name"]) == ("agents", "spawn")
        assert json.loads(call["arguments"]) == {"city": "Rome"}
        assert [tool["type"] for tool in first["tools"]] == ["namespace", "function"]
        prompt = written(prompts(on)[0])
        assert prompt.count("Tools for agents.") == 1
        assert "agents.spawn" in prompt and "agents.wait" in prompt
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        kept = await post(on, RESPONSES, {**body, "input": [output], "previous_response_id": first["id"]})
        asked = {"role": "user", "content": body["input"]}
        whole = await post(on, RESPONSES, {**body, "input": [asked, call, output], "store": False})
        assert kept.status_code == whole.status_code == 200, whole.text
        assert prompts(on)[1][: len(prompts(on)[0])] == prompts(on)[0]
        assert written(prompts(on)[1]) == written(prompts(on)[-1])
        assert kept.json()["usage"]["input_tokens_details"]["cached_tokens"] > len(prompts(on)[0]) - 2


async def test_a_stored_call_of_a_namespace_is_told_again_as_it_was() -> None:
    async with stage(SPAWN) as on:
        body = {**body_of(RESPONSES), "tools": [SPACE], "stream": True}
        answer = await post(on, RESPONSES, body)
        first = json.loads(answer.text.split("data: ")[1].split("\n")[0])["response"]["id"]
        again = await on.http.get(f"/v1/responses/{first}?stream=true")
        assert again.text == answer.text and '"namespace":"agents"' in again.text


async def test_a_namespace_is_not_forced() -> None:
    async with stage() as on:
        choice = {"type": "namespace", "name": "agents"}
        answer = await post(on, RESPONSES, {**body_of(RESPONSES), "tools": [SPACE], "tool_choice": choice})
        assert answer.status_code == 400 and "tool_choice.type" in answer.text
