"""Run by `.venv-clients`: what the `openai` package says of the Realtime protocol and of Responses.

`parse` validates each line of standard input, a server event, against its types, and prints their names.
`responses` does that with events of a response's stream, and with the items in them. `fields` prints the fields
of its client events, as paths with `[]` for lists, and its event types.
"""

from __future__ import annotations

import io
import json
import sys
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from openai.types.realtime import RealtimeClientEvent, RealtimeServerEvent
from openai.types.responses import ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter


def parse(kind: Any = RealtimeServerEvent) -> list[str]:
    """The class each event is parsed as. Raises when one does not fit its type."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    names = []
    for line in sys.stdin:
        event = json.loads(line)
        parsed = adapter.validate_python(event)
        assert parsed.type == event["type"], (parsed, event)
        names.append(type(parsed).__name__)
    return names


def responses() -> list[str]:
    """The same for events of a response's stream; each item in them is parsed as one of a list, too."""
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseItem)
    lines = sys.stdin.read().splitlines()
    for event in map(json.loads, lines):
        for item in event.get("response", {}).get("output", [event["item"]] if "item" in event else []):
            adapter.validate_python(item)
    sys.stdin = io.StringIO("\n".join(lines))
    return parse(ResponseStreamEvent)


def fields() -> dict[str, Any]:
    """`fields`: path -> literal values it may take; `events`: the client event types; `told`: the server's."""
    found: dict[str, set[str]] = {}
    events = []
    for model in members(RealtimeClientEvent):
        events.append(literals(model.model_fields["type"].annotation)[0])
        for name in ("session", "item", "response"):
            if name in model.model_fields:
                walk(model.model_fields[name].annotation, name, found)
    told = [
        literals(model.model_fields["type"].annotation)[0]
        for model in members(RealtimeServerEvent)
        if "type" in model.model_fields
    ]
    shown = {path: sorted(values) for path, values in found.items()}
    return {"events": events, "told": told, "fields": shown}


def walk(annotation: Any, path: str, found: dict[str, set[str]]) -> None:
    """Note the literals `annotation` allows at `path`, and what lies below it."""
    found.setdefault(path, set()).update(literals(annotation))
    for member in members(annotation):
        if get_origin(member) is list:
            walk(get_args(member)[0], f"{path}[]", found)
        elif isinstance(member, type) and issubclass(member, BaseModel):
            told = ["type"] if "Mcp" in member.__name__ else member.model_fields  # refused as a whole
            for name in told:
                field = member.model_fields[name]
                walk(field.annotation, f"{path}.{name}", found)


def literals(annotation: Any) -> list[str]:
    return [
        value for member in members(annotation) if get_origin(member) is Literal for value in get_args(member)
    ]


def members(annotation: Any) -> list[Any]:
    """The members of a union, however it is wrapped."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    return [annotation]


if __name__ == "__main__":
    print(json.dumps({"parse": parse, "responses": responses, "fields": fields}[sys.argv[1]]()))
