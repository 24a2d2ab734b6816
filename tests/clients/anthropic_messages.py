"""Run by `.venv-clients`: the `anthropic` package against a server, as users write their clients.

    python anthropic_messages.py http://127.0.0.1:8040 pocket KEY

Prints what each call gave. Every message and every event of a stream must also fit the package's own type.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic, Omit, beta_tool
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

MESSAGE: TypeAdapter[Any] = TypeAdapter(Message)
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SKY = json.dumps({"temperature": 21, "sky": "sunny"})


class Weather(BaseModel):
    """A structured answer."""

    city: str
    sunny: bool


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def strict(message: Message) -> Message:
    MESSAGE.validate_python(message.to_dict())
    return message


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def kv_of(message: Any) -> dict[str, Any]:
    return dict(message.usage.kv)


class Calls:
    """The synchronous client's calls. Each method is one part of the report."""

    def __init__(self, url: str, model: str, key: str) -> None:
        self.url, self.model, self.key = url, model, key
        self.client = Anthropic(base_url=url, api_key=key, max_retries=0)
        self.asked: Any = {"model": model, "max_tokens": 64}

    def models(self) -> Any:
        listed = [one.id for one in self.client.models.list()]
        one = self.client.models.retrieve(self.model)
        return {"listed": listed, "one": one.display_name, "year": one.created_at.year}

    def create(self) -> Any:
        message = strict(self.client.messages.create(messages=[user("My dog is called Rex.")], **self.asked))
        return {"text": text_of(message), "reason": message.stop_reason, "role": message.role}

    def count(self) -> Any:
        asked = [user("Count me.")]
        counted = self.client.messages.count_tokens(model=self.model, messages=asked, tools=[WEATHER])
        usage = self.client.messages.create(messages=asked, tools=[WEATHER], **self.asked).usage
        read = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        return {"counted": counted.input_tokens, "read": read, "created": usage.cache_creation_input_tokens}

    def system(self) -> Any:
        blocks: Any = [
            {"type": "text", "text": "You are brief.\n", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "You are kind."},
        ]
        text = self.client.messages.create(
            system="You are brief.\nYou are kind.", messages=[user("Hi")], **self.asked
        )
        same = self.client.messages.create(system=blocks, messages=[user("Hi")], **self.asked)
        return {"same": text_of(text) == text_of(same), "text": text_of(same)}

    def stops(self) -> Any:
        message = strict(
            self.client.messages.create(
                messages=[user("My dog is called Rex.")], stop_sequences=["Rex", "zzz"], **self.asked
            )
        )
        short = self.client.messages.create(
            model=self.model, max_tokens=2, messages=[user("My dog is called Rex.")]
        )
        return {
            "reason": message.stop_reason,
            "sequence": message.stop_sequence,
            "text": text_of(message),
            "short": [short.stop_reason, short.usage.output_tokens],
        }

    def raw_stream(self) -> Any:
        events = list(
            self.client.messages.create(messages=[user("My dog is called Rex.")], stream=True, **self.asked)
        )
        for event in events:
            EVENT.validate_python(event.to_dict())
        return [event.type for event in events]

    def text_stream(self) -> Any:
        with self.client.messages.stream(messages=[user("My dog is called Rex.")], **self.asked) as stream:
            text = "".join(stream.text_stream)
            return {"text": text, "final": stream.get_final_text()}

    def event_stream(self) -> Any:
        with self.client.messages.stream(
            messages=[user("What is the weather in Rome?")], tools=[WEATHER], **self.asked
        ) as stream:
            kinds = [event.type for event in stream]
            message = strict(stream.get_final_message())
        (call,) = message.content
        return {"kinds": kinds, "reason": message.stop_reason, "call": [call.name, call.input]}

    def tool_loop(self) -> Any:
        messages: Any = [user("My dog is called Rex.")]
        receipts, calls = [], []
        for asked in ("What is the weather in Rome?", "What is my dog called?"):
            message = self.client.messages.create(messages=messages, tools=[WEATHER], **self.asked)
            receipts.append(kv_of(message))
            messages += [{"role": "assistant", "content": message.content}, user(asked)]
            message = strict(self.client.messages.create(messages=messages, tools=[WEATHER], **self.asked))
            receipts.append(kv_of(message))
            while message.stop_reason == "tool_use":
                results = []
                for block in message.content:
                    if block.type == "tool_use":
                        calls.append([block.name, block.input])
                        results.append({"type": "tool_result", "tool_use_id": block.id, "content": SKY})
                messages += [message.to_param(), {"role": "user", "content": results}]
                message = self.client.messages.create(messages=messages, tools=[WEATHER], **self.asked)
                receipts.append(kv_of(message))
            messages += [message.to_param(), user("Thank you.")]
        return {"kv": receipts, "calls": calls, "said": text_of(message)}

    def tool_choice(self) -> Any:
        asked: Any = {"messages": [user("Hello!")], "tools": [WEATHER], **self.asked}
        named = self.client.messages.create(tool_choice={"type": "tool", "name": "get_weather"}, **asked)
        forced = self.client.messages.create(
            tool_choice={"type": "any", "disable_parallel_tool_use": True}, **asked
        )
        none = self.client.messages.create(tool_choice={"type": "none"}, **asked)
        return {
            "named": [named.stop_reason, [block.type for block in named.content]],
            "any": [forced.stop_reason, [block.type for block in forced.content]],
            "none": [block.type for block in none.content],
        }

    def tool_runner(self) -> Any:
        ran: list[str] = []

        @beta_tool
        def get_weather(city: str) -> str:
            """Get the weather in a city.

            Args:
                city: The city.
            """
            ran.append(city)
            return SKY

        said = []
        for stream in (False, True):
            runner: Any = self.client.beta.messages.tool_runner(
                messages=[user("What is the weather in Rome?")],
                tools=[get_weather],
                stream=stream,
                **self.asked,
            )
            said.append(text_of(runner.until_done()))
        return {"ran": ran, "said": said}

    def continued(self) -> Any:
        begun: Any = [user("My dog is called Rex."), {"role": "assistant", "content": "Got it, your dog"}]
        return text_of(strict(self.client.messages.create(messages=begun, **self.asked)))

    def parse(self) -> Any:
        asked = [user("Is it sunny in Rome?")]
        message = self.client.messages.parse(messages=asked, output_format=Weather, **self.asked)
        found = message.parsed_output
        return {"valid": isinstance(found, Weather), "text": text_of(message)}

    def thinking(self) -> Any:
        message = self.client.messages.create(
            model=self.model,
            max_tokens=2_000,
            messages=[user("My dog is called Rex.")],
            thinking={"type": "enabled", "budget_tokens": 1_024},
            metadata={"user_id": "someone"},
            service_tier="auto",
            extra_body={"temperature": 0.0, "top_p": 1.0, "top_k": 5},
        )
        return text_of(message)

    def headers(self) -> Any:
        raw = self.client.messages.with_raw_response.create(messages=[user("Hi")], **self.asked)
        return raw.headers["request-id"].startswith("req_") and raw.parse().id.startswith("msg_")

    def errors(self) -> Any:
        picture: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
        hello = [user("Hi")]
        search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}
        forced: Any = {"type": "tool", "name": "web_search"}
        stranger = Anthropic(base_url=self.url, api_key="wrong", max_retries=0)
        create = self.client.messages.create
        told: dict[str, Callable[[], Any]] = {
            "picture": lambda: create(messages=[{"role": "user", "content": [picture]}], **self.asked),
            "server tool": lambda: create(messages=hello, tools=[search], tool_choice=forced, **self.asked),
            "no tokens": lambda: create(model=self.model, max_tokens=-1, messages=hello),
            "no such model": lambda: create(model="nothing", max_tokens=9, messages=hello),
            "model": lambda: self.client.models.retrieve("nothing"),
            "batches": lambda: self.client.messages.batches.list(),
            "key": lambda: stranger.messages.create(messages=hello, **self.asked),
            "long": lambda: create(messages=[user("word " * 20_000)], **self.asked),
            "stream": lambda: list(create(messages=[user("word " * 20_000)], stream=True, **self.asked)),
        }
        return {name: _refusal(call) for name, call in told.items()}


