"""Run by `.venv-clients-litellm`: LiteLLM against a server, as a provider that is compatible with OpenAI.

    python litellm_run.py http://127.0.0.1:8040 pocket

Prints what was said, which cities its tool was asked for, and which error each bad call raised.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices as it is imported
import litellm

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
RAN: list[str] = []


def get_weather(city: str) -> str:
    RAN.append(city)
    return json.dumps({"temperature": 7, "sky": "cloudy"})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def agent(asked: dict[str, Any], messages: list[Any], question: str) -> str:
    """The loop that LiteLLM's users write: call, run the tools, call again, until there is an answer."""
    messages.append(user(question))
    for _ in range(4):
        message = litellm.completion(messages=messages, tools=[WEATHER], **asked).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            output = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    raise RuntimeError("no answer in four steps")


def chat(asked: dict[str, Any]) -> dict[str, Any]:
    messages: list[Any] = []
    questions = ("My name is Marisol.", "What is the weather in Rome?", "What is my name?")
    said = [agent(asked, messages, question) for question in questions]
    count = [user("Count from 1 to 9.")]
    chunks = list(
        litellm.completion(messages=count, stream=True, stream_options={"include_usage": True}, **asked)
    )
    whole = litellm.stream_chunk_builder(chunks, messages=count)
    weather = [user("What is the weather in Oslo?")]
    called = litellm.stream_chunk_builder(
        list(litellm.completion(messages=weather, tools=[WEATHER], stream=True, **asked)), messages=weather
    )
    function = called.choices[0].message.tool_calls[0].function
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
    typed = litellm.completion(messages=[user("I live in Oslo.")], response_format=form, **asked)
    scored = litellm.completion(messages=count, logprobs=True, top_logprobs=2, max_tokens=3, **asked)
    return {
        "said": said,
        "ran": RAN,
        "counted": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "called": [function.name, json.loads(function.arguments)],
        "typed": json.loads(typed.choices[0].message.content),
        "logprobs": len(scored.choices[0].logprobs.content),
        "many": len(litellm.completion(messages=count, n=2, **asked).choices),
    }


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


async def others(asked: dict[str, Any], url: str, model: str) -> dict[str, Any]:
    """The asynchronous call, text completion, Responses, and Messages by its anthropic provider."""
    replies = [litellm.acompletion(messages=[user(text)], **asked) for text in ("My name is Ana.", "Hello!")]
    at_once = [reply.choices[0].message.content for reply in await asyncio.gather(*replies)]
    text = {**asked, "model": f"text-completion-openai/{model}"}
    completed = litellm.text_completion(prompt="Hello", max_tokens=4, **text)
    responded = litellm.responses(input="My name is Ana.", **asked)
    keys = {"api_key": "none", "temperature": 0, "num_retries": 0}
    claude: Any = {"model": f"anthropic/{model}", "api_base": url, "max_tokens": 40, **keys}
    name = litellm.completion(messages=[user("My name is Ana.")], **claude)
    weather = litellm.completion(messages=[user("What is the weather in Rome?")], tools=[WEATHER], **claude)
    function = weather.choices[0].message.tool_calls[0].function
    return {
        "at once": at_once,
        "text": completed.choices[0].text,
        "responses": responded.output[0].content[0].text,
        "messages": name.choices[0].message.content,
        "messages call": [function.name, json.loads(function.arguments)],
    }


def errors(asked: dict[str, Any]) -> dict[str, str]:
    found = {}
    bad: dict[str, Any] = {
        "model": {"model": "openai/other"},
        "field": {"temperature": 3},
        "long": {"messages": [user("word " * 20_000)]},
    }
    for name, fields in bad.items():
        try:
            litellm.completion(**{"messages": [user("Hello!")], **asked, **fields})
        except Exception as error:
            found[name] = type(error).__name__
    return found


def main(url: str, model: str) -> dict[str, Any]:
    litellm.suppress_debug_info = True
    keys = {"api_key": "none", "temperature": 0, "num_retries": 0}
    asked: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", **keys}
    return {
        "chat": chat(asked),
        "others": asyncio.run(others(asked, url, model)),
        "errors": errors(asked),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
