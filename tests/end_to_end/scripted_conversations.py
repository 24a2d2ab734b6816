"""Ten scripted conversations for each request face, and what of their answers must stay the same.

What is compared is all that a client is told but ids, times, the cuts of deltas, texts of errors and where
KV was found. Of a stream the kinds of its events in their order, with all deltas of one kind and item
joined.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from .scripted_sessions import TRIP
from .wires import Json

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather in a city."}
NAME, ASKED, FOX = "My name is Marisol.", "What is my name?", "Tell me the story of the fox."
SUNNY = "What is the weather in Oslo?"
VARIES = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "call_id",
    "kv",
    "item_id",
    "tool_use_id",
    "signature",
    "first_id",
    "last_id",
    "previous_response_id",
}
DEPENDS = {"cached_tokens", "cache_write_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"}
NUMBERS = {"input_tokens", "output_tokens", "total_tokens", "prompt_tokens", "completion_tokens"}


class Recorder:
    """Sends requests to one path, and keeps the outlines of their answers."""

    def __init__(self, http: httpx2.AsyncClient, path: str) -> None:
        self.http = http
        self.path = path
        self.told: list[Any] = []

    async def __call__(self, body: Any = None, path: str = "", method: str = "POST", **fields: Any) -> Any:
        """The answer to ``body`` with ``fields``, decoded; of a stream, the data of its events."""
        sent = {**body, **fields} if isinstance(body, dict) else fields or body
        content = None if sent is None else sent if isinstance(sent, str | bytes) else json.dumps(sent)
        answer = await self.http.request(method, path or self.path, content=content)
        if answer.headers["content-type"].startswith("text/event-stream"):
            lines = [line for line in answer.text.split("\n") if line.startswith("data: ")]
            events = [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]
            self.told.append({"status": answer.status_code, "events": _stream(events)})
            return events
        found = answer.json()
        self.told.append({"status": answer.status_code, "body": plain(found)})
        return found


def plain(value: Any) -> Any:
    """A value without what varies."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return round(value, 3)
    if not isinstance(value, dict):
        return value
    if "message" in value and {"type", "code"} & value.keys() and isinstance(value["message"], str):
        value = {name: one for name, one in value.items() if name != "message"}  # an error's text
    input_tokens = value.get("input_tokens", 0) + value.get("cache_read_input_tokens", 0)
    found = {
        name: "…" if name in VARIES and one is not None else plain(one)
        for name, one in value.items()
        if name not in DEPENDS and name not in ("kv", "request_id")
    }
    if "cache_read_input_tokens" in value:
        found["input_tokens"] = input_tokens
    return found


def _stream(events: list[Any]) -> list[Any]:
    told: list[Any] = []
    for event in map(plain, events):
        if isinstance(event, dict):
            event.pop("sequence_number", None)
        delta, item = _delta(event)
        if told and item is not None and isinstance(told[-1], list) and told[-1][0] == item:
            told[-1][1] += delta
        else:
            told.append(event if item is None else [item, delta])
    return told


def _delta(event: Any) -> tuple[str, Any]:
    """The text that an event adds, and all else of it; None: it adds no text."""
    if not isinstance(event, dict):
        return "", None
    if isinstance(event.get("delta"), str):
        scores = {"logprobs": len(event["logprobs"])} if event.get("logprobs") else {}
        return event["delta"], {**event, "delta": "", **scores}
    if isinstance(event.get("delta"), dict) and event.get("type") == "content_block_delta":
        ((name, text),) = ((name, text) for name, text in event["delta"].items() if name != "type")
        return text, {**event, "delta": {**event["delta"], name: ""}}
    for choice in event.get("choices") or ():
        if isinstance(choice.get("text"), str) and choice.get("finish_reason") is None:
            return choice["text"], {**event, "choices": [{**choice, "text": "", "logprobs": None}]}
        for name in ("content", "reasoning_content"):
            if choice.get("delta", {}).get(name):
                said = {**choice["delta"], name: ""}
                return choice["delta"][name], {
                    **event,
                    "choices": [{**choice, "delta": said, "logprobs": None}],
                }
        for call in choice.get("delta", {}).get("tool_calls") or ():
            if "name" not in call["function"]:
                return call["function"]["arguments"], {"call": call["index"], "choice": choice["index"]}
    return "", None


# --- Chat Completions ---------------------------------------------------------------------------------------

CHAT_TOOL = {"type": "function", "function": {**WEATHER, "parameters": CITY}}


def user(text: Any) -> Json:
    return {"role": "user", "content": text}


