"""The OpenAPI document of the HTTP routes. https://spec.openapis.org/oas/v3.1.0"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .rows import RouteRow
from .schemas import parameters_of, schemas_of

PARTS = ("request", "response", "streamed", "refusal")
"""The fields of a row that have a schema each."""


class ErrorBody(msgspec.Struct, kw_only=True, frozen=True):
    """An error. `code` is stable, `message` is for people, `param` names the field at fault."""

    type: str
    code: str
    message: str
    param: str | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """The body of each answer that refuses a request."""

    error: ErrorBody


def openapi(rows: Sequence[RouteRow], version: str) -> dict[str, Any]:
    """The document of these routes. ``version``: of this package."""
    types = [one for row in rows for part in PARTS if (one := getattr(row, part)) is not None]
    schemas, components = schemas_of([*types, ErrorAnswer])
    left = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        parts = {part: next(left) for part in PARTS if getattr(row, part) is not None}
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, parts)
    groups = dict.fromkeys(row.group for row in rows)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": version,
            "description": "The HTTP routes of a Holdfast server. The WebSockets are in `asyncapi.json`.",
        },
        "servers": [{"url": "./"}],
        "tags": [{"name": group} for group in groups],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


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
        body = {"application/json": {"schema": parts["request"]}}
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
    refusal = parts.get("refusal", {"$ref": "#/components/schemas/ErrorAnswer"})
    refused = {"application/json": {"schema": refusal}}
    answers["default"] = {"description": "The request is refused.", "content": refused}
    return answers


def _parameters(row: RouteRow) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in row.path.split("/") if part.startswith("{")]
    found = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    for name, required, schema, text in parameters_of(row.query):
        parameter = {"name": name, "in": "query", "required": required, "schema": schema}
        found.append({**parameter, "description": text} if text else parameter)
    return found


def _identifier(row: RouteRow) -> str:
    words = [part.strip("{}") for part in row.path.split("/") if part]
    return "_".join([row.method.lower(), *words]).replace(".", "_").replace("-", "_")
