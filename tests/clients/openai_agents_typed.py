"""Run by `.venv-clients`: agents of the openai-agents package with an output type, on our model.

    python openai_agents_typed.py ws://127.0.0.1:8040 [bare]

Prints what came of each, or the error that was raised. `bare`: the server's model writes calls as bare JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from agents import Agent, AgentOutputSchema, ModelSettings, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel, Field

from holdfast.sdk import Client, connect
from holdfast.sdk.adapters.openai_agents import SessionModel

RAN: list[str] = []


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


class Inner(BaseModel):
    many: list[Trip] = Field(max_length=1)
    sure: bool


class Nested(BaseModel):
    inner: Inner | None


class Long(BaseModel):
    sentence: str = Field(min_length=200)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"degrees": 21})


class Tried:
    """Agents on one client, each on a model of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.sessions: list[int] = []

    def agent(self, output_type: Any, tools: tuple[Any, ...] = (), **settings: Any) -> Agent[Any]:
        model = SessionModel(self._client)
        settings = {"temperature": 0, **settings}
        return Agent(
            name="Typed",
            model=model,
            output_type=output_type,
            tools=list(tools),
            model_settings=ModelSettings(**settings),
        )

    async def run(self, agent: Agent[Any], given: Any) -> Any:
        assert isinstance(agent.model, SessionModel)
        try:
            return await Runner.run(agent, given)
        finally:
            self.sessions.append(len(agent.model._kept))

    async def final(self, output_type: Any, **settings: Any) -> Any:
        agent = self.agent(output_type, **settings)
        try:
            return (await self.run(agent, "I want to see Rome.")).final_output
        except Exception as error:
            return [type(error).__name__, str(error)]


async def main(url: str, form: str = "") -> Any:
    set_tracing_disabled(True)
    async with connect(url) as client:
        tried = Tried(client)
        if form == "bare":
            return await tried.final(Trip, tools=(get_weather,))
        return await on_the_pocket_model(tried)


async def on_the_pocket_model(tried: Tried) -> dict[str, Any]:
    told: dict[str, Any] = {}
    trip = await tried.final(Trip)
    told["trip"] = [isinstance(trip, Trip), trip.model_dump()]
    told["nested"] = isinstance(await tried.final(Nested), Nested)
    told["wrapped"] = await tried.final(tuple[bool, bool])
    told["refused"] = await tried.final(set[bool])
    lenient = await tried.final(AgentOutputSchema(dict[str, bool], strict_json_schema=False))
    told["lenient"] = isinstance(lenient, dict)
    told["cut"] = await tried.final(Long, max_tokens=5)
    told["cut_before_a_word"] = await tried.final(Trip, max_tokens=1)
    tried.sessions.clear()
    told |= await with_a_tool(tried)
    told |= await streamed(tried)
    told["sessions"] = tried.sessions
    return told


async def with_a_tool(tried: Tried) -> dict[str, Any]:
    """What the pocket model calls the tool for, and then answers; what it answers at once; and forced.

    Of its own it never writes JSON as a reply, and behind some outputs it goes on to call instead. Behind this
    one it does not.
    """
    agent = tried.agent(Trip, (get_weather,))
    first = await tried.run(agent, "What is the weather in Rome?")
    second = await tried.run(agent, [*first.to_input_list(), {"role": "user", "content": "Hello there!"}])
    forced = await tried.run(tried.agent(Trip, (get_weather,), tool_choice="get_weather"), "Hello there!")
    return {
        "answered": [isinstance(run.final_output, Trip) for run in (first, second, forced)],
        "steps": [len(run.raw_responses) for run in (first, second, forced)],
        "ran": RAN,
    }


async def streamed(tried: Tried) -> dict[str, Any]:
    agent = tried.agent(Trip)
    run = Runner.run_streamed(agent, "I want to see Rome.")
    pieces = [event.data.delta async for event in run.stream_events() if is_delta(event)]
    try:
        cut = Runner.run_streamed(tried.agent(Long, max_tokens=5), "I want to see Rome.")
        async for _ in cut.stream_events():
            pass
        error: Any = None
    except Exception as raised:
        error = [type(raised).__name__, str(raised)]
    return {"pieces": pieces, "streamed": run.final_output.model_dump(), "cut_stream": error}


def is_delta(event: Any) -> bool:
    return event.type == "raw_response_event" and event.data.type == "response.output_text.delta"


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
