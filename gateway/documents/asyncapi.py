"""The AsyncAPI document of the WebSockets. https://www.asyncapi.com/docs/reference/specification/v3.0.0"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows import SocketRow
from .schemas import members_of, parameters_of, schemas_of, summary_of, tag_of


def asyncapi(rows: Sequence[SocketRow], version: str) -> dict[str, Any]:
    """Make the AsyncAPI document of the WebSockets in ``rows``, as JSON values. ``version``: of this
    package."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    unions = [union for row in rows for union in (row.receives, row.sends)]
    schemas, components = schemas_of(one for union in unions for one in members_of(union))
    for row in rows:
        name = row.path.strip("/").replace("/", "_")
        channel = channels[name] = {
            "address": row.path,
            "title": row.summary,
            "description": row.description,
            "messages": {},
            "bindings": {"ws": {"method": "GET", "query": _query(row)}},
        }
        for action, union in (("receive", row.receives), ("send", row.sends)):
            named = []
            for event in members_of(union):
                key = f"{name}.{action}.{tag_of(event)}"
                messages[key] = {
                    "name": tag_of(event),
                    "summary": summary_of(event),
                    "contentType": "application/json",
                    "payload": schemas[event],
                }
                if row.own is not None and issubclass(event, row.own):
                    messages[key]["tags"] = [{"name": "ours"}]
                channel["messages"][key] = {"$ref": f"#/components/messages/{key}"}
                named.append({"$ref": f"#/channels/{name}/messages/{key}"})
            operations[f"{name}_{action}"] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{name}"},
                "messages": named,
            }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Holdfast",
            "version": version,
            "description": "The WebSockets of a Holdfast server: what it receives and sends.",
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": components},
    }


def _query(row: SocketRow) -> dict[str, Any]:
    """The parameters of a WebSocket's URL as one JSON Schema of an object, which is the form of AsyncAPI's
    WebSocket binding."""
    parameters = parameters_of(row.query)
    return {
        "type": "object",
        "properties": {
            name: {**schema, "description": text} if text else schema for name, _, schema, text in parameters
        },
        "required": [name for name, required, _, _ in parameters if required],
    }
