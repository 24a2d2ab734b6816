"""Run by `.venv-clients`: an agent with a tool on the Responses models of openai-agents, HTTP and WebSocket.

    python openai_agents_responses.py http://127.0.0.1:8040 pocket

Prints what each said, what its tool was asked, and the cached tokens of each step; and which agent answered
after a handoff, at once, streamed and chained.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, handoff, set_tracing_disabled
from agents.extensions.handoff_filters import remove_all_tools
from agents.models.openai_responses import OpenAIResponsesModel, OpenAIResponsesWSModel
from openai import AsyncOpenAI

RAN: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"temperature": 21, "sky": "sunny"})


async def run(model: Any, streamed: bool) -> dict[str, Any]:
    """One agent's two turns."""
    RAN.clear()
    settings = ModelSettings(temperature=0)
    agent = Agent(name="Pocket", model=model, tools=[get_weather], model_settings=settings)
    first = await Runner.run(agent, "My name is Marisol.")
    question: Any = [*first.to_input_list(), {"role": "user", "content": "What is the weather in Rome?"}]
    if streamed:
        second: Any = Runner.run_streamed(agent, question)
        async for _ in second.stream_events():
            pass
    else:
        second = await Runner.run(agent, question)
    chained = await Runner.run(agent, "What is my name?", previous_response_id=first.last_response_id)
    usages = [one.usage for result in (first, second, chained) for one in result.raw_responses]
    return {
        "said": [first.final_output, second.final_output, chained.final_output],
        "ran": list(RAN),
        "cached": [usage.input_tokens_details.cached_tokens for usage in usages],
    }


async def hand_over(model: Any, *, streamed: bool, chained: bool = False) -> dict[str, Any]:
    """One agent may only hand over, the other answers with its tool. It is shown no call of the first, unless
    each step continues the response before (``chained``)."""
    RAN.clear()
    settings = ModelSettings(temperature=0)
    weather = Agent(name="Weather", model=model, tools=[get_weather], model_settings=settings)
    desk = Agent(
        name="Desk",
        model=model,
        handoffs=[weather if chained else handoff(weather, input_filter=remove_all_tools)],
        model_settings=ModelSettings(temperature=0, tool_choice="required"),
    )
    asked = "What is the weather in Rome?"
    if streamed:
        result: Any = Runner.run_streamed(desk, asked, auto_previous_response_id=chained)
        names = [event.new_agent.name async for event in result.stream_events() if is_handoff(event)]
    else:
        result = await Runner.run(desk, asked, auto_previous_response_id=chained)
        names = []
    return {
        "last": result.last_agent.name,
        "agents": names,
        "said": result.final_output,
        "ran": list(RAN),
        "handed over": any(item.type == "handoff_output_item" for item in result.new_items),
    }


def is_handoff(event: Any) -> bool:
    return event.type == "agent_updated_stream_event"


async def main(url: str, model: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    async with AsyncOpenAI(api_key="none needed", base_url=f"{url}/v1", max_retries=0) as client:
        http = OpenAIResponsesModel(model=model, openai_client=client)
        socket = OpenAIResponsesWSModel(model=model, openai_client=client)
        told = {
            "http": await run(http, streamed=False),
            "streamed": await run(http, streamed=True),
            "socket": await run(socket, streamed=True),
        }
        handoffs = {
            "http": await hand_over(http, streamed=False),
            "streamed": await hand_over(http, streamed=True),
            "socket": await hand_over(socket, streamed=True),
            "chained": await hand_over(http, streamed=False, chained=True),
            "chained socket": await hand_over(socket, streamed=True, chained=True),
        }
        await socket.close()
    return {"runs": told, "handoffs": handoffs}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
