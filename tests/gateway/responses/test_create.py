"""`POST /v1/responses`: whole and streamed, what is followed, what has no effect and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.runtime.verbs import TokenLimits

from .stage import staged, text_of, told

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_whole_response_has_the_standards_fields() -> None:
    async with staged(link=told("Hello there.")) as stage:
        response = await stage.create("Hi", metadata={"topic": "greetings"}, user="me", max_output_tokens=50)
    assert response["object"] == "response" and response["status"] == "completed"
    assert response["id"].startswith("resp_") and response["model"] == "fake"
    (item,) = response["output"]
    assert item["type"] == "message" and item["role"] == "assistant" and item["status"] == "completed"
    assert item["content"] == [
        {"type": "output_text", "text": "Hello there.", "annotations": [], "logprobs": []}
    ]
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": usage["input_tokens"]}
    assert response["metadata"] == {"topic": "greetings"} and response["max_output_tokens"] == 50
    assert response["completed_at"] >= response["created_at"]
    for name in ("error", "incomplete_details", "instructions", "previous_response_id", "conversation"):
        assert response[name] is None
    assert response["text"] == {"format": {"type": "text"}} and response["tools"] == []
    assert (response["store"], response["background"], response["truncation"]) == (True, False, "disabled")


async def test_the_events_of_a_text_come_in_the_standards_order() -> None:
    async with staged(link=told("Hello there.")) as stage:
        events = await stage.stream("Hi")
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == [*begin, *["output_text.delta"] * deltas, *end]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == "Hello there." == text_of(events[-1]["response"])
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert events[2]["item"]["status"] == "in_progress" and events[2]["item"]["content"] == []
    (item,) = events[-1]["response"]["output"]
    assert item == events[-2]["item"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}


async def test_a_call_is_told_with_its_arguments_and_answered() -> None:
    async with staged(link=told("I look." + CALL, "It is sunny.")) as stage:
        events = await stage.stream([user("The weather in Rome?")], tools=[TOOL])
        response = events[-1]["response"]
        text, call = response["output"]
        assert text["content"][0]["text"] == "I look."
        assert call["type"] == "function_call" and call["name"] == "get_weather"
        assert call["arguments"] == '{"city": "Rome"}' and call["status"] == "completed"
        kinds = [
            event["type"].removeprefix("response.") for event in events if event.get("output_index") == 1
        ]
        assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done"
        assert kinds[-2] == "function_call_arguments.done"
        deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call["arguments"]
        assert all("call_id" not in e for e in events if "function_call_arguments" in e["type"])
        before = len(stage.link.log)
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        second = await stage.create([output], previous_response_id=response["id"], tools=[TOOL])
        assert text_of(second) == "It is sunny."
        assert second["kv"]["prefilled"] == second["kv"]["new"] < second["usage"]["input_tokens"]
        assert not any(entry[0] == "begin" for entry in stage.link.log[before:]), "the same sequence goes on"


async def test_stateless_items_continue_the_session_that_has_them() -> None:
    async with staged(link=told("One." + CALL, "Two.", "Three.")) as stage:
        first = await stage.create([user("a")], tools=[TOOL], store=False, instructions="Be brief.")
        call = first["output"][1]
        items = [user("a"), *first["output"]]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"})
        second = await stage.create(items, tools=[TOOL], store=False, instructions="Be brief.")
        assert second["kv"]["prefilled"] == second["kv"]["new"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        items += [{"type": "reasoning", "id": "rs_1", "summary": []}, *second["output"], user("b")]
        third = await stage.create(items, tools=[TOOL], store=False, instructions="Be brief.")
        assert third["kv"]["prefilled"] == third["kv"]["new"], "reasoning that comes back has no effect"
        system = [{"type": "message", "role": "developer", "content": "Be brief."}, *items]
        again = await stage.create(system, tools=[TOOL], store=False)
        assert again["kv"]["prefilled"] <= third["kv"]["new"], "a first developer message is the instructions"


async def test_only_one_call_is_made_without_parallel_calls() -> None:
    async with staged(link=told(CALL + CALL, CALL + CALL)) as stage:
        both = await stage.create("go", tools=[TOOL], store=False)
        one = await stage.create("go on", tools=[TOOL], parallel_tool_calls=False, store=False)
    assert len(both["output"]) == 2 and len(one["output"]) == 1
    assert one["status"] == "completed" and one["parallel_tool_calls"] is False


async def test_a_reply_that_ignores_its_end_has_as_many_tokens_as_its_limit() -> None:
    async with staged(link=told("Hello there.")) as stage:
        await stage.create("Hi", ignore_eos=True, max_output_tokens=7)
        (limits,) = [part for entry in stage.link.log for part in entry if isinstance(part, TokenLimits)]
        assert limits.min_tokens == limits.max_tokens == 7
        for fields in ({"stop": ["a"]}, {"stop_token_ids": [5]}):
            body = {"input": "Hi", "ignore_eos": True, "max_output_tokens": 7, **fields}
            assert await stage.refused("POST", "/v1/responses", body) == (400, "invalid_value", "ignore_eos")


async def test_a_reply_that_is_cut_is_incomplete() -> None:
    async with staged(link=told("one two three four five six")) as stage:
        events = await stage.stream("count", max_output_tokens=2)
    last = events[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["completed_at"] is None


async def test_log_probabilities_are_told_where_they_are_asked_for() -> None:
    link = told("Hello there.", "Hello there.")
    link.logprobs = True
    async with staged(link=link) as stage:
        events = await stage.stream("Hi", include=["message.output_text.logprobs"], top_logprobs=1)
        part = events[-1]["response"]["output"][0]["content"][0]
        assert "".join(one["token"] for one in part["logprobs"]) == "Hello there."
        assert all(set(one) == {"token", "logprob", "bytes", "top_logprobs"} for one in part["logprobs"])
        scored = [one for e in events if e["type"].endswith("text.delta") for one in e["logprobs"]]
        assert scored == part["logprobs"]


async def test_some_tools_are_allowed_and_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [TOOL, {**TOOL, "name": "look"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    link, asked = told("Sunny."), []
    begin = link.begin

    async def seen(opening: Any, sampling: Any, *more: Any, **named: Any) -> Any:
        asked.append(sampling)
        return await begin(opening, sampling, *more, **named)

    monkeypatch.setattr(link, "begin", seen)
    async with staged(link=link) as stage:
        response = await stage.create("Hi", tools=tools, tool_choice=choice)
        assert response["tool_choice"] == choice
        assert [tool["name"] for tool in response["tools"]] == [TOOL["name"], "look"]
        assert "look" in asked[0].grammar.text and TOOL["name"] not in asked[0].grammar.text


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "missing_required_parameter", "input"),
    ({"input": [], "model": "fake"}, "missing_required_parameter", "input"),
    ({"input": 7}, "invalid_type", "input"),
    ({"input": "x", "frobnicate": 1}, "unknown_parameter", "frobnicate"),
    ({"input": "x", "temperature": 2.1}, "invalid_value", "temperature"),
    ({"input": "x", "max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ({"input": "x", "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"input": "x", "metadata": {"a": 1}}, "invalid_type", "metadata[...]"),
    ({"input": "x", "prompt": {"id": "p"}}, "unsupported_field", "prompt"),
    ({"input": "x", "truncation": "some"}, "invalid_value", "truncation"),
    ({"input": "x", "include": ["secrets"]}, "invalid_value", "include[0]"),
    ({"input": "x", "tools": [{"type": "magic"}]}, "invalid_value", "tools[0].type"),
    ({"input": "x", "tool_choice": {"type": "file_search"}}, "unsupported_field", "tool_choice.type"),
    ({"input": "x", "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "invalid_value", "tool_choice"),
    (
        {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
        "unsupported_field",
        "tool_choice.tools[0].type",
    ),
    (
        {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "invalid_value",
        "tool_choice.tools",
    ),
    ({"input": "x", "model": "gpt-9"}, "model_not_found", None),
    ({"input": "x", "background": True, "store": False}, "invalid_value", "background"),
    ({"input": "x", "previous_response_id": "resp_1", "conversation": "conv_1"}, "invalid_value", None),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_not_found", None),
    ({"input": "x", "conversation": "conv_1"}, "conversation_not_found", None),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "unsupported_field", None),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "unsupported_field", None),
    ({"input": [{"type": "web_search_call", "id": "ws"}]}, "unsupported_field", "input[0].type"),
    ({"input": [{"role": "king", "content": "x"}]}, "invalid_value", "input[0].role"),
    ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "invalid_value", "input[0].id"),
    (
        {"input": [user("x"), {"type": "function_call_output", "call_id": "c", "output": "y"}]},
        "invalid_value",
        "input[1].call_id",
    ),
    (
        {"input": [{"type": "compaction", "encrypted_content": "bm90IG91cnM="}]},
        "invalid_value",
        "input[0].encrypted_content",
    ),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
        "invalid_value",
        "text.format.name",
    ),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSED, ids=lambda value: str(value)[:60])
async def test_a_bad_body_is_refused_before_any_work(
    body: dict[str, Any], code: str, param: str | None
) -> None:
    async with staged() as stage:
        status, told_code, told_param = await stage.refused("POST", "/v1/responses", body)
        assert status in (400, 404) and told_code == code
        assert param is None or told_param == param
        assert stage.link.log == [] and len(stage.service.sessions()) == 0


async def test_fields_without_effect_are_accepted() -> None:
    async with staged() as stage:
        plain = await stage.create("Hi")
        fields = {
            "service_tier": "flex",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "max_tool_calls": 3,
            "stream_options": {"include_obfuscation": False},
            "text": {"verbosity": "low"},
            "include": ["reasoning.encrypted_content", "file_search_call.results"],
            "truncation": "auto",
        }
        other = await stage.create("Hi", **fields)
    assert text_of(other) == text_of(plain)
    assert (other["prompt_cache_key"], other["safety_identifier"]) == ("k", "s")


async def test_a_client_that_leaves_ends_its_response_and_nothing_else() -> None:
    link = told(" ".join(["word"] * 400), "Fine.")
    async with staged(link=link) as stage:
        answer = await stage.ask(
            "POST",
            "/v1/responses",
            {"input": "talk", "stream": True},
            leave=lambda body: body.count(b"output_text.delta") >= 3,
        )
        name = answer.body.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode()
        kept = await stage.ended(name)
        assert kept["status"] == "cancelled" and 0 < len(text_of(kept)) < 1600
        assert not any(live.running for live in stage.service.sessions())


async def test_counting_tells_the_tokens_of_the_prompt() -> None:
    async with staged() as stage:
        body = {"input": [user("How many?")], "instructions": "Be brief.", "tools": [TOOL]}
        counted = (await stage.ask("POST", "/v1/responses/input_tokens", body)).json
        response = await stage.create(body.pop("input"), **body)
    assert counted == {"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]}
