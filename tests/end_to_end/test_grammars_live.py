"""Grammars from the client's hand to the model and back: formats, forced calls, strict arguments, bad input."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import jsonschema
import pytest

from holdfast.runtime.grammar import queue
from holdfast.sdk import Client, ServerError

pytestmark = pytest.mark.anyio

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 1},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "get_forecast", "parameters": CITY}
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
NAMED = {"name": "trip", "schema": CITY, "strict": True}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others use may take long over a good grammar."""
    monkeypatch.setattr(queue, "COMPILE_SECONDS", 30.0)


async def said(client: Client, **fields: Any) -> str:
    async with client.session() as chat:
        text = await chat.say("What is the weather in Rome?", **fields).text()
        assert chat.last.status == "completed"
        return text


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "json_schema", **NAMED}}},
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    ],
)
@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_text_fits_its_schema(client: Client, fields: dict[str, Any], temperature: float) -> None:
    for seed in range(3):
        jsonschema.validate(
            json.loads(await said(client, temperature=temperature, seed=seed, **fields)), CITY
        )


async def test_text_is_what_a_grammar_of_ours_says(client: Client) -> None:
    choices = ["sun, and more of it", "rain"]
    assert await said(client, grammar={"type": "choice", "choices": choices}) in choices
    code = await said(client, grammar={"type": "regex", "pattern": "[0-9]{3}/[a-f]{2}"}, temperature=1)
    assert re.fullmatch("[0-9]{3}/[a-f]{2}", code)
    lark = {"type": "lark", "definition": 'start: "It is " degree " degrees."\ndegree: /-?[0-9]{1,2}/'}
    assert re.fullmatch(r"It is -?\d{1,2} degrees\.", await said(client, grammar=lark))
    assert isinstance(json.loads(await said(client, response_format={"type": "json_object"})), dict)
    assert await said(client, text={"format": {"type": "text"}}) == await said(client)


async def test_the_conversation_goes_on_behind_a_format_and_keeps_its_kv(client: Client) -> None:
    async with client.session() as chat:
        await chat.say("My name is Marisol.").text()
        await chat.say("And yours?", text={"format": {"type": "json_schema", **NAMED}}).text()
        assert "Marisol" in await chat.say("What is my name?").text()
        assert chat.last.kv is not None and chat.last.kv.miss_reason is None


async def test_a_call_is_forced_in_the_models_own_form(client: Client) -> None:
    async with client.session(tools=[WEATHER, ADD]) as chat:
        async for _ in chat.respond(tool_choice="required", instructions="Talk.", temperature=1, seed=4):
            pass
        assert chat.last.calls and not chat.last.text
        for temperature in (0, 1.3):
            named = {"type": "function", "name": "get_forecast"}
            async for _ in chat.respond(tool_choice=named, temperature=temperature, seed=2):
                pass
            (call,) = chat.last.calls
            assert call.name == "get_forecast"
            jsonschema.validate(json.loads(call.arguments), CITY)


async def test_only_allowed_tools_are_called_and_the_prompt_stays(client: Client) -> None:
    bias = {1530: 100.0}  # <tool_call>: the model opens one at once
    allowed = {"mode": "auto", "type": "allowed_tools", "tools": [{"type": "function", "name": "add"}]}
    async with client.session(tools=[WEATHER, ADD]) as chat:
        await chat.say("Hello there!").text()
        for choice in ({**allowed, "mode": "required"}, allowed):
            for seed in range(2):
                async for _ in chat.say(
                    "Weather in Oslo?",
                    tool_choice=choice,
                    logit_bias=bias,
                    temperature=2,
                    seed=seed,
                    max_output_tokens=60,
                ):
                    pass
                assert {call.name for call in chat.last.calls} == {"add"}
                assert chat.last.kv is not None and chat.last.kv.miss_reason is None


async def test_a_list_of_all_tools_rules_out_what_was_offered_before(client: Client) -> None:
    allowed = {"mode": "auto", "type": "allowed_tools", "tools": [{"type": "function", "name": "add"}]}
    weather = {**WEATHER, "name": "get_weather"}
    async with client.session(tools=[weather, ADD]) as chat:
        called = []
        for more in ({}, {"tools": [ADD]}, {"tools": [ADD], "tool_choice": allowed}):
            async for _ in chat.say(
                "What is the weather in Rome?", temperature=0, max_output_tokens=60, **more
            ):
                pass
            called.append({call.name for call in chat.last.calls})
            for call in chat.last.calls:
                await chat.answer(call, "7 degrees")
        assert called[:2] == [{"get_weather"}] * 2, "the model goes by the earlier call"
        assert called[2] <= {"add"}