async def chat_text(ask: Recorder) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user(NAME)]
    said = (await ask(messages=messages))["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, user(ASKED)]
    await ask(messages=messages, model="pocket", user="someone", metadata={"a": "b"})
    await ask(messages=[user([{"type": "text", "text": "My name"}, {"type": "text", "text": " is Bella."}])])


async def chat_stream(ask: Recorder) -> None:
    await ask(messages=[user(FOX)], stream=True, max_completion_tokens=24)
    await ask(messages=[user(FOX)], stream=True, max_tokens=9, stream_options={"include_usage": True})


async def chat_tools(ask: Recorder) -> None:
    messages = [user(SUNNY)]
    answer = await ask(messages=messages, tools=[CHAT_TOOL])
    message = answer["choices"][0]["message"]
    output = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": '{"degrees": 7}'}
    await ask(messages=[*messages, message, output], tools=[CHAT_TOOL])
    await ask(messages=messages, tools=[CHAT_TOOL], tool_choice="none")


async def chat_forced(ask: Recorder) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {"mode": "required", "tools": [named]}
    for choice in ("required", named, {"type": "allowed_tools", "allowed_tools": allowed}):
        for stream in (False, True):
            await ask(messages=[user(SUNNY)], tools=[CHAT_TOOL], tool_choice=choice, stream=stream)
    await ask(messages=[user(SUNNY)], tools=[CHAT_TOOL], tool_choice=named, max_tokens=6)


async def chat_formats(ask: Recorder) -> None:
    schema = {"name": "trip", "schema": TRIP, "strict": True}
    await ask(messages=[user("Rome.")], response_format={"type": "json_schema", "json_schema": schema})
    await ask(messages=[user("Rome.")], response_format={"type": "text"})
    await ask(messages=[user("Rain?")], structured_outputs={"choice": ["yes", "no"]})
    await ask(messages=[user("When?")], guided_regex="[0-9]{2}:[0-9]{2}")
    await ask(messages=[user("Hi")], guided_grammar='start: "hello" | "goodbye"')


async def chat_limits(ask: Recorder) -> None:
    await ask(messages=[user(FOX)], max_completion_tokens=5)
    await ask(messages=[user(FOX)], stop=["fox"], max_tokens=24)
    await ask(messages=[user(FOX)], stop="the", min_tokens=3, max_tokens=24)
    await ask(messages=[user(FOX)], max_tokens=20, ignore_eos=True, temperature=0.7, seed=5, top_k=-1)
    await ask(messages=[user(FOX)], max_tokens=12, temperature=1, top_p=0.5, min_p=0.1, seed=-3)
    await ask(messages=[user(FOX)], max_tokens=12, repetition_penalty=1.3, logit_bias={"5": -100})


async def chat_logprobs(ask: Recorder) -> None:
    await ask(messages=[user(NAME)], max_tokens=4, logprobs=True, top_logprobs=2)
    await ask(messages=[user(NAME)], max_tokens=4, logprobs=True)
    await ask(messages=[user(NAME)], max_tokens=4, logprobs=True, top_logprobs=1, stream=True)


async def chat_choices(ask: Recorder) -> None:
    await ask(messages=[user(FOX)], n=3, temperature=1, seed=4, max_tokens=6)


async def chat_errors(ask: Recorder) -> None:
    await ask("}{")
    await ask(messages=[])
    for fields in (
        {"temperature": 3},
        {"top_p": 1.5},
        {"top_k": -2},
        {"max_tokens": -1},
        {"no_such_field": 1},
        {"logit_bias": {"99999": 1}},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}], "tool_choice": "required"},
        {"tool_choice": "required"},
        {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"functions": []},
        {"model": "another"},
        {"top_logprobs": 2},
        {"guided_regex": "("},
        {"stop_token_ids": [10**7]},
    ):
        await ask(messages=[user("Hi")], **fields)
    await ask(messages=[{"role": "tool", "tool_call_id": "x", "content": "1"}])
    await ask(messages=[{"role": "assistant"}])
    await ask(messages=[user([{"type": "image_url", "image_url": {"url": "x"}}])])
    await ask(messages=[user("word " * 4000)])


async def completions(ask: Recorder) -> None:
    path = "/v1/completions"
    await ask(path=path, prompt="The fox", max_tokens=5)
    await ask(path=path, prompt=["The fox", "My name"], max_tokens=4, n=2, temperature=1, seed=1)
    await ask(path=path, prompt=[5, 6, 7], max_tokens=4, echo=True, logprobs=1)
    await ask(path=path, prompt="The fox", max_tokens=4, stream=True, echo=True)
    await ask(path=path, prompt="The fox", max_tokens=4, stream=True, logprobs=2)
    await ask(path=path, prompt="")
    await ask(path=path, prompt="The fox", suffix="x")
    await ask(path=path, prompt="The fox", best_of=3)
    await ask(path="/tokenize", prompt="The fox")
    await ask(path="/tokenize", messages=[user(NAME)], tools=[CHAT_TOOL])
    await ask(path="/detokenize", tokens=[5, 6, 7])


