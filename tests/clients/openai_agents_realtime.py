"""Run by `.venv-clients`: a `RealtimeAgent` of the openai-agents package, as its documentation writes one.

    python openai_agents_realtime.py ws://127.0.0.1:8040/v1/realtime MODEL text|audio

Its first `session.update` names audio formats, a voice and turn detection. Prints which tools ran, what the
model said, the session's errors, the session as the server told it last, and all that it called unserved.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner

RAN: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    RAN.append(city)
    return json.dumps({"temperature": 21, "sky": "sunny"})


async def main(url: str, model: str, modality: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    agent = RealtimeAgent(name="Pocket", tools=[get_weather])
    settings: dict[str, Any] = {"model_name": model}
    if modality == "text":
        settings["modalities"] = ["text"]
    runner = RealtimeRunner(agent, config={"model_settings": settings})
    told: dict[str, Any] = {"said": "", "errors": [], "session": {}, "unserved": []}
    asked = {"url": url, "api_key": "none", "initial_model_settings": settings}
    async with await runner.run(model_config=asked) as session:
        await session.send_message("What is the weather in Rome?")
        async for event in session:
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
                break
    return {**told, "ran": RAN}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
