"""Run by `.venv-clients`: two turns and a tool call through `client.realtime.connect`, as users write them.

    python openai_conversation.py http://127.0.0.1:8421 pocket

Prints what was said, what was called, and every event's type; each must also fit the package's own type.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
STRICT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)


class Conversation:
    """One connection, and what came over it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.events: list[str] = []
        self.said: list[str] = []
        self.calls: list[dict[str, str]] = []
        self.usage: list[dict[str, Any]] = []

    async def until(self, wanted: str) -> Any:
        """The next event of this type; text and calls on the way are kept."""
        async for event in self.connection:
            STRICT.validate_python(event.to_dict())
            self.events.append(event.type)
            if event.type == "error":
                raise RuntimeError(event.error)
            if event.type == "response.output_text.delta":
                self.said[-1] += event.delta
            if event.type == wanted:
                return event
        raise RuntimeError(f"the connection ended before {wanted}")

    async def say(self, text: str) -> None:
        """One turn of the user's, tools answered, to its last response."""
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.connection.conversation.item.create(item=item)
        self.said.append("")
        while True:
            await self.connection.response.create()
            done = await self.until("response.done")
            self.usage.append(done.response.usage.to_dict())
            calls = [item for item in done.response.output if item.type == "function_call"]
            if not calls:
                return
            for call in calls:
                await self.answer(call)

    async def answer(self, call: Any) -> None:
        """Say what the weather is."""
        self.calls.append({"name": call.name, "arguments": call.arguments})
        output = json.dumps({"temperature": 21, "sky": "sunny"})
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        await self.connection.conversation.item.create(item=answer)


async def main(url: str, model: str) -> dict[str, Any]:
    client = AsyncOpenAI(api_key="none needed", base_url=f"{url}/v1", max_retries=0)
    async with client, client.realtime.connect(model=model) as connection:
        conversation = Conversation(connection)
        created = await conversation.until("session.created")
        session = {"type": "realtime", "output_modalities": ["text"], "tools": [TOOL], "tool_choice": "auto"}
        limits = {"post_instructions": 5000}
        truncation = {"type": "retention_ratio", "retention_ratio": 0.8, "token_limits": limits}
        await connection.session.update(session={**session, "truncation": truncation})
        updated = await conversation.until("session.updated")
        await conversation.say("My dog is called Rex.")
        await conversation.say("What is the weather in Rome?")
    return {
        "model": created.session.model,
        "said": conversation.said,
        "calls": conversation.calls,
        "events": conversation.events,
        "usage": conversation.usage,
        "truncation": [created.session.truncation, updated.session.truncation.to_dict()],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