async def test_a_session_forces_calls_and_a_response_lets_go(client: Client) -> None:
    async with client.session(tools=[ADD], tool_choice="required") as chat:
        async for _ in chat.respond(tool_choice="none"):
            pass
        assert chat.last.text and not chat.last.calls
        async for _ in chat.respond():
            pass
        assert [call.name for call in chat.last.calls][:1] == ["add"]


async def test_strict_tools_bind_calls_and_leave_words_free(client: Client) -> None:
    strict = {**WEATHER, "strict": True}
    async with client.session(tools=[strict]) as chat:
        async for _ in chat.respond(instructions="Hello there!"):
            pass
        assert chat.last.text or chat.last.calls
    bias = {1530: 100.0}  # <tool_call>: the model opens one at once
    async with client.session(tools=[strict, {**ADD, "strict": True}]) as chat:
        for seed in range(2):
            async for _ in chat.respond(
                logit_bias=bias, temperature=2, seed=seed, max_output_tokens=60, tool_choice="auto"
            ):
                pass
            assert chat.last.calls
            for call in chat.last.calls:
                schema = CITY if call.name == "get_forecast" else ADD["parameters"]
                jsonschema.validate(json.loads(call.arguments), schema)


async def test_a_format_may_be_answered_by_a_call_where_there_are_tools(client: Client) -> None:
    async with client.session(tools=[ADD]) as chat:
        for bias in ({1530: -100.0}, {1530: 100.0}):
            async for _ in chat.respond(
                response_format={"type": "json_schema", "json_schema": NAMED}, logit_bias=bias
            ):
                pass
            if bias[1530] > 0:
                assert chat.last.calls and not chat.last.text
            else:
                jsonschema.validate(json.loads(chat.last.text), CITY)


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}}


SCHEMA = "response.text.format.schema"
REFUSED = [
    (
        schema_of({"enum": [f"value {n}" for n in range(10_000)]}),
        "invalid_grammar",
        SCHEMA,
    ),
    (schema_of({"multipleOf": 999_983}), "invalid_grammar", "response.text.format.schema"),
    (
        schema_of({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]}),
        "invalid_grammar",
        SCHEMA,
    ),
    (schema_of({"properties": {f"p{n}": {} for n in range(2000)}}), "invalid_grammar", SCHEMA),
    (schema_of({"type": "nope"}), "invalid_grammar", SCHEMA),
    (schema_of({"type": "array", "uniqueItems": True}), "invalid_grammar", SCHEMA),
    ({"grammar": {"type": "regex", "pattern": "("}}, "invalid_grammar", None),
    ({"grammar": {"type": "regex", "pattern": "(a?){5000}a{5000}"}}, "invalid_grammar", None),
    ({"grammar": {"type": "regex", "pattern": "a" * 200_000}}, "invalid_grammar", "response.grammar.pattern"),
    ({"grammar": {"type": "lark", "definition": "start: nowhere"}}, "invalid_grammar", None),
    (
        {"grammar": {"type": "lark", "definition": 'start: %json {"multipleOf": 99991}'}},
        "invalid_grammar",
        None,
    ),
    (
        {"grammar": {"type": "regex", "pattern": "a"}, "response_format": {"type": "json_object"}},
        "invalid_grammar",
        "response.grammar",
    ),
    ({"tool_choice": "required"}, "invalid_value", "response.tool_choice"),
    ({"tool_choice": {"type": "function", "name": "nobody"}}, "invalid_value", "response.tool_choice"),
    (
        {"tool_choice": "required", "tools": [ADD], "response_format": {"type": "json_object"}},
        "invalid_grammar",
        "response.tool_choice",
    ),
    (
        {"tools": [{**ADD, "strict": True, "parameters": {"type": "array"}}]},
        "invalid_grammar",
        "response.tools[0].parameters",
    ),
    (
        {"grammar": {"type": "choice", "choices": ["7"]}, "bad_words": ["7"]},
        "grammar_stuck",
        None,
    ),
]


async def test_an_impossible_grammar_is_refused_by_name_and_others_go_on(client: Client) -> None:
    async def talk() -> None:
        async with client.session() as other:
            while not done:
                await other.say("Tell me the story of the fox.", max_output_tokens=8).text()
                told.set()

    done, told = False, anyio.Event()
    async with anyio.create_task_group() as group, client.session() as chat:
        group.start_soon(talk)
        for fields, code, param in REFUSED:
            with pytest.raises(ServerError) as refused:
                await chat.say("Tell me.", **fields).text()
            assert refused.value.code == code, (fields, refused.value)
            if param is not None:
                assert refused.value.param == param
            told = anyio.Event()
            await told.wait()  # the other goes on
        assert "Marisol" in await chat.say("My name is Marisol. What is my name?").text()
        done = True
