"""Run by `.venv-clients-pydantic-ai`: an agent of pydantic-ai with a tool, on its model for Chat Completions.

    python pydantic_ai_run.py http://127.0.0.1:8040 pocket chat|responses

Prints what was said, which cities its tool was asked for, and the usage of each run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

RAN: list[str] = []


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"temperature": 7, "sky": "cloudy"})


async def talk(model: Any) -> dict[str, Any]:
    """A turn, one with a tool that is streamed, and one that remembers both."""
    RAN.clear()
    agent = Agent(model, tools=[get_weather], model_settings={"temperature": 0}, retries=0)
    first = await agent.run("My name is Marisol.")
    history = first.all_messages()
    async with agent.run_stream("What is the weather in Rome?", message_history=history) as second:
        pieces = [piece async for piece in second.stream_text(delta=True, debounce_by=None)]
        history = second.all_messages()
    called = list(RAN)
    plain = await agent.run("What is the weather in Oslo?", message_history=history)
    third = await agent.run("What is my name?", message_history=plain.all_messages())
    usage = third.usage
    return {
        "said": [first.output, "".join(pieces), plain.output, third.output],
        "pieces": len(pieces),
        "ran": [called, list(RAN)],
        "requests": usage.requests,
        "cached": usage.cache_read_tokens,
        "input": usage.input_tokens,
    }


async def typed(model: Any) -> dict[str, str]:
    """An answer by the response format, and one as the arguments of a tool that must be called."""
    found = {}
    for name, output in (("native", NativeOutput(Trip)), ("tool", ToolOutput(Trip))):
        agent = Agent(model, output_type=output, model_settings={"temperature": 0}, retries=0)
        found[name] = type((await agent.run("I live in Oslo.")).output).__name__
    return found


async def main(url: str, model: str, face: str) -> dict[str, Any]:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    made = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[face](model, provider=provider)
    return {**await talk(made), "typed": await typed(made)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
