"""Ten scripted sessions in lock step over a real socket, and what of their events must stay the same.

A script sends a frame and waits for the event that answers it before it sends the next one. What is compared is
what a client can rely on: for each response the order of its events, its joined text, its status and its usage;
and the order of all other events. Ids, times, the cuts of deltas and the texts of errors are left out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from .wires import Json, Wire

TEXTS = {"response.output_text.delta": "text", "response.function_call_arguments.delta": "arguments"}
VARIES = {"varies": "yes"}
"""Metadata of a reply that is cut while it runs, or follows such a one: when it is cut decides its text."""
TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class RecordedWire(Wire):
    """A wire that keeps all events it received."""

    def __init__(self, socket: ClientConnection, heard: list[Json]) -> None:
        super().__init__(socket)
        self.heard = heard

    async def receive(self) -> Json:
        event = await super().receive()
        self.heard.append(event)
        return event

    async def ask_for(self, frame: Json, *kinds: str) -> Json:
        """Send a frame; the first event of one of these types, or an error."""
        await self.send(frame)
        while (event := await self.receive())["type"] not in (*kinds, "error"):
            pass
        return event

    async def add(self, text: str) -> Json:
        """Put a user's message at the end."""
        return await self.ask_for(
            {"type": "conversation.item.create", "item": message(text)}, "conversation.item.done"
        )

    async def turn(self, said: str | None = None, **fields: Any) -> Json:
        """One turn, the item first and its answer; the response at its end."""
        if said is not None:
            await self.add(said)
        done = await self.ask_for({"type": "response.create", "response": fields}, "response.done")
        return done.get("response", done)


def message(text: str, role: str = "user") -> Json:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


@asynccontextmanager
async def recorded_wire(url: str, heard: list[Json], query: str = "") -> AsyncIterator[RecordedWire]:
    address = url.replace("http", "ws", 1) + "/v1/realtime" + query
    async with connect(address, compression=None, proxy=None) as socket:
        wire = RecordedWire(socket, heard)
        if "resume=true" not in query:
            await wire.until("conversation.created")
        yield wire


# --- the scripts --------------------------------------------------------------------------------------------


async def text(url: str, heard: list[Json]) -> None:
    """Turns, instructions, a reply out of band, items asked for and taken out."""
    async with recorded_wire(url, heard) as wire:
        update = {"type": "session.update", "session": {"instructions": "Be brief.", "temperature": 0}}
        await wire.ask_for(update, "session.updated")
        await wire.turn("My name is Marisol.")
        done = await wire.turn("What is my name?")
        item = done["output"][-1]["id"]
        await wire.ask_for(
            {"type": "conversation.item.retrieve", "item_id": item}, "conversation.item.retrieved"
        )
        await wire.turn(
            conversation="none", input=[message("Tell me the story of the fox.")], max_output_tokens=20
        )
        await wire.ask_for({"type": "conversation.item.delete", "item_id": item}, "conversation.item.deleted")
        await wire.turn("What is my name?", max_output_tokens=5)
        await wire.turn("Tell me the story of the fox.", events="brief")


async def tools(url: str, heard: list[Json]) -> None:
    """A call, its output, the answer; then a forced call."""
    async with recorded_wire(url, heard) as wire:
        await wire.ask_for({"type": "session.update", "session": {"tools": [WEATHER]}}, "session.updated")
        done = await wire.turn("What is the weather in Oslo?")
        call = next(item for item in done["output"] if item["type"] == "function_call")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"degrees": 7}'}
        await wire.ask_for({"type": "conversation.item.create", "item": output}, "conversation.item.done")
        await wire.turn()
        forced = {"type": "function", "name": "get_weather"}
        await wire.turn("And in Rome?", tool_choice=forced)


