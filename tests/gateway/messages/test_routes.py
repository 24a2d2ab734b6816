"""Messages over a scripted engine: answers, streams, sessions that go on, and every kind of refusal."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from holdfast.gateway.errors import messages_answer
from holdfast.gateway.settings import GatewaySettings
from holdfast.kvstore.log_lines import LogSettings, logging_lines
from holdfast.sessions.errors import PromptTooLong
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.tools.forms import ReasoningForm
from holdfast.tests.sessions.text.chat_languages import ids

from .messages_stage import WEATHER, call_text, exchange, stage, streamed

pytestmark = pytest.mark.anyio
BEGUN: list[Any] = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two"}]


@pytest.mark.parametrize(("fields", "said"), [({}, "response completed"), ({"top_k": -5}, "request refused")])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_has_a_line_with_the_request_id_of_each_answer(
    capsys: pytest.CaptureFixture[str], fields: dict[str, Any], said: str, *, stream: bool
) -> None:
    with logging_lines("holdfast", LogSettings(form="json")):
        async with stage("one two three") as on:
            response = await on.create("Count.", stream=stream, **fields)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    request = [line["message"] for line in lines if line.get("request") == response.headers["request-id"]]
    assert said in request


async def test_an_answer_has_the_standards_form() -> None:
    async with stage("one two three") as on:
        response = await on.create("Count.")
    assert response.status_code == 200 and response.headers["request-id"].startswith("req_")
    body = response.json()
    assert body.pop("id").startswith("msg_")
    usage = body.pop("usage")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [{"type": "text", "text": "one two three", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["input_tokens"] > 0 and usage["output_tokens"] == len(ids("chatml", "one two three")) + 1
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0


async def test_a_stream_has_the_standards_events() -> None:
    async with stage("one two") as on:
        response = await on.create("Count.", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = streamed(response)
    assert all(name == body["type"] for name, body in events)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    (_, start), (_, ending) = events[0], events[-2]
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    told = "".join(body["delta"]["text"] for name, body in events if name == "content_block_delta")
    assert told == "one two"
    assert ending["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert ending["usage"]["input_tokens"] == start["message"]["usage"]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(stream: bool) -> None:
    async with stage("one two three four") as on:
        response = await on.create("Count.", stop_sequences=["zzz", " three"], stream=stream)
    told = streamed(response)[-2][1]["delta"] if stream else response.json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", " three")
    assert "three" not in response.text.replace('"stop_sequence":" three"', "")


async def test_why_a_reply_ended() -> None:
    async with stage("one two three four", "one two three four five" * 20, max_context=64) as on:
        short = (await on.create("Count.", max_tokens=2)).json()
        full = (await on.create("Count on and on, please.", max_tokens=1000)).json()
    assert short["stop_reason"] == "max_tokens" and short["usage"]["output_tokens"] == 2
    assert full["stop_reason"] == "model_context_window_exceeded"


async def test_a_tool_loop_goes_on_in_one_session() -> None:
    """The client sends the call's input as an object in its own spelling, and the text stripped."""
    async with stage("ok ", call_text("Rome"), "one two", "three") as on:
        messages: list[Any] = [{"role": "user", "content": "Hello!"}]
        usages = []
        said: tuple[Any, ...] = (
            "What is the weather?",
            lambda call: [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}],
            [{"type": "text", "text": "Thank you.", "cache_control": {"type": "ephemeral"}}],
        )
        for nth, more in enumerate((*said, None)):
            body = (await on.create(*messages, tools=[WEATHER], stream=False)).json()
            usages.append(body["usage"])
            content = body["content"]
            if nth == 0:
                assert content[0]["text"] == "ok "
                content[0]["text"] = "ok"
            if nth == 1:
                assert (body["stop_reason"], content[0]["input"]) == ("tool_use", {"city": "Rome"})
            messages.append({"role": "assistant", "content": content})
            messages.append({"role": "user", "content": more(content[0]) if callable(more) else more})
        assert len(on.service.sessions()) == 1
    for before, usage in pairwise(usages):
        whole = before["input_tokens"] + before["cache_read_input_tokens"] + before["output_tokens"]
        assert usage["kv"]["prefilled"] == usage["kv"]["new"] == usage["input_tokens"]
        # The last sampled token has no KV yet; the white space that the client stripped is tokenized anew.
        assert usage["cache_read_input_tokens"] >= whole - 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_continues_the_last_message(stream: bool) -> None:
    async with stage(" three", "four") as on:
        response = await on.create(*BEGUN, stream=stream)
        counted = await on.http.post(
            "/v1/messages/count_tokens", json={"model": "scripted", "messages": BEGUN}
        )
        (prompt,) = on.link.model.prompts
        assert len(on.service.sessions()) == 0, "nothing is kept of it"
        plain = (await on.create(BEGUN[0])).json()["usage"]
    said = ids("chatml", "one two")
    assert prompt == on.link.model.prompts[1] + said and len(prompt) == plain["input_tokens"] + len(said)
    assert counted.json() == {"input_tokens": len(prompt)}
    if stream:
        events = streamed(response)
        text = "".join(body["delta"]["text"] for name, body in events if name == "content_block_delta")
        assert events[0][1]["message"]["usage"]["input_tokens"] == len(prompt)
    else:
        text = response.json()["content"][0]["text"]
    assert text == " three"


