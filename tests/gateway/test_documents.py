"""The generated documents: every route and event is in them, and what the server sends is as they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route, WebSocketRoute

from holdfast.gateway.app import ELSEWHERE, ROWS, SOCKETS, PackageVersion, build_app, version
from holdfast.gateway.documents.api import asyncapi, openapi
from holdfast.gateway.documents.rows import RouteRow
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sdk.frames import codec
from holdfast.sdk.frames.client import ClientEvent
from holdfast.sdk.frames.server import OwnFrame, ServerEvent
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted
from holdfast.tests.gateway.test_browsers import app_of, asked
from holdfast.tests.sdk.test_frames import CLIENT_EVENTS, SERVER_EVENTS

pytestmark = pytest.mark.anyio

OPENAPI, ASYNCAPI = openapi(ROWS, "1.2.3"), asyncapi(SOCKETS, "1.2.3")
PAGES = ("/", "/docs", "/page/")


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def at(document: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        document = document[part.replace("~1", "/")]
    return document


def validator(document: Any, schema: Any) -> Draft202012Validator:
    return Draft202012Validator({"components": document["components"], **schema})


@pytest.mark.parametrize("document", [OPENAPI, ASYNCAPI], ids=["openapi", "asyncapi"])
def test_every_reference_leads_somewhere_and_every_schema_is_one(document: Any) -> None:
    found = set(references(document))
    assert found
    for reference in found:
        assert at(document, reference), reference
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
        assert not schema["description"].startswith(" ") and "\n    " not in schema["description"]
    assert json.loads(json.dumps(document)) == document


def test_every_route_has_a_row_and_every_row_a_route() -> None:
    link = Scripted(lambda tokens: WORDS[len(tokens) % len(WORDS)], END)
    app: Any = build_app(Service(GatewaySettings(), "scripted", link))
    while not hasattr(app, "routes"):
        app = getattr(app, "_app", None) or app.app
    served = {
        (method, route.path.replace("{name:path}", "{model}"))
        for route in app.routes
        if isinstance(route, Route) and not (route.path in PAGES or route.path.startswith("/page/"))
        for method in (route.methods or ()) - {"HEAD"}
    }
    sockets = {route.path for route in app.routes if isinstance(route, WebSocketRoute)} - {ELSEWHERE}
    assert {row.path for row in SOCKETS} == sockets
    served -= {("GET", path) for path in sockets}  # it only says that the path is a WebSocket's
    assert {(row.method, row.path) for row in ROWS} == served


PLAIN = [
    row
    for row in ROWS
    if row.response is not None
    and row.request is None
    and "_id}" not in row.path
    and row.group != "Operator"  # these wait for the journal
]
"""Routes that answer without a body and without anything that was made before."""


@pytest.mark.parametrize(
    ("row", "form"),
    [(row, form) for row in PLAIN for form in range(2 if row.headers else 1)],
    ids=lambda one: getattr(one, "path", one),
)
async def test_the_answers_are_as_the_document_says(row: RouteRow, form: int) -> None:
    """``form`` 1: Anthropic's, which a header asks for."""
    headers = {"anthropic_version": "2023-06-01"} if form else {}
    status, _, body = await asked(app_of(), row.method, row.path.replace("{model}", "scripted"), **headers)
    operation = OPENAPI["paths"][row.path][row.method.lower()]
    schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
    validator(OPENAPI, schema).validate(json.loads(body))
    answer = row.response[form] if row.headers else row.response
    assert msgspec.json.decode(body, type=answer)
    if row.headers:
        validator(OPENAPI, schema["anyOf"][form]).validate(json.loads(body))
        assert not validator(OPENAPI, schema["anyOf"][1 - form]).is_valid(json.loads(body))
        assert "anthropic-version" in [one["name"] for one in operation["parameters"]]