# --- Messages -----------------------------------------------------------------------------------------------

TOLD_TOOL = {**WEATHER, "input_schema": CITY}
MOST: Json = {"model": "pocket", "max_tokens": 24}


async def messages_text(ask: Recorder) -> None:
    messages = [user(NAME)]
    answer = await ask(MOST, messages=messages, system="Be brief.")
    messages += [{"role": "assistant", "content": answer["content"]}, user([{"type": "text", "text": ASKED}])]
    await ask(
        MOST, messages=messages, system=[{"type": "text", "text": "Be brief."}], metadata={"user_id": "u"}
    )


async def messages_stream(ask: Recorder) -> None:
    await ask(MOST, messages=[user(FOX)], stream=True)
    await ask(MOST, messages=[user(FOX)], stream=True, max_tokens=5)


async def messages_tools(ask: Recorder) -> None:
    messages = [user(SUNNY)]
    answer = await ask(MOST, messages=messages, tools=[TOLD_TOOL])
    called = next(block for block in answer["content"] if block["type"] == "tool_use")
    output = {"type": "tool_result", "tool_use_id": called["id"], "content": '{"degrees": 7}'}
    messages += [{"role": "assistant", "content": answer["content"]}, user([output])]
    await ask(MOST, messages=messages, tools=[TOLD_TOOL])
    messages[-1] = user([{**output, "is_error": True}, {"type": "text", "text": "And now?"}])
    await ask(MOST, messages=messages, tools=[TOLD_TOOL])


async def messages_forced(ask: Recorder) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}, {"type": "none"}):
        for stream in (False, True):
            await ask(MOST, messages=[user(SUNNY)], tools=[TOLD_TOOL], tool_choice=choice, stream=stream)


async def messages_cut_call(ask: Recorder) -> None:
    named = {"type": "tool", "name": "get_weather"}
    for stream in (False, True):
        fields = {"tools": [TOLD_TOOL], "tool_choice": named, "max_tokens": 6, "stream": stream}
        await ask(MOST, messages=[user(SUNNY)], **fields)


async def messages_formats(ask: Recorder) -> None:
    form = {"type": "json_schema", "schema": TRIP}
    await ask(MOST, messages=[user("Rome.")], output_format=form)
    await ask(MOST, messages=[user("Rome.")], output_config={"format": form, "effort": "low"})


async def messages_limits(ask: Recorder) -> None:
    await ask(MOST, messages=[user(FOX)], stop_sequences=["fox", "the"])
    await ask(MOST, messages=[user(FOX)], stop_sequences=["the"], stream=True)
    await ask(MOST, messages=[user(FOX)], temperature=1, top_k=1)


async def messages_begun(ask: Recorder) -> None:
    await ask(MOST, messages=[user(FOX), {"role": "assistant", "content": "Once upon"}])
    await ask(MOST, messages=[user(FOX), {"role": "assistant", "content": "Once upon"}], stream=True)
    await ask(MOST, messages=[user(FOX), {"role": "assistant", "content": "Once "}])


async def messages_counted(ask: Recorder) -> None:
    path = "/v1/messages/count_tokens"
    await ask(path=path, model="pocket", messages=[user(NAME)], tools=[TOLD_TOOL])
    await ask(path=path, model="pocket", messages=[])