async def test_a_model_that_reasons_first_continues_no_message() -> None:
    async with stage(reasoning=ReasoningForm.OPENED) as on:
        assert refused(await on.create(*BEGUN)) == (*INVALID, "unsupported_field")


async def test_reasoning_is_told_as_thinking() -> None:
    async with stage("one</think>two", reasoning=ReasoningForm.OPENED) as on:
        content = (await on.create("Think.")).json()["content"]
    assert [(block["type"], block.get("thinking") or block["text"]) for block in content] == [
        ("thinking", "one"),
        ("text", "two"),
    ]


async def test_one_tool_call_where_no_more_are_wanted() -> None:
    async with stage(call_text("Rome") + call_text("Paris"), call_text("Rome") + call_text("Paris")) as on:
        both = (await on.create("Go.", tools=[WEATHER])).json()
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        one = (await on.create("Go on.", tools=[WEATHER], tool_choice=choice)).json()
    assert [block["input"]["city"] for block in both["content"]] == ["Rome", "Paris"]
    assert [block["input"]["city"] for block in one["content"]] == ["Rome"]
    assert one["stop_reason"] == "tool_use"


async def test_a_call_is_streamed_as_json() -> None:
    async with stage("one " + call_text("Rome")) as on:
        events = streamed(await on.create("Go.", tools=[WEATHER], stream=True))
    starts = [body["content_block"] for name, body in events if name == "content_block_start"]
    assert [block["type"] for block in starts] == ["text", "tool_use"] and starts[1]["input"] == {}
    pieces = [
        body["delta"]["partial_json"]
        for name, body in events
        if name == "content_block_delta" and body["index"] == 1
    ]
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


async def test_counted_tokens_are_those_of_the_prompt() -> None:
    asked = [{"role": "user", "content": "Count me."}]
    async with stage("one") as on:
        body = {"model": "scripted", "messages": asked, "system": "Be brief.", "tools": [WEATHER]}
        counted = await on.http.post("/v1/messages/count_tokens", json=body)
        usage = (await on.create(*asked, system="Be brief.", tools=[WEATHER])).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"]}
    assert counted.headers["request-id"].startswith("req_")


# --- refusals -----------------------------------------------------------------------------------------------


def refused(response: Any) -> tuple[int, str, str]:
    """Status, type and code of an error in the standard's form."""
    body = response.json()
    assert body["type"] == "error" and body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"]
    return response.status_code, body["error"]["type"], body["error"]["details"]["error_code"]