async def fork(url: str, heard: list[Json]) -> None:
    """Two children on the same socket; the tree, a name, a child pruned."""
    async with recorded_wire(url, heard, "?resumable=true") as wire:
        await wire.turn("My name is Marisol.")
        forked = await wire.ask_for({"type": "session.fork", "children": 2}, "session.forked")
        for at, child in enumerate(forked["sessions"]):
            await wire.ask_for({"type": "session.attach", "session": child["handle"]}, "session.resumed")
            item = message("What is my name?" if at else "My locker code is 4821.")
            create = {"type": "conversation.item.create", "item": item, "session_id": child["id"]}
            await wire.ask_for(create, "conversation.item.done")
            await wire.ask_for({"type": "response.create", "session_id": child["id"]}, "response.done")
        await wire.ask_for({"type": "session.name", "name": "trunk"}, "session.named")
        await wire.ask_for({"type": "session.tree"}, "session.tree.listed")
        child = forked["sessions"][0]["id"]
        await wire.ask_for({"type": "session.prune", "session": child}, "session.pruned")
        await wire.turn("What is my name?")


async def rewind(url: str, heard: list[Json]) -> None:
    """Back to an item, and to the root."""
    async with recorded_wire(url, heard) as wire:
        here = (await wire.turn("My name is Marisol."))["output"][-1]["id"]
        await wire.turn("My name is Bella.")
        await wire.ask_for({"type": "session.rewind", "to": here}, "session.rewound")
        await wire.turn("What is my name?")
        await wire.ask_for({"type": "session.rewind", "to": "root"}, "session.rewound")
        await wire.turn("What is my name?")


async def interrupt(url: str, heard: list[Json]) -> None:
    """A reply that is over is cut, one that runs is cancelled, one that runs is steered."""
    async with recorded_wire(url, heard) as wire:
        done = await wire.turn("Tell me the story of the fox.")
        cut = {"type": "conversation.item.truncate", "item_id": done["output"][-1]["id"], "content_index": 0}
        await wire.ask_for({**cut, "text_end": 30}, "conversation.item.truncated")
        await wire.turn("My name is Marisol.")
        await wire.add("Tell me the story of the fox.")
        endless = {
            "type": "response.create",
            "response": {"min_output_tokens": 400, "metadata": VARIES},
        }
        await wire.ask_for(endless, "response.output_text.delta")
        await wire.ask_for({"type": "response.cancel"}, "response.done")
        await wire.turn("What is my name?", metadata=VARIES)
        await wire.ask_for(endless, "response.output_text.delta")
        next_turn = {"metadata": VARIES}
        steer = {"type": "response.steer", "input": [message("What is my name?")], "response": next_turn}
        await wire.send(steer)
        for _ in range(2):
            await wire.until("response.done")


async def streamed_input(url: str, heard: list[Json]) -> None:
    """Text that comes in pieces, taken back in part, taken back whole, committed."""
    async with recorded_wire(url, heard) as wire:
        await wire.turn("My name is Marisol.")
        for piece in ("What is ", "my na", "mes?"):
            await wire.send({"type": "input_text_buffer.append", "text": piece})
        await wire.send({"type": "input_text_buffer.replace", "from": 8, "text": "my name?"})
        await wire.ask_for({"type": "input_text_buffer.commit"}, "input_text_buffer.committed")
        await wire.turn()
        await wire.send({"type": "input_text_buffer.append", "text": "My name is Bella."})
        await wire.ask_for({"type": "input_text_buffer.clear"}, "input_text_buffer.cleared")
        await wire.turn("What is my name?")


async def resume(url: str, heard: list[Json]) -> None:
    """The socket is dropped after a turn; another one goes on."""
    async with recorded_wire(url, heard, "?resumable=true") as wire:
        await wire.turn("My name is Marisol.")
    handle, last = handle_in(heard), heard[-1]["event_id"]
    async with recorded_wire(url, heard, "?resumable=true&resume=true") as wire:
        back = {"type": "session.resume", "handle": handle, "last_event": last}
        await wire.ask_for(back, "session.resumed")
        await wire.turn("What is my name?")


def handle_in(heard: list[Json]) -> str:
    """The newest handle that was told."""
    found = [event.get("handle") or event.get("response", {}).get("handle") for event in heard]
    return next(handle for handle in reversed(found) if handle)