def _refusal(call: Callable[[], Any]) -> Any:
    try:
        call()
    except anthropic.APIStatusError as error:
        same = error.request_id == error.body["request_id"]
        return [type(error).__name__, error.status_code, error.type, error.error_code, same]
    return None


async def asynchronous(url: str, model: str, key: str) -> Any:
    """The asynchronous client, with the key in the header of the package's earlier releases."""
    headers: Any = {"x-api-key": key, "authorization": Omit()}
    client = AsyncAnthropic(base_url=url, api_key="", max_retries=0, default_headers=headers)
    asked: Any = {"model": model, "max_tokens": 64}
    async with client:
        one, other = await asyncio.gather(
            *(
                client.messages.create(messages=[user(f"My dog is called {name}.")], **asked)
                for name in ("Rex", "Bo")
            )
        )
        async with client.messages.stream(messages=[user("My dog is called Rex.")], **asked) as stream:
            streamed = "".join([text async for text in stream.text_stream])
        listed = [found.id async for found in client.models.list()]
    return {"said": [text_of(one), text_of(other)], "streamed": streamed, "listed": listed}


def main(url: str, model: str, key: str) -> dict[str, Any]:
    calls = Calls(url, model, key)
    names = [name for name in vars(Calls) if not name.startswith("_")]
    told = {name: getattr(calls, name)() for name in names}
    return {**told, "async": asyncio.run(asynchronous(url, model, key))}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