INVALID = (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 1}}}, "output_config.task_budget"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        (
            {"messages": [*BEGUN], "tools": [WEATHER]},
            "messages[1].role",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with stage() as on:
        response = await on.create("Hello!", **fields)
        assert refused(response) == (*INVALID, "unsupported_field")
        assert response.json()["error"]["details"]["param"] == param
        assert on.link.log == [], "nothing was computed"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": None}, "invalid_type"),
        ({"temperature": 1.01}, "invalid_value"),
        ({"temperature": -0.01}, "invalid_value"),
        ({"top_p": 1.01}, "invalid_value"),
        ({"top_k": -1}, "invalid_value"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "invalid_value"),
        ({"stop_sequences": [""]}, "invalid_value"),
        ({"messages": []}, "invalid_value"),
        ({"messages": [{"role": "user", "content": ""}]}, "invalid_value"),
        ({"messages": [{"role": "user", "content": []}]}, "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value"),
        ({"tool_choice": {"type": "any"}}, "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "invalid_value"),
        ({"tools": [WEATHER, WEATHER]}, "invalid_value"),
        ({"tools": [{"name": "x"}]}, "missing_required_parameter"),
        ({"surprise": 1}, "unknown_parameter"),
        ({"system": 3}, "invalid_type"),
        ({"output_config": {"format": {"type": "text"}}}, "invalid_value"),
    ],
    ids=str,
)
async def test_bad_input_is_refused_before_any_work(fields: dict[str, Any], code: str) -> None:
    async with stage() as on:
        assert refused(await on.create("Hello!", **fields)) == (*INVALID, code)
        assert on.link.log == [] and len(on.service.sessions()) == 0


async def test_a_refused_conversation_leaves_no_session() -> None:
    async with stage(sessions=SessionSettings(max_items=2)) as on:
        assert refused(await on.create("a", "b", "c")) == (*INVALID, "invalid_value")
        assert len(on.service.sessions()) == 0


@pytest.mark.parametrize("words", [6_000, 500_000])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_prompt_beyond_the_context_is_refused_in_anthropics_words(path: str, words: int) -> None:
    async with stage() as on:
        body: dict[str, Any] = {
            "model": "scripted",
            "messages": [{"role": "user", "content": "one " * words}],
        }
        if path == "/v1/messages":
            body["max_tokens"] = 9
        told = await on.http.post(path, json=body)
        assert refused(told) == (*INVALID, "context_length_exceeded")
        message = told.json()["error"]["message"]
        numbers = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
        assert numbers and int(numbers[1]) > int(numbers[2]) == on.service.context
        assert on.link.log == [], "nothing was computed"


async def test_a_prompt_that_fills_the_context_is_too_long_by_one() -> None:
    error = PromptTooLong.of("it has 4096 tokens", 4096, 4096)
    body, _, _ = messages_answer(error, "req_1")
    assert body["error"]["message"] == "prompt is too long: 4096 tokens > 4095 maximum"  # type: ignore[index]


@pytest.mark.parametrize("words", [6_000, 500_000])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
        ("/v1/responses/input_tokens", "input"),
        ("/tokenize", "messages"),
    ],
)
async def test_other_faces_tell_the_tokens_and_the_limit(path: str, field: str, words: int) -> None:
    async with stage() as on:
        text = "one " * words
        body = {field: [{"role": "user", "content": text}] if field == "messages" else text}
        told = await on.http.post(path, json=body)
        error = told.json()["error"]
        assert (told.status_code, error["code"]) == (400, "context_length_exceeded")
        pattern = r"(\d+) tokens\. This model's maximum context length is (\d+) tokens$"
        numbers = re.search(pattern, error["message"])
        assert numbers and int(numbers[1]) > int(numbers[2]) == on.service.context
        assert on.link.log == [], "nothing was computed"


async def test_other_models_routes_and_methods() -> None:
    async with stage() as on:
        other = await on.create("Hello!", model="other")
        assert refused(other) == (404, "not_found_error", "model_not_found")
        unknown = await on.http.post("/v1/messages/batches", json={})
        assert refused(unknown) == (404, "not_found_error", "not_found")
        method = await on.http.get("/v1/messages")
        assert refused(method) == (405, "invalid_request_error", "method_not_allowed")
        elsewhere = await on.http.get("/v1/files", headers={"anthropic-version": "2023-06-01"})
        assert refused(elsewhere) == (404, "not_found_error", "not_found")
        assert "code" in (await on.http.get("/v1/files")).json()["error"], "other clients get OpenAI's form"


