"""Run by `.venv-clients`: an agent of the openai-agents package, written as its users do, on our model.

    python openai_agents_run.py ws://127.0.0.1:8040

Prints what it said, which tools ran, and what the server had to read anew at each step.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

from holdfast.sdk import connect
from holdfast.sdk.adapters.openai_agents import SessionModel

RAN: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"temperature": 21, "sky": "sunny"})


async def main(url: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    async with connect(url) as client:
        model = SessionModel(client)
        agent = Agent(
            name="Pocket", model=model, tools=[get_weather], model_settings=ModelSettings(temperature=0)
        )
        first = await Runner.run(agent, "My name is Marisol.")
        second = await Runner.run(agent, [*first.to_input_list(), user("What is the weather in Rome?")])
        streamed = Runner.run_streamed(agent, [*second.to_input_list(), user("What is my name?")])
        pieces = [event.data.delta async for event in streamed.stream_events() if is_delta(event)]
        sessions = len(model._kept)
        await model.close()
    usages = [response.usage for run in (first, second, streamed) for response in run.raw_responses]
    return {
        "said": [first.final_output, second.final_output, streamed.final_output],
        "pieces": pieces,
        "ran": RAN,
        "sessions": sessions,
        "cached": [usage.input_tokens_details.cached_tokens for usage in usages],
        "input": [usage.input_tokens for usage in usages],
    }


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def is_delta(event: Any) -> bool:
    return event.type == "raw_response_event" and event.data.type == "response.output_text.delta"


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
