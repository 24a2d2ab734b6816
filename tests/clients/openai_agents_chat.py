"""Run by `.venv-clients`: agents of the openai-agents package on its own model class for Chat Completions.

    python openai_agents_chat.py http://127.0.0.1:8040 pocket

Prints what was said, which tools ran with what, which agent answered after a handoff, and the cached tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.extensions.handoff_filters import remove_all_tools
from openai import AsyncOpenAI
from pydantic import BaseModel

RAN: list[str] = []


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"temperature": 7, "sky": "cloudy"})


async def with_a_tool(model: Any) -> dict[str, Any]:
    """Two questions and a streamed third, each with what was said before."""
    agent = Agent(
        name="Pocket",
        instructions="The user's dog is called Tamu.",
        model=model,
        tools=[get_weather],
        model_settings=ModelSettings(temperature=0, include_usage=True),
    )
    first = await Runner.run(agent, "My name is Marisol.")
    second = await Runner.run(agent, [*first.to_input_list(), user("What is the weather in Rome?")])
    streamed = Runner.run_streamed(agent, [*second.to_input_list(), user("What is the weather in Oslo?")])
    pieces = [event.data.delta async for event in streamed.stream_events() if is_delta(event)]
    last = await Runner.run(agent, [*streamed.to_input_list(), user("What is my name?")])
    runs = (first, second, streamed, last)
    usages = [response.usage for run in runs for response in run.raw_responses]
    return {
        "said": [run.final_output for run in runs],
        "pieces": pieces,
        "ran": list(RAN),
        "input": [usage.input_tokens for usage in usages],
        "cached": [usage.input_tokens_details.cached_tokens for usage in usages],
    }


async def with_a_handoff(model: Any) -> dict[str, Any]:
    """One agent may only hand over, the other answers with its tool. It is shown no call of the first."""
    RAN.clear()
    weather = Agent(
        name="Weather", model=model, tools=[get_weather], model_settings=ModelSettings(temperature=0)
    )
    desk = Agent(
        name="Desk",
        model=model,
        handoffs=[handoff(weather, input_filter=remove_all_tools)],
        model_settings=ModelSettings(temperature=0, tool_choice="required"),
    )
    run = await Runner.run(desk, "What is the weather in Rome?")
    return {
        "last": run.last_agent.name,
        "said": run.final_output,
        "ran": list(RAN),
        "items": [item.type for item in run.new_items],
    }


async def with_a_memory(model: Any) -> dict[str, Any]:
    """The package's own session keeps the turns; the last one follows a type."""
    settings = ModelSettings(temperature=0)
    agent = Agent(name="Pocket", model=model, model_settings=settings)
    session = SQLiteSession("marisol")
    await Runner.run(agent, "My name is Marisol.", session=session)
    named = await Runner.run(agent, "What is my name?", session=session)
    typed = Agent(name="Typed", model=model, output_type=Trip, model_settings=settings)
    trip = await Runner.run(typed, "I live in Oslo.", session=session)
    return {"said": named.final_output, "trip": isinstance(trip.final_output, Trip)}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def is_delta(event: Any) -> bool:
    return event.type == "raw_response_event" and event.data.type == "response.output_text.delta"


async def main(url: str, model: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chat = OpenAIChatCompletionsModel(model=model, openai_client=client)
        return {
            "tool": await with_a_tool(chat),
            "handoff": await with_a_handoff(chat),
            "memory": await with_a_memory(chat),
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