async def test_keys_come_in_either_header() -> None:
    async with stage("one", "two", settings=GatewaySettings(api_key="KEY")) as on:
        body = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        for headers in ({"x-api-key": "KEY"}, {"authorization": "Bearer KEY"}):
            assert (await on.http.post("/v1/messages", json=body, headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": "other"}, {"authorization": "Bearer other", "x-api-key": "KEY"}):
            told = await on.http.post("/v1/messages", json=body, headers=headers)
            assert refused(told) == (401, "authentication_error", "invalid_api_key")
        listed = await on.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert refused(listed) == (401, "authentication_error", "invalid_api_key")


async def test_an_engine_without_room_is_overloaded() -> None:
    async with stage("one", full=True) as on:
        response = await on.create("Hello!")
        assert refused(response) == (529, "overloaded_error", "engine_overloaded")
        assert response.headers["retry-after"] == "1"


async def test_a_server_that_leaves_says_so() -> None:
    async with stage() as on:
        await on.service.drain()
        assert refused(await on.create("Hello!")) == (503, "api_error", "server_going_away")


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    broken = [*ids("chatml", "one"), -1]
    async with stage(broken, broken) as on:
        name, body = streamed(streaming := await on.create("Hello!", stream=True))[-1]
        whole = await on.create("Hello!")
    assert name == "error" and body["type"] == "error" and body["error"]["type"] == "api_error"
    assert body["request_id"] == streaming.headers["request-id"]
    assert refused(whole) == (500, "api_error", "turn_failed")


async def test_a_client_of_threads_is_told_to_send_all() -> None:
    async with stage() as on:
        response = await on.create("Hello!", thread={"type": "create"})
        assert refused(response) == (*INVALID, "thread_unsupported_request")


async def test_fields_without_effect_are_accepted() -> None:
    async with stage("one", "one") as on:
        plain = (await on.create("Hello!")).json()
        full = await on.http.post(
            "/v1/messages?beta=true",
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x-2025-01-01"},
            json={
                "model": "scripted",
                "max_tokens": 100,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
                "metadata": {"user_id": "u"},
                "service_tier": "standard_only",
                "thinking": {"type": "adaptive"},
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "output_config": {"effort": "low"},
                "speed": "standard",
                "inference_geo": None,
                "mcp_servers": [],
                "container": None,
                "stop_sequences": [],
            },
        )
    assert full.json()["content"] == plain["content"]
    assert full.json()["context_management"] == {"applied_edits": []}


# --- models -------------------------------------------------------------------------------------------------


async def test_models_in_the_form_that_the_client_speaks() -> None:
    version = {"anthropic-version": "2023-06-01"}
    async with stage(settings=GatewaySettings(served_names=("a", "b", "c"))) as on:

        async def page(query: str = "") -> tuple[list[str], bool]:
            body = (await on.http.get(f"/v1/models{query}", headers=version)).json()
            names = [one["id"] for one in body["data"]]
            assert all(one["type"] == "model" and one["lifecycle"] == "active" for one in body["data"])
            assert [body["first_id"], body["last_id"]] == ([names[0], names[-1]] if names else [None, None])
            return names, body["has_more"]

        assert (await on.http.get("/v1/models")).json()["object"] == "list"
        assert await page() == (["a", "b", "c"], False)
        assert await page("?limit=2") == (["a", "b"], True)
        assert await page("?limit=2&after_id=b") == (["c"], False)
        assert await page("?before_id=c&limit=1") == (["b"], True)
        assert await page("?lifecycle[]=retired") == ([], False)
        for query in ("?limit=0", "?limit=1001", "?limit=x", "?after_id=z"):
            told = await on.http.get(f"/v1/models{query}", headers=version)
            assert refused(told) == (*INVALID, "invalid_value")
        one = (await on.http.get("/v1/models/b", headers=version)).json()
        assert (one["id"], one["max_input_tokens"]) == ("b", on.link.max_context)
        other = await on.http.get("/v1/models/z", headers=version)
        assert refused(other) == (404, "not_found_error", "model_not_found")


async def test_a_client_that_leaves_ends_its_reply_alone() -> None:
    async with stage("one two three", "four") as on:
        on.link.flowing = False
        asked = {"model": "scripted", "max_tokens": 9, "messages": BEGUN[:1]}
        came = await exchange(on, "/v1/messages", asked, lambda came: b"message_start" in came)
        assert b"content_block" not in came and not any(live.running for live in on.service.sessions())
        on.link.flowing = True
        assert (await on.create("Again.")).status_code == 200
