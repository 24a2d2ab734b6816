"""The documents of the API: that of the HTTP routes, https://spec.openapis.org/oas/v3.1.0, and that of the
WebSockets, https://www.asyncapi.com/docs/reference/specification/v3.0.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows import RouteRow, SocketRow
from .schemas import members_of, parameters_of, schemas_of, summary_of, tag_of

PARTS = ("request", "response", "streamed", "refused")
"""The fields of a `RouteRow` that hold types of bodies."""


def openapi(rows: Sequence[RouteRow], version: str) -> dict[str, Any]:
    """Make the OpenAPI document of the routes in ``rows``, as JSON values. ``version``: of this package."""
    parts = [getattr(row, part) for row in rows for part in PARTS]
    schemas, components = schemas_of(one for types in parts for one in _forms(types))
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        bodies: dict[str, Any] = {}
        for part in PARTS:
            if found := [schemas[one] for one in _forms(getattr(row, part))]:
                bodies[part] = found[0] if len(found) == 1 else {"anyOf": found}
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, bodies)
    groups = dict.fromkeys(row.group for row in rows)
    return {
        "openapi": "3.1.0",
        "info": _info(
            version, "The HTTP routes of a Holdfast server. The WebSockets are in `asyncapi.json`."
        ),
        "servers": [{"url": "./"}],
        "tags": [{"name": group} for group in groups],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _info(version: str, text: str) -> dict[str, str]:
    return {"title": "Holdfast", "version": version, "description": text}


def _forms(types: Any) -> tuple[Any, ...]:
    """The types in one field of a row, as a tuple: it may hold none, one or several."""
    return types if isinstance(types, tuple) else () if types is None else (types,)


def _operation(row: RouteRow, parts: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": row.summary,
        "operationId": _identifier(row),
        "tags": [row.group],
        "responses": _responses(row, parts),
    }
    if parameters := _parameters(row):
        operation["parameters"] = parameters
    if "request" in parts:
        body = {row.request_type: {"schema": parts["request"]}}
        operation["requestBody"] = {"required": True, "content": body}
    if row.needs_key:
        operation["security"] = [{"key": []}, {}]  # a server without keys asks for none
    return operation


def _responses(row: RouteRow, parts: dict[str, Any]) -> dict[str, Any]:
    content = {row.media_type: {"schema": parts.get("response", {"type": "string"})}}
    if "streamed" in parts:
        content["text/event-stream"] = {"schema": parts["streamed"]}
    answers: dict[str, Any] = {"200": {"description": row.summary, "content": content}}
    for status, meaning in row.also.items():
        answers[str(status)] = {"description": meaning, "content": content}
    refused = {"application/json": {"schema": parts["refused"]}}
    answers["default"] = {"description": "The request is refused.", "content": refused}
    return answers


def _parameters(row: RouteRow) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in row.path.split("/") if part.startswith("{")]
    found = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    for name, required, schema, text in parameters_of(row.query):
        parameter = {"name": name, "in": "query", "required": required, "schema": schema}
        found.append({**parameter, "description": text} if text else parameter)
    for name, text in row.headers.items():
        parameter = {"name": name, "in": "header", "required": False, "schema": {"type": "string"}}
        found.append({**parameter, "description": text})
    return found


def _identifier(row: RouteRow) -> str:
    words = [part.strip("{}") for part in row.path.split("/") if part]
    return "_".join([row.method.lower(), *words]).replace(".", "_").replace("-", "_")


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
        "info": _info(version, "The WebSockets of a Holdfast server: what it receives and sends."),
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": components},
    }


def _query(row: SocketRow) -> dict[str, Any]:
    """The parameters of a WebSocket's URL as one JSON Schema of an object, which is the form of AsyncAPI's
    WebSocket binding."""
    parameters = parameters_of(row.query)
    properties = {
        name: {**schema, "description": text} if text else schema for name, _, schema, text in parameters
    }
    required = [name for name, needed, _, _ in parameters if needed]
    return {"type": "object", "properties": properties, "required": required}
