"""Run by `.venv-clients`: `client.realtime.connect`, as users write it.

    python openai_realtime.py http://127.0.0.1:8040 pocket

`talk` is two turns with a tool call, `verbs` the rest of the protocol's text part, `blocking` the synchronous
client. Prints what came back; each event must also fit the package's own type.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, OpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
STRICT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)


def message(text: str, **fields: Any) -> Any:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": "user", "content": content, **fields}


def text_of(response: Any) -> str:
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


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
            if event.type == wanted:
                return event
            if event.type == "error":
                raise RuntimeError(event.error)
            if event.type == "response.output_text.delta":
                self.said[-1] += event.delta
        raise RuntimeError(f"the connection ended before {wanted}")

    async def say(self, text: str) -> None:
        """One turn of the user's, tools answered, to its last response."""
        await self.connection.conversation.item.create(item=message(text))
        while True:
            done = await self.respond()
            calls = [item for item in done.output if item.type == "function_call"]
            if not calls:
                return
            for call in calls:
                await self.answer(call)

    async def respond(self, **fields: Any) -> Any:
        """One response, to its end."""
        self.said.append("")
        await self.connection.response.create(**({"response": fields} if fields else {}))
        done = (await self.until("response.done")).response
        self.usage.append(done.usage.to_dict())
        return done

    async def answer(self, call: Any) -> None:
        """Say what the weather is."""
        self.calls.append({"name": call.name, "arguments": call.arguments})
        output = json.dumps({"temperature": 21, "sky": "sunny"})
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        await self.connection.conversation.item.create(item=answer)

    async def refused(self) -> list[Any]:
        """The code and the field of the next error."""
        error = (await self.until("error")).error
        return [error.code, error.param, error.event_id]


async def talk(client: AsyncOpenAI, model: str) -> dict[str, Any]:
    async with client.realtime.connect(model=model) as connection:
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
        "said": [conversation.said[0], conversation.said[-1]],
        "calls": conversation.calls,
        "events": conversation.events,
        "usage": conversation.usage,
        "truncation": [created.session.truncation, updated.session.truncation.to_dict()],
    }


async def verbs(client: AsyncOpenAI, model: str) -> dict[str, Any]:
    """Items behind another, read, deleted; responses out of band, bound, cut, forced; refusals harm nothing."""
    told: dict[str, Any] = {}
    async with client.realtime.connect(model=model) as connection:
        conversation = Conversation(connection)
        items, respond = connection.conversation.item, conversation.respond
        await conversation.until("conversation.created")
        await items.create(item=message("My name is Marisol.", id="name"))
        told["added"] = (await conversation.until("conversation.item.done")).item.id
        told["said"] = [text_of(await respond())]
        dog = {**message("The user's dog is called Tamu."), "role": "system", "id": "dog"}
        await items.create(item=dog, previous_item_id="root")
        told["first"] = (await conversation.until("conversation.item.added")).previous_item_id
        await items.retrieve(item_id="dog")
        told["retrieved"] = (await conversation.until("conversation.item.retrieved")).item.content[0].text
        await items.delete(item_id="dog")
        told["deleted"] = (await conversation.until("conversation.item.deleted")).item_id
        aside = await respond(
            conversation="none", input=[message("My name is Ana.")], metadata={"topic": "names"}
        )
        told["aside"] = [text_of(aside), aside.conversation_id, aside.metadata]
        await items.create(item=message("What is my name?"))
        told["said"].append(text_of(await respond()))
        short = await respond(max_output_tokens=2)
        told["short"] = [short.status, short.status_details.reason, short.usage.output_tokens]
        forced = await respond(tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"})
        told["forced"] = [item.name for item in forced.output]
        await items.create(
            item={"type": "function_call_output", "call_id": forced.output[0].call_id, "output": "{}"}
        )
        await connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
        told["instructions"] = (await conversation.until("session.updated")).session.instructions
        await items.create(item=message("Tell me the story of the fox."))
        await connection.response.create()
        conversation.said.append("")
        begun = await conversation.until("response.created")
        await conversation.until("response.output_text.delta")
        await connection.response.cancel(response_id=begun.response.id)
        cut = (await conversation.until("response.done")).response
        told["cut"] = [cut.id == begun.response.id, cut.status, cut.status_details.reason]
        told["refused"] = {}
        for name, call in {
            "cancel": lambda: connection.response.cancel(event_id="a"),
            "retrieve": lambda: items.retrieve(item_id="nothing", event_id="b"),
            "unknown": lambda: items.create(item=message("x"), previous_item_id="nothing", event_id="c"),
            "sound": lambda: connection.input_audio_buffer.append(audio="AAAA", event_id="d"),
            "picture": lambda: items.create(
                item={**message(""), "content": [{"type": "input_image", "image_url": "data:,"}]},
                event_id="e",
            ),
        }.items():
            await call()
            told["refused"][name] = await conversation.refused()
        await items.create(item=message("What is my name?"))
        told["said"].append(text_of(await respond()))
    return told


def blocking(url: str, model: str) -> str:
    """One turn of the synchronous client."""
    with (
        OpenAI(api_key="none needed", base_url=url) as client,
        client.realtime.connect(model=model) as connection,
    ):
        connection.conversation.item.create(item=message("My name is Ana."))
        connection.response.create()
        for event in connection:
            if event.type == "response.done":
                return text_of(event.response)
    raise RuntimeError("the connection ended before response.done")


async def main(url: str, model: str) -> dict[str, Any]:
    base = f"{url}/v1"
    async with AsyncOpenAI(api_key="none needed", base_url=base, max_retries=0) as client:
        told = {"talk": await talk(client, model), "verbs": await verbs(client, model)}
    return {**told, "blocking": blocking(base, model)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
