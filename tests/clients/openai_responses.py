"""Run by `.venv-clients`: the calls of `client.responses` and `client.conversations`, as users write them.

    python openai_responses.py http://127.0.0.1:8040 pocket

Prints what came back. Every event must also fit the package's own type.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response, ResponsesServerEvent, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SOCKET_EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
STRICT: TypeAdapter[Any] = TypeAdapter(Response)


class Trip(BaseModel):
    """What `parse` fills in."""

    city: str
    days: int


class Model:
    """A model, and the client that asks it."""

    def __init__(self, client: AsyncOpenAI, name: str) -> None:
        self.client = client
        self.name = name

    async def create(self, given: Any, **fields: Any) -> Response:
        """A response that fits its type."""
        response = await self.client.responses.create(model=self.name, input=given, **fields)
        STRICT.validate_python(response.to_dict())
        return response

    async def stream(self, given: Any, **fields: Any) -> list[Any]:
        """The events of a response."""
        stream = await self.client.responses.create(model=self.name, input=given, stream=True, **fields)
        return [checked(event) async for event in stream]


def checked(event: Any) -> Any:
    EVENT.validate_python(event.to_dict())
    return event


async def plain(model: Model) -> dict[str, Any]:
    """Create, stream, retrieve, read on, list, delete."""
    first = await model.create("My name is Marisol.", metadata={"a": "b"})
    events = await model.stream("What is my name?", previous_response_id=first.id)
    last = events[-1].response
    again = await model.client.responses.retrieve(last.id)
    resumed = await model.client.responses.retrieve(last.id, stream=True, starting_after=3)
    rest = [checked(event) async for event in resumed]
    listed = [item async for item in model.client.responses.input_items.list(last.id, order="asc", limit=1)]
    counted = await model.client.responses.input_tokens.count(model=model.name, input="My name is Marisol.")
    await model.client.responses.delete(first.id)
    try:
        await model.client.responses.retrieve(first.id)
    except NotFoundError as error:
        gone = error.code
    return {
        "said": [first.output_text, last.output_text],
        "kinds": [event.type for event in events],
        "numbers": [event.sequence_number for event in events],
        "same": again.to_dict() == last.to_dict() and again.metadata == {},
        "rest": [event.sequence_number for event in rest],
        "items": [item.content[0].text for item in listed],
        "counted": [counted.input_tokens, first.usage.input_tokens if first.usage else 0],
        "cached": [one.usage.input_tokens_details.cached_tokens for one in (first, last)],
        "kv": [one.to_dict()["kv"] for one in (first, last)],
        "gone": gone,
    }


async def tools(model: Model) -> dict[str, Any]:
    """A chain through `previous_response_id`, with a call and its output."""
    asked = await model.create("What is the weather in Rome?", tools=[TOOL])
    (call,) = [item for item in asked.output if item.type == "function_call"]
    output = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": json.dumps({"temperature": 21, "sky": "sunny"}),
    }
    told = await model.create([output], previous_response_id=asked.id, tools=[TOOL])
    stateless: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    stateless += [item.to_dict() for item in asked.output]
    again = await model.create([*stateless, output], tools=[TOOL], store=False)
    streamed = await model.stream("What is the weather in Oslo?", tools=[TOOL], tool_choice="required")
    chosen = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    other = {**TOOL, "name": "get_time"}
    listed = await model.create("What is the weather in Oslo?", tools=[TOOL, other], tool_choice=chosen)
    try:
        await model.create("x", previous_response_id="resp_0")
    except BadRequestError as error:
        unknown = error.code
    return {
        "call": [call.name, json.loads(call.arguments)],
        "allowed": sorted({item.name for item in listed.output}),
        "said": [told.output_text, again.output_text],
        "kv": [one.to_dict()["kv"] for one in (told, again)],
        "streamed": [event.type for event in streamed],
        "unknown": unknown,
    }


async def background(model: Model) -> dict[str, Any]:
    """Runs in the background: followed to its end, and cancelled."""
    api = model.client.responses
    begun = await model.create("Tell me the story of the fox.", background=True)
    status = [begun.status]
    followed = [checked(event) async for event in await api.retrieve(begun.id, stream=True)]
    status += [followed[-1].response.status, (await api.retrieve(begun.id)).status]
    long = {"extra_body": {"min_output_tokens": 1500}, "max_output_tokens": 1600}
    slow = await model.create("Tell me the story of the fox.", background=True, **long)
    cancelled = await model.client.responses.cancel(slow.id)
    return {"status": status, "cancelled": cancelled.status}


async def typed(model: Model) -> dict[str, Any]:
    """`parse` and the stream helper."""
    parsed = await model.client.responses.parse(
        model=model.name, input="A trip to Rome, please.", text_format=Trip
    )
    trip = parsed.output_parsed
    async with model.client.responses.stream(model=model.name, input="Hello!") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    form: Any = {"format": {"type": "json_object"}}
    anything = await model.create("Say something as JSON.", text=form, max_output_tokens=200)
    return {
        "trip": [type(trip).__name__, isinstance(trip.days, int) if trip else False],
        "helper": [kinds[0], kinds[-1], final.output_text],
        "object": [anything.status, anything.output_text],
    }


async def conversations(model: Model) -> dict[str, Any]:
    """All of `client.conversations`, and responses in one."""
    api = model.client.conversations
    made = await api.create(metadata={"topic": "names"})
    first = await model.create("My name is Marisol.", conversation=made.id)
    second = await model.create("What is my name?", conversation=made.id)
    listed = [item async for item in api.items.list(made.id, order="asc")]
    item: Any = {"type": "message", "role": "user", "content": "Hello!"}
    added = await api.items.create(made.id, items=[item])
    one = await api.items.retrieve(added.data[0].id, conversation_id=made.id)
    await api.items.delete(added.data[0].id, conversation_id=made.id)
    changed = await api.update(made.id, metadata={"topic": "dogs"})
    kept = await api.retrieve(made.id)
    gone = await api.delete(made.id)
    return {
        "said": [first.output_text, second.output_text],
        "cached": second.to_dict()["kv"],
        "items": [item.type for item in listed],
        "same": one.to_dict() == added.data[0].to_dict(),
        "metadata": [made.metadata, changed.metadata, kept.metadata],
        "deleted": [gone.deleted, gone.object],
    }


async def compaction(model: Model) -> dict[str, Any]:
    """A conversation is shortened, and goes on in a new chain."""
    first = await model.create("My name is Marisol.")
    compacted = await model.client.responses.compact(model=model.name, previous_response_id=first.id)
    items: list[Any] = [item.to_dict() for item in compacted.output]
    second = await model.create([*items, {"role": "user", "content": "Hello!"}])
    return {"kinds": [item["type"] for item in items], "status": second.status}


async def socket(model: Model) -> dict[str, Any]:
    """`client.responses.connect`: a chain, lanes, prefill, steering and an unknown response."""
    told: dict[str, Any] = {}
    async with model.client.responses.connect() as connection:

        async def until(*kinds: str) -> list[Any]:
            events = []
            async for event in connection:
                SOCKET_EVENT.validate_python(event.to_dict())
                events.append(event)
                if event.type in kinds:
                    return events
            raise RuntimeError(f"the connection ended before {kinds}")

        ended = ("response.completed", "response.incomplete", "response.failed")

        async def response(given: Any, **fields: Any) -> Any:
            await connection.response.create(model=model.name, input=given, **fields)
            return (await until(*ended))[-1].response

        warm = await response("My name is Marisol.", generate=False)
        warmed = await response([], previous_response_id=warm.id)
        told["warmed"] = [warmed.output_text, warmed.to_dict()["kv"]["prefilled"]]
        first = await response("My name is Marisol.", store=False)
        second = await response("What is my name?", previous_response_id=first.id)
        told["said"] = [warm.output_text, first.output_text, second.output_text]
        told["kv"] = second.to_dict()["kv"]
        for lane in ("left", "right"):
            await connection.response.create(
                model=model.name, input=lane, stream_id=lane, previous_response_id=second.id
            )
        events = await until(*ended)
        events += await until(*ended)
        told["lanes"] = sorted({event.stream_id for event in events})
        await connection.response.create(model=model.name, input="x", previous_response_id="resp_0")
        error = (await until("error"))[-1]
        told["unknown"] = [error.status, error.error.code]
        long: Any = {"type": "response.create", "model": model.name, "input": "Tell me of the fox."}
        await connection.send({**long, "max_output_tokens": 600, "min_output_tokens": 500})
        begun = (await until("response.created"))[-1].response
        await connection.response.steer(previous_response_id=begun.id, input="My dog is called Rex.")
        steered = (await until(*ended))[-1].response
        successor = (await until("response.created"))[-1].response
        last = (await until(*ended))[-1].response
        told["steered"] = [steered.status, steered.incomplete_details.reason]
        told["successor"] = [successor.previous_response_id == begun.id, last.id == successor.id]
    return told


async def main(url: str, model: str) -> dict[str, Any]:
    async with AsyncOpenAI(api_key="none needed", base_url=f"{url}/v1", max_retries=0) as client:
        asked = Model(client, model)
        return {
            part.__name__: await part(asked)
            for part in (plain, tools, background, typed, conversations, compaction, socket)
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
