"""What holds for every face with requests that bring the whole conversation, whatever its frames."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest
from msgspec.inspect import FloatType, IntType, Metadata, UnionType, type_info

from holdfast.gateway.chat import completions
from holdfast.gateway.chat import frames as chat
from holdfast.gateway.messages import frames as messages
from holdfast.gateway.responses import frames as responses
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.verbs import Sampling
from holdfast.sdk.frames.sampling import SamplingFields
from holdfast.sessions.errors import SamplingInvalid
from holdfast.sessions.turn.request import TurnRequest
from holdfast.tests.gateway.messages.messages_stage import WEATHER, Stage, call_text, exchange, stage

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "Hi"}
Json = dict[str, Any]
PARAMETERS = WEATHER["input_schema"]
TOOLS: dict[str, Json] = {
    "chat": {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    "messages": WEATHER,
    "responses": {"type": "function", "name": "get_weather", "parameters": PARAMETERS},
}
FACES: dict[str, tuple[str, Json, type[msgspec.Struct]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}, chat.ChatRequest),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 20}, completions.CompletionRequest),
    "messages": (
        "/v1/messages",
        {"model": "scripted", "max_tokens": 50, "messages": [USER]},
        messages.MessagesRequest,
    ),
    "responses": ("/v1/responses", {"input": "Hi"}, responses.CreateBody),
}
every_face = pytest.mark.parametrize("face", list(FACES))


async def post(on: Stage, face: str, **fields: Any) -> Any:
    path, body, _ = FACES[face]
    return await on.http.post(path, json={**body, **fields})


def wire_names(body: type[msgspec.Struct]) -> dict[str, str]:
    return {one.name: one.encode_name for one in msgspec.structs.fields(body)}


# --- one declaration of the sampling fields -------------------------------------------------------------------


@every_face
def test_every_face_takes_every_sampling_field(face: str) -> None:
    names = wire_names(FACES[face][2])
    assert set(SamplingFields.__struct_fields__) <= set(names)
    assert len(set(names.values())) == len(names), "no two fields have one name"


def numbers() -> list[Any]:
    """The sampling fields that are numbers, with their ranges as they are declared."""
    found = []
    for one in msgspec.structs.fields(SamplingFields):
        info = type_info(one.type)
        kinds = info.types if isinstance(info, UnionType) else (info,)
        plain = (kind.type if isinstance(kind, Metadata) else kind for kind in kinds)
        number = next((kind for kind in plain if isinstance(kind, IntType | FloatType)), None)
        if number is not None:
            found.append(pytest.param(one.name, number, id=one.name))
    assert len(found) == 12
    return found


@pytest.mark.parametrize(("name", "declared"), numbers())
def test_a_turn_takes_the_declared_range_and_no_more(name: str, declared: IntType | FloatType) -> None:
    step = 1 if isinstance(declared, IntType) else 1e-6
    limit = {"max_output_tokens": 2**31 - 1} if name == "min_output_tokens" else {}
    least = declared.gt + step if declared.gt is not None else declared.ge
    assert least is not None and declared.le is not None
    for value in (least, declared.le):
        TurnRequest.checked(**limit, **{name: value})
    for value in (least - step, declared.le + step):
        with pytest.raises(SamplingInvalid) as refused:
            TurnRequest.checked(**limit, **{name: value})
        assert refused.value.param == name


def test_what_the_engine_draws_by_is_declared() -> None:
    """But for what the server itself adds: a grammar, and the scores of a prompt."""
    drawn = set(Sampling.__struct_fields__) - {"grammar", "prompt_logprobs"}
    assert {{"logprobs": "top_logprobs"}.get(one, one) for one in drawn} <= set(
        SamplingFields.__struct_fields__
    )


@every_face
async def test_an_error_names_the_field_of_its_face(face: str) -> None:
    names = wire_names(FACES[face][2])
    wrong: dict[str, Json] = {
        "stop": {"stop": ["x"] * 17},
        "min_output_tokens": {"min_output_tokens": 9, "max_output_tokens": 8},
        "stop_token_ids": {"stop_token_ids": [10**8]},
        "top_p": {"top_p": 1.5},
        "temperature": {"temperature": 2.5},
    }
    async with stage("one") as on:
        for field, values in wrong.items():
            answer = await post(on, face, **{names[name]: value for name, value in values.items()})
            told = answer.json()["error"]
            param = told["param"] if "param" in told else told["details"]["param"]
            assert (answer.status_code, param) == (400, names[field]), told
            ours = {name for name, own in names.items() if name != own}
            assert not any(f"`{name}`" in told["message"] for name in ours), told["message"]


@every_face
async def test_what_means_the_most_likely_token_is_served(face: str) -> None:
    async with stage("one two") as on:
        assert (await post(on, face, top_p=0, temperature=1)).status_code == 200


# --- replies --------------------------------------------------------------------------------------------------

BROKEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os}\n</tool_call>'


def reason(face: str, body: Any) -> str:
    match face:
        case "chat":
            return str(body["choices"][0]["finish_reason"])
        case "messages":
            return str(body["stop_reason"])
    return "/".join(f"{one['type']} {one['status']}" for one in body["output"])


@pytest.mark.parametrize(
    ("face", "whole", "broken"),
    [
        ("chat", "tool_calls", "stop"),
        ("messages", "tool_use", "end_turn"),
        ("responses", "function_call completed", "function_call incomplete"),
    ],
)
async def test_only_a_whole_call_is_a_reason_to_end(face: str, whole: str, broken: str) -> None:
    async with stage(call_text("Oslo"), BROKEN) as on:
        for expected in (whole, broken):
            answer = await post(on, face, tools=[TOOLS[face]])
            assert reason(face, answer.json()) == expected


DELTAS = {
    "chat": b'"delta":{"content":"',
    "completions": b'"text":"',
    "messages": b"text_delta",
    "responses": b"output_text.delta\n",
}
"""What each delta of a stream has."""


@every_face
@pytest.mark.parametrize("begun", [False, True])
async def test_no_stream_is_silent_for_long(face: str, begun: bool) -> None:
    """Neither while the prompt is computed, nor in the middle of a reply."""
    settings = GatewaySettings(limits=ClientLimits(quiet_seconds=0.005))
    path, body, _ = FACES[face]
    ping = b"event: ping\ndata" if face == "messages" else b": ping\n\n"
    async with stage("one two " * 20, settings=settings) as on:
        on.link.flowing = begun
        stopped = None if begun else 0  # where in the stream the model pauses

        def told(came: bytes) -> bool:
            nonlocal stopped
            if stopped is None and DELTAS[face] in came:
                stopped, on.link.flowing = len(came), False
            if stopped is not None and came[stopped:].count(ping) >= 4:
                on.link.flow()
            return False

        async with asyncio.timeout(20):
            came = await exchange(on, path, body, told)
    assert stopped is not None and came[stopped:].count(ping) >= 4 and b'"error":{' not in came
    assert came.count(DELTAS[face]) > 10, "the reply went on"


@pytest.mark.parametrize("face", ["completions", "messages"])
async def test_no_tokens_at_all_may_be_asked_for(face: str) -> None:
    """The prompt is computed, and nothing is told of a reply."""
    async with stage("one two", "three") as on:
        answer = (await post(on, face, max_tokens=0)).json()
        usage = answer["usage"]
        assert usage.get("output_tokens", usage.get("completion_tokens")) == 0
        if face == "messages":
            assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
            again = (await post(on, face)).json()
            assert again["usage"]["cache_read_input_tokens"] > 0, "it warmed the cache"
        else:
            assert answer["choices"][0]["text"] == "" and answer["choices"][0]["finish_reason"] == "length"
            echoed = (await post(on, face, max_tokens=0, echo=True)).json()
            assert echoed["choices"][0]["text"] == "Hi"


# --- tools ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("face", "most"), [("chat", 64), ("messages", 128), ("responses", 64)])
async def test_names_of_tools_are_as_long_as_the_standard_has_them(face: str, most: int) -> None:
    def named(length: int) -> Json:
        text = json.dumps(TOOLS[face]).replace("get_weather", "f" * length)
        return {"tools": [json.loads(text)]}

    async with stage("one", "two") as on:
        assert (await post(on, face, **named(most))).status_code == 200
        assert (await post(on, face, **named(most + 1))).status_code == 400
        if face == "messages":
            call = {"type": "tool_use", "id": "call_1", "name": "f" * most, "input": {}}
            output = {"type": "tool_result", "tool_use_id": "call_1", "content": "1"}
            past = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [output]}]
            assert (await post(on, face, **named(most), messages=past)).status_code == 200


# --- null -----------------------------------------------------------------------------------------------------

NULLABLE: dict[str, list[str]] = {
    "chat": ["audio", "function_call", "functions", "prediction", "web_search_options", "stop", "tools", "n"],
    "completions": ["suffix", "best_of", "logprobs", "echo", "stop"],
    "messages": ["container", "thread", "mcp_servers", "system", "thinking", "top_k"],
    "responses": ["context_management", "moderation", "prompt", "background", "tools", "reasoning", "text"],
}
"""Fields that the standards let be null, served or not."""


@every_face
async def test_null_is_absence(face: str) -> None:
    async with stage("one", "one") as on:
        plain = await post(on, face)
        answer = await post(on, face, **dict.fromkeys(NULLABLE[face]))
        assert (plain.status_code, answer.status_code) == (200, 200), answer.text
        unknown = await post(on, face, no_such_field=None)
        assert unknown.status_code == 400, "what no standard has is unknown all the same"


async def test_null_is_absence_deep_inside() -> None:
    async with stage("one", "one", "one") as on:
        part = {"type": "text", "text": "Hi", "image_url": None}
        message = {"role": "user", "content": "Hi", "audio": None, "function_call": None, "name": None}
        for content in (message, {"role": "user", "content": [part]}):
            answer = await post(on, "chat", messages=[content])
            assert answer.status_code == 200, answer.text
        many = [message, {"role": "assistant", "content": "Yes.", "audio": None}] * 200
        answer = await post(on, "chat", messages=[*many, message])
        assert answer.status_code == 200, answer.text


# --- compressed bodies --------------------------------------------------------------------------------------


@every_face
async def test_a_compressed_body_is_read(face: str) -> None:
    path, body, _ = FACES[face]
    plain = json.dumps(body).encode()
    async with stage("one", "one", "one") as on:
        for encoding, sent in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))):
            answer = await on.http.post(path, content=sent, headers={"content-encoding": encoding})
            assert answer.status_code == 200, answer.text


async def test_compressed_bodies_that_are_refused() -> None:
    """One that grows beyond its bound is refused before it is whole in memory."""
    path, body, _ = FACES["chat"]
    plain = gzip.compress(json.dumps(body).encode())
    bomb = gzip.compress(b" " * (1 << 28))
    async with stage() as on:
        for sent, encoding, status in (
            (plain, "br", 415),
            (plain[:-9], "gzip", 400),
            (b"}{", "gzip", 400),
            (bomb, "gzip", 400),
        ):
            tracemalloc.start()
            answer = await on.http.post(path, content=sent, headers={"content-encoding": encoding})
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["message"]
            assert peak < 1 << 26, "less than the bomb has"
