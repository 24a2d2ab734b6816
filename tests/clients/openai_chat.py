"""Run by `.venv-clients`: Chat Completions, Completions and models through the unmodified `openai` package.

    python openai_chat.py http://127.0.0.1:8040 pocket

Prints what each call gave, by its name, as JSON. Each answer must fit the package's own type, strictly.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NAME = [{"role": "user", "content": "My name is Marisol."}]


class City(BaseModel):
    """What `parse` is asked for."""

    city: Literal["Oslo", "Rome"]


def checked(answer: Any) -> Any:
    """The same, after its JSON was read by the package's type once more, without unknown types of values."""
    kinds = {"chat.completion": ChatCompletion, "chat.completion.chunk": ChatCompletionChunk}
    kind = kinds.get(answer.object, Completion)
    kind.model_validate_json(answer.to_json(), strict=True)
    return answer


def refused(call: Any) -> list[Any]:
    """The class, status and code of the error that a call raises."""
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return ["nothing was raised"]


def chats(client: OpenAI, model: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    create = client.chat.completions.create

    first = checked(create(model=model, messages=NAME))
    said["plain"] = first.choices[0].message.content
    said["usage"] = first.usage.to_dict()
    after = [*NAME, first.choices[0].message, {"role": "user", "content": "What is my name?"}]
    second = checked(create(model=model, messages=after))
    said["second"] = second.choices[0].message.content
    said["cached"] = second.usage.prompt_tokens_details.cached_tokens
    said["kv"] = second.to_dict()["kv"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    said["parts"] = checked(create(model=model, messages=parts)).choices[0].message.content
    system = [{"role": "system", "content": "The user's dog is called Tamu."}]
    dog = [*system, {"role": "user", "content": "What is my dog called?"}]
    said["system"] = checked(create(model=model, messages=dog)).choices[0].message.content
    dog[0] = {"role": "developer", "content": system[0]["content"]}
    said["developer"] = checked(create(model=model, messages=dog)).choices[0].message.content

    count = [{"role": "user", "content": "Count from 1 to 9."}]
    chunks = [checked(chunk) for chunk in create(model=model, messages=count, stream=True)]
    said["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    said["finish"] = [chunk.choices[0].finish_reason for chunk in chunks][-1]
    with_usage = list(
        create(model=model, messages=count, stream=True, stream_options={"include_usage": True})
    )
    said["stream usage"] = with_usage[-1].usage.completion_tokens
    said["no choices"] = with_usage[-1].choices
    with client.chat.completions.stream(model=model, messages=count) as stream:
        said["helper"] = [event.type for event in stream][-1]
        said["helper text"] = stream.get_final_completion().choices[0].message.content
    said["max_tokens"] = create(model=model, messages=count, max_tokens=3).choices[0].finish_reason
    said["max_completion_tokens"] = create(
        model=model, messages=count, max_completion_tokens=3
    ).usage.completion_tokens
    endless = create(model=model, messages=NAME, max_tokens=40, extra_body={"ignore_eos": True})
    said["ignore_eos"] = [endless.usage.completion_tokens, endless.choices[0].finish_reason]
    said["stop"] = create(model=model, messages=count, stop="5").choices[0].message.content
    said["stops"] = create(model=model, messages=count, stop=["7", "4"]).choices[0].message.content
    many = checked(create(model=model, messages=count, n=3, temperature=1.5, seed=7))
    said["n"] = [choice.message.content for choice in many.choices]
    again = create(model=model, messages=count, n=3, temperature=1.5, seed=7)
    said["seeded"] = [choice.message.content for choice in again.choices]
    streamed: dict[int, str] = {}
    for chunk in create(model=model, messages=count, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    said["n streamed"] = streamed
    scored = checked(create(model=model, messages=count, logprobs=True, top_logprobs=2, max_tokens=4))
    tokens = scored.choices[0].logprobs.content
    said["logprobs"] = [[token.token, token.logprob <= 0, len(token.top_logprobs)] for token in tokens]
    said["logprobs text"] = scored.choices[0].message.content
    plain = create(model=model, messages=count, logprobs=True, max_tokens=2).choices[0].logprobs.content
    said["logprobs alone"] = [len(token.top_logprobs) for token in plain]
    said["bias"] = create(
        model=model, messages=NAME, logit_bias={str(token): -100 for token in range(100, 600)}, max_tokens=4
    ).usage.completion_tokens
    said["ignored"] = (
        create(
            model=model,
            messages=NAME,
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            reasoning_effort="low",
            prompt_cache_key="k",
            safety_identifier="s",
        )
        .choices[0]
        .message.content
    )
    said["extra"] = (
        create(model=model, messages=NAME, extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1})
        .choices[0]
        .finish_reason
    )
    return said


def tools(client: OpenAI, model: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    create = client.chat.completions.create
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = checked(create(model=model, messages=asked, tools=[WEATHER]))
    (call,) = called.choices[0].message.tool_calls
    said["call"] = [call.function.name, json.loads(call.function.arguments)]
    said["finish"] = called.choices[0].finish_reason
    output = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 7, "sky": "cloudy"}'}
    answered = checked(
        create(model=model, messages=[*asked, called.choices[0].message, output], tools=[WEATHER])
    )
    said["answer"] = answered.choices[0].message.content
    said["new"] = answered.to_dict()["kv"]["new"]
    pieces: dict[str, str] = {}
    names: list[str] = []
    for chunk in create(model=model, messages=asked, tools=[WEATHER], stream=True):
        checked(chunk)
        for delta in chunk.choices[0].delta.tool_calls or ():
            names += [delta.function.name] if delta.function.name else []
            pieces[str(delta.index)] = pieces.get(str(delta.index), "") + (delta.function.arguments or "")
    said["streamed call"] = [names, {key: json.loads(value) for key, value in pieces.items()}]
    forced = {"type": "function", "function": {"name": "get_weather"}}
    hello = [{"role": "user", "content": "Hello!"}]
    said["forced"] = (
        create(model=model, messages=hello, tools=[WEATHER], tool_choice=forced)
        .choices[0]
        .message.tool_calls[0]
        .function.name
    )
    other = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    chosen = {"type": "allowed_tools", "allowed_tools": allowed}
    listed = create(model=model, messages=asked, tools=[WEATHER, other], tool_choice=chosen)
    said["allowed"] = sorted({call.function.name for call in listed.choices[0].message.tool_calls})
    required = create(model=model, messages=asked, tools=[WEATHER], tool_choice="required")
    said["required"] = bool(required.choices[0].message.tool_calls)
    said["none"] = (
        create(model=model, messages=hello, tools=[WEATHER], tool_choice="none").choices[0].message.content
    )
    alone = create(model=model, messages=asked, tools=[WEATHER], parallel_tool_calls=False)
    said["one call"] = len(alone.choices[0].message.tool_calls)
    return said


def formats(client: OpenAI, model: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    create = client.chat.completions.create
    asked = [{"role": "user", "content": "Where do I live? I live in Oslo."}]
    city = {"type": "string", "maxLength": 12}
    schema = {
        "type": "object",
        "properties": {"city": city},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    fitted = create(model=model, messages=asked, response_format=form, max_tokens=200)
    said["json_schema"] = sorted(json.loads(fitted.choices[0].message.content))
    parsed = client.chat.completions.parse(model=model, messages=asked, response_format=City)
    said["parse"] = type(parsed.choices[0].message.parsed).__name__
    bare = create(model=model, messages=asked, response_format={"type": "json_object"}, max_tokens=200)
    text = bare.choices[0].message.content
    said["json_object"] = text.lstrip().startswith("{")
    chosen = create(
        model=model, messages=asked, extra_body={"structured_outputs": {"choice": ["Oslo", "Rome"]}}
    )
    said["choice"] = chosen.choices[0].message.content in ("Oslo", "Rome")
    matched = create(model=model, messages=asked, extra_body={"guided_regex": "[0-9]{3}"})
    said["regex"] = matched.choices[0].message.content.isdecimal()
    return said


def completions(client: OpenAI, model: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    create = client.completions.create
    one = checked(create(model=model, prompt="Hello", max_tokens=6))
    said["text"] = one.choices[0].text
    said["usage"] = one.usage.total_tokens
    endless = create(model=model, prompt="Hello", max_tokens=40, extra_body={"ignore_eos": True})
    said["ignore_eos"] = endless.usage.completion_tokens
    said["echo"] = create(model=model, prompt="Hello", max_tokens=2, echo=True).choices[0].text[:5]
    many = create(model=model, prompt=["Hello", "My name is"], max_tokens=2, n=2)
    said["indexes"] = [choice.index for choice in many.choices]
    said["tokens"] = create(model=model, prompt=[5, 6, 7], max_tokens=2).usage.prompt_tokens
    said["lists"] = len(create(model=model, prompt=[[5, 6], [7]], max_tokens=2).choices)
    streamed = list(create(model=model, prompt="Hello", max_tokens=4, stream=True))
    said["streamed"] = "".join(chunk.choices[0].text for chunk in streamed)
    scored = create(model=model, prompt="Hello", max_tokens=3, logprobs=2).choices[0].logprobs
    said["logprobs"] = [len(scored.tokens), len(scored.token_logprobs), len(scored.top_logprobs)]
    both = create(model=model, prompt="My name is", max_tokens=2, logprobs=1, echo=True).choices[0].logprobs
    said["echoed"] = [both.token_logprobs[0], len(both.tokens) - 2, both.text_offset[0], both.top_logprobs[0]]
    said["stopped"] = create(model=model, prompt="Hello", max_tokens=20, stop="lo").choices[0].finish_reason
    return said


def errors(client: OpenAI, model: str, url: str) -> dict[str, Any]:
    create = client.chat.completions.create
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    tool = {"role": "tool", "tool_call_id": "call_x", "content": "1"}
    return {
        "model": refused(lambda: create(model="other", messages=NAME)),
        "image": refused(lambda: create(model=model, messages=[{"role": "user", "content": image}])),
        "ignore_eos": refused(
            lambda: create(model=model, messages=NAME, stop="a", extra_body={"ignore_eos": True})
        ),
        "unknown": refused(lambda: create(model=model, messages=NAME, extra_body={"foo": 1})),
        "temperature": refused(lambda: create(model=model, messages=NAME, temperature=2.1)),
        "n": refused(lambda: create(model=model, messages=NAME, n=0)),
        "no messages": refused(lambda: create(model=model, messages=[])),
        "lone output": refused(lambda: create(model=model, messages=[*NAME, tool])),
        "top_logprobs": refused(lambda: create(model=model, messages=NAME, top_logprobs=2)),
        "long": refused(
            lambda: create(model=model, messages=[{"role": "user", "content": "word " * 20_000}])
        ),
        "schema": refused(
            lambda: create(
                model=model,
                messages=NAME,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": 1}, "strict": True},
                },
            )
        ),
        "vocabulary": refused(lambda: client.completions.create(model=model, prompt=[10**9])),
        "retrieve": refused(lambda: client.models.retrieve("other")),
    }


async def both(client: AsyncOpenAI, model: str) -> dict[str, Any]:
    """Two conversations at once, and a stream that is left in its middle."""
    texts = ("My name is Marisol.", "Hello!")
    calls = [
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
        for text in texts
    ]
    found = [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]
    story = [{"role": "user", "content": "Tell me the story of the fox."}]
    stream = await client.chat.completions.create(model=model, messages=story, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    after = await client.chat.completions.create(model=model, messages=NAME)
    return {"at once": found, "after a cut": after.choices[0].message.content}


def main(url: str, model: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        told = {
            "chat": chats(client, model),
            "tools": tools(client, model),
            "formats": formats(client, model),
            "completions": completions(client, model),
            "errors": errors(client, model, url),
            "models": [one.id for one in client.models.list()] + [client.models.retrieve(model).id],
            "async": asyncio.run(both(AsyncOpenAI(base_url=f"{url}/v1", api_key="none"), model)),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