async def grammar(url: str, heard: list[Json]) -> None:
    """A schema, a choice, a regex, a lark grammar, and a grammar that is none."""
    async with recorded_wire(url, heard) as wire:
        form = {"type": "json_schema", "name": "trip", "schema": TRIP}
        await wire.turn("I want to see Rome.", text={"format": form})
        await wire.turn("Will it rain?", grammar={"type": "choice", "choices": ["yes", "no"]})
        await wire.turn("When?", grammar={"type": "regex", "pattern": "[0-9]{2}:[0-9]{2}"})
        await wire.turn("Hi", grammar={"type": "lark", "definition": 'start: "hello" | "goodbye"'})
        await wire.turn("Hi", grammar={"type": "regex", "pattern": "("})
        await wire.turn("My name is Marisol.")


async def lease(url: str, heard: list[Json]) -> None:
    """A lease, KV down and up, a hint of return."""
    async with recorded_wire(url, heard) as wire:
        await wire.turn("My name is Marisol.")
        await wire.ask_for({"type": "session.lease", "priority": 1, "ttl": 60.0}, "session.leased")
        await wire.ask_for({"type": "session.settle", "tier": "host"}, "session.settled")
        await wire.ask_for({"type": "session.stage"}, "session.staged")
        await wire.ask_for({"type": "session.lease", "ttl": 0.0, "returns_in": 5.0}, "session.leased")
        await wire.turn("What is my name?")


async def errors(url: str, heard: list[Json]) -> None:
    """What is refused leaves the session as it was."""
    async with recorded_wire(url, heard) as wire:
        await wire.turn("My name is Marisol.")
        for frame in (
            "}{",
            {"type": "no.such.event"},
            {"type": "response.cancel"},
            {"type": "response.create", "response": {"temperature": -1}},
            {"type": "response.create", "no_such_field": 1},
            {"type": "conversation.item.retrieve", "item_id": "item_none"},
            {"type": "conversation.item.create", "previous_item_id": "item_none", "item": message("Hi")},
            {"type": "conversation.item.truncate", "item_id": "item_none", "content_index": 0, "text_end": 1},
            {"type": "session.rewind", "to": "item_none"},
            {"type": "session.resume", "handle": "h" * 40},
            {"type": "input_text_buffer.commit"},
        ):
            await wire.send(frame)
            await wire.until("error")
        await wire.turn(conversation="none", input=[message("word " * 4000)])
        await wire.turn("What is my name?")


Script = Callable[[str, list[Json]], Awaitable[None]]
SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        text,
        tools,
        fork,
        rewind,
        interrupt,
        streamed_input,
        resume,
        grammar,
        lease,
        errors,
    )
}


# --- what is compared ---------------------------------------------------------------------------------------


def outline(heard: list[Json]) -> Json:
    """The events of one script as they are compared: see the module."""
    responses: dict[str, list[Json]] = {}
    others: list[str] = []
    for event in heard:
        response = event.get("response_id") or event.get("response", {}).get("id")
        if response is not None and event["type"].startswith("response."):
            responses.setdefault(response, []).append(event)
        else:
            code = event["error"].get("code") if event["type"] == "error" else None
            others.append(event["type"] if code is None else f"error {code}")
    return {"events": others, "responses": [_response(events) for events in responses.values()]}


def _response(events: list[Json]) -> Json:
    kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
    done = events[-1]["response"]
    if done.get("metadata") == VARIES:
        return {"events": kinds, "status": done["status"]}
    said = {
        name: "".join(event["delta"] for event in events if event["type"] == kind)
        for kind, name in TEXTS.items()
    }
    details = done.get("status_details") or {}
    usage = {
        name: (done.get("usage") or {}).get(name)
        for name in ("input_tokens", "output_tokens", "total_tokens")
    }
    error = (details.get("error") or {}).get("code")
    return {
        "events": kinds,
        "status": done["status"],
        "reason": details.get("reason"),
        "error": error,
        "usage": usage,
        **said,
    }