@pytest.mark.parametrize(
    ("method", "route", "anthropic"),
    [
        ("get", "/v1/models/{model}", False),
        ("get", "/v1/models/{model}", True),
        ("post", "/v1/chat/completions", False),
        ("post", "/v1/messages", True),
        ("post", "/v1/messages/count_tokens", True),
    ],
)
async def test_a_refusal_is_as_the_document_says(method: str, route: str, anthropic: bool) -> None:
    headers = {"anthropic_version": "2023-06-01"} if anthropic else {}
    path = route.replace("{model}", "another")
    status, _, body = await asked(app_of(), method.upper(), path, **headers)
    refused = OPENAPI["paths"][route][method]["responses"]["default"]["content"]["application/json"]["schema"]
    validator(OPENAPI, refused).validate(json.loads(body))
    form = refused["anyOf"][anthropic] if "anyOf" in refused else refused
    name = "MessagesError" if anthropic else "ErrorAnswer"
    assert form == {"$ref": f"#/components/schemas/{name}"} and status >= 400


def test_each_event_of_a_messages_stream_is_in_the_document() -> None:
    streamed = OPENAPI["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    names = set(streamed["schema"]["discriminator"]["mapping"])
    assert {"message_start", "content_block_delta", "message_stop", "ping", "error"} <= names


async def test_routes_that_need_a_key_say_so() -> None:
    app = app_of(api_key="s3cret")
    for row in ROWS:
        operation = OPENAPI["paths"][row.path][row.method.lower()]
        status = (await asked(app, row.method, row.path.replace("{model}", "scripted")))[0]
        assert (status == 401) == ("security" in operation) == row.needs_key


def test_bodies_parameters_and_streams_are_in_the_document() -> None:
    class Ask(msgspec.Struct):
        """What is asked."""

        prompt: str

    class Piece(msgspec.Struct, tag_field="type", tag="piece"):
        """A piece of the answer."""

        text: str

    class Paging(msgspec.Struct):
        """Where a page begins."""

        after: str
        limit: int = 20

    row = RouteRow(
        "POST", "/v1/ask/{id}", "Ask.", version, Ask, PackageVersion, Paging, Piece, group="Asking"
    )
    operation = openapi([row], "1")["paths"]["/v1/ask/{id}"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/Ask"}
    content = operation["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/PackageVersion"}
    assert content["text/event-stream"]["schema"] == {"$ref": "#/components/schemas/Piece"}
    parameters = [(one["name"], one["in"], one["required"]) for one in operation["parameters"]]
    assert parameters == [("id", "path", True), ("after", "query", True), ("limit", "query", False)]


@pytest.mark.parametrize(
    ("action", "union", "events"),
    [("receive", ClientEvent, CLIENT_EVENTS), ("send", ServerEvent, SERVER_EVENTS)],
    ids=["client", "server"],
)
def test_every_event_is_in_the_document_and_fits_its_schema(action: str, union: Any, events: Any) -> None:
    operation = ASYNCAPI["operations"][f"v1_realtime_{action}"]
    messages = [at(ASYNCAPI, at(ASYNCAPI, one["$ref"])["$ref"]) for one in operation["messages"]]
    named = {message["name"]: message for message in messages}
    assert set(named) == {str(kind.__struct_config__.tag) for kind in get_args(union)}
    for event in events:
        message = named[event.type]
        validator(ASYNCAPI, message["payload"]).validate(json.loads(codec.encode(event)))
        assert (message.get("tags") == [{"name": "ours"}]) == isinstance(event, OwnFrame)


def test_an_event_of_another_type_does_not_fit() -> None:
    message = at(ASYNCAPI, "#/components/messages/v1_realtime.receive.session.fork")
    assert not validator(ASYNCAPI, message["payload"]).is_valid({"type": "session.tree"})
    assert not validator(ASYNCAPI, message["payload"]).is_valid({"type": "session.fork", "children": 0})


def test_the_parameters_of_the_socket_are_told() -> None:
    query = ASYNCAPI["channels"]["v1_realtime"]["bindings"]["ws"]["query"]
    assert set(query["properties"]) == {"model", "resumable", "resume"} and query["required"] == []
    assert all(one["description"] for one in query["properties"].values())
