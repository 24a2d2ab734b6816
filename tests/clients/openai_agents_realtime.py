"""Run by `.venv-clients`: a `RealtimeAgent` of the openai-agents package, as its documentation writes one.

    python openai_agents_realtime.py ws://127.0.0.1:8040/v1/realtime MODEL text|audio|handoff

With ``handoff`` a desk hands the first question over to an agent that answers the second. Its first
`session.update` names audio formats, a voice and turn detection. Prints which tools ran, what the model said,
the session's errors, the session as the server told it last, all that it called unserved, and the handoffs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner, realtime_handoff

RAN: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"temperature": 21, "sky": "sunny"})


async def main(url: str, model: str, modality: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    agent, questions = RealtimeAgent(name="Pocket", tools=[get_weather]), 1
    settings: dict[str, Any] = {"model_name": model}
    if modality == "handoff":  # the model calls a tool of this name by itself
        over = realtime_handoff(agent, tool_name_override="get_weather")
        agent, questions = RealtimeAgent(name="Desk", handoffs=[over]), 2
    if modality != "audio":
        settings["modalities"] = ["text"]
    runner = RealtimeRunner(agent, config={"model_settings": settings})
    told: dict[str, Any] = {"said": "", "errors": [], "session": {}, "unserved": [], "handoffs": []}
    asked = {"url": url, "api_key": "none", "initial_model_settings": settings}
    async with await runner.run(model_config=asked) as session:
        await session.send_message("What is the weather in Rome?")
        async for event in session:
            if event.type == "handoff":
                told["handoffs"].append([event.from_agent.name, event.to_agent.name])
            if event.type == "error":
                told["errors"].append(str(event.error))
            raw = event.data if event.type == "raw_model_event" else None
            if raw is None or raw.type != "raw_server_event":
                continue
            kind = raw.data["type"]
            if kind == "session.updated":
                told["session"] = raw.data["session"]
                told["unserved"] += raw.data["session"].get("unserved", [])
            elif kind == "response.output_text.delta":
                told["said"] += raw.data["delta"]
            elif kind == "response.done" and told["said"]:
                questions -= 1
                if not questions:
                    break
                told["said"] = ""
                await session.send_message("What is the weather in Rome?")
    return {**told, "ran": RAN}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