async def messages_errors(ask: Recorder) -> None:
    await ask("}{")
    await ask(MOST, messages=[])
    await ask(messages=[user("Hi")], model="pocket")
    for fields in (
        {"temperature": 1.5},
        {"top_p": 2},
        {"max_tokens": -1},
        {"no_such_field": 1},
        {"tool_choice": {"type": "any"}},
        {"tools": [TOLD_TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
        {"container": "x"},
        {"thread": "x"},
        {"model": "another"},
    ):
        await ask({**MOST, "messages": [user("Hi")]}, **fields)
    await ask(MOST, messages=[user("")])
    await ask(MOST, messages=[user([{"type": "image", "source": {}}])])
    await ask(MOST, messages=[user([{"type": "tool_result", "tool_use_id": "x", "content": "1"}])])
    await ask(MOST, messages=[user("word " * 4000)])


# --- Responses ----------------------------------------------------------------------------------------------

OFFERED = {"type": "function", **WEATHER, "parameters": CITY, "strict": False}


async def responses_text(ask: Recorder) -> None:
    first = await ask(input=NAME, instructions="Be brief.")
    await ask(input=ASKED, previous_response_id=first["id"], user="u", metadata={"a": "b"})
    await ask(input=[{"role": "developer", "content": "Be brief."}, user(NAME)], store=False)


async def responses_stream(ask: Recorder) -> None:
    await ask(input=FOX, stream=True, max_output_tokens=24)
    await ask(input=FOX, stream=True, max_output_tokens=5)


async def responses_tools(ask: Recorder) -> None:
    first = await ask(input=SUNNY, tools=[OFFERED])
    (call,) = (item for item in first["output"] if item["type"] == "function_call")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"degrees": 7}'}
    await ask(input=[output], previous_response_id=first["id"], tools=[OFFERED])
    await ask(input=[user(SUNNY), call, output], tools=[OFFERED], stream=True)


async def responses_forced(ask: Recorder) -> None:
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        for stream in (False, True):
            await ask(input=SUNNY, tools=[OFFERED], tool_choice=choice, stream=stream)
    await ask(input=SUNNY, tools=[OFFERED], tool_choice=named, max_output_tokens=6)


async def responses_formats(ask: Recorder) -> None:
    form = {"type": "json_schema", "name": "trip", "schema": TRIP, "strict": True}
    await ask(input="Rome.", text={"format": form, "verbosity": "low"})
    await ask(input="Rome.", text={"format": {"type": "text"}})


async def responses_limits(ask: Recorder) -> None:
    await ask(input=FOX, stop=["fox"], max_output_tokens=30)
    await ask(input=FOX, temperature=1, seed=3, top_p=0.5, max_output_tokens=8, truncation="auto")
    await ask(input=FOX, min_output_tokens=3, ignore_eos=True, max_output_tokens=9)


async def responses_logprobs(ask: Recorder) -> None:
    asked = {"include": ["message.output_text.logprobs"], "max_output_tokens": 4}
    await ask(input=NAME, top_logprobs=2, **asked)
    await ask(input=NAME, stream=True, **asked)


async def responses_stored(ask: Recorder) -> None:
    first = await ask(input=NAME)
    path = f"{ask.path}/{first['id']}"
    await ask(path=path, method="GET")
    await ask(path=f"{path}?stream=true", method="GET")
    await ask(path=f"{path}/input_items", method="GET")
    await ask(path=f"{ask.path}/input_tokens", input=NAME)
    deleted = await ask(path=path, method="DELETE")
    assert deleted["deleted"]
    await ask(input=ASKED, previous_response_id=first["id"])


async def responses_conversation(ask: Recorder) -> None:
    made = await ask(path="/v1/conversations", items=[user(NAME)], metadata={"a": "b"})
    await ask(input=ASKED, conversation=made["id"])
    path = f"/v1/conversations/{made['id']}/items"
    await ask(path=f"{path}?limit=2&order=asc", method="GET")
    await ask(path=path, items=[user("More.")])
    await ask(input="And now?", conversation={"id": made["id"]}, stream=True, max_output_tokens=4)


async def responses_errors(ask: Recorder) -> None:
    await ask("}{")
    await ask({})
    for fields in (
        {"temperature": 3},
        {"top_p": 1.5},
        {"max_output_tokens": 0},
        {"no_such_field": 1},
        {"tool_choice": "required"},
        {"tools": [OFFERED], "tool_choice": {"type": "function", "name": "other"}},
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        {"prompt": {"id": "x"}},
        {"model": "another"},
        {"previous_response_id": "resp_none"},
        {"conversation": "conv_none"},
        {"background": True, "store": False},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}, "strict": True}}},
    ):
        await ask({"input": "Hi"}, **fields)
    await ask(input=[{"type": "function_call_output", "call_id": "x", "output": "1"}])
    await ask(input=[{"type": "item_reference", "id": "msg_none"}])
    await ask(input=[user([{"type": "input_image", "image_url": "x"}])])
    await ask(input="word " * 4000)


CHAT = "/v1/chat/completions"
Conversation = Callable[[Recorder], Awaitable[None]]
CONVERSATIONS: dict[str, tuple[str, Conversation]] = {
    conversation.__name__: (path, conversation)
    for path, several in (
        (
            CHAT,
            (
                chat_text,
                chat_stream,
                chat_tools,
                chat_forced,
                chat_formats,
                chat_limits,
                chat_logprobs,
                chat_choices,
                chat_errors,
                completions,
            ),
        ),
        (
            "/v1/messages",
            (
                messages_text,
                messages_stream,
                messages_tools,
                messages_forced,
                messages_cut_call,
                messages_formats,
                messages_limits,
                messages_begun,
                messages_counted,
                messages_errors,
            ),
        ),
        (
            "/v1/responses",
            (
                responses_text,
                responses_stream,
                responses_tools,
                responses_forced,
                responses_formats,
                responses_limits,
                responses_logprobs,
                responses_stored,
                responses_conversation,
                responses_errors,
            ),
        ),
    )
    for conversation in several
}
