"""Bad input, on every face: refused with the face's own error object and status, before any work.

The fields are those of the generated documents, so a field or a face that is added is tested as well.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from holdfast.gateway.access.auth import LOAD_ADAPTER, UNLOAD_ADAPTER, ClientIdentity
from holdfast.gateway.app import ROWS, SOCKETS, build_app
from holdfast.gateway.documents.api import asyncapi, openapi
from holdfast.gateway.net.channel import memory_pair
from holdfast.gateway.net.rates import Rate
from holdfast.gateway.responses.face import ResponsesFace
from holdfast.gateway.responses.socket import ResponsesSocket
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.tests.gateway.messages.messages_stage import Stage, stage
from holdfast.tests.gateway.schema_fields import Json, SchemaFields
from holdfast.tests.gateway.scripted_service import spoken

pytestmark = pytest.mark.anyio

OPENAPI, ASYNCAPI = openapi(ROWS, "1"), asyncapi(SOCKETS, "1")
USER = {"role": "user", "content": "Hello!"}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hello!"},
    "/tokenize": {"prompt": "Hello!"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages": {"model": "scripted", "max_tokens": 3, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": [USER]},
    "/v1/responses": {"input": "Hello!"},
    "/v1/responses/compact": {"model": "scripted", "input": "Hello!"},
    "/v1/responses/input_tokens": {"input": "Hello!"},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": [ITEM]},
}
"""A good body for each route that reads one."""
MESSAGES = [key for key in ASYNCAPI["components"]["messages"] if ".receive." in key]
"""The client events of both sockets."""
WITHOUT = {"input[0].type", "items[0].type"}
"""Fields for which null counts as none given."""
SMALL = ClientLimits(body_bytes=1 << 16, frame_bytes=1 << 16, invalid_events=Rate(1e9, 10**9))
INVALID = "invalid_request_error"


@dataclass(frozen=True)
class Refusal:
    """An error object. ``kind``: its type."""

    status: int
    kind: str
    code: str
    param: str | None
    message: str


class PostedBody:
    """One route, with the schema of its bodies and one that is good."""

    def __init__(self, path: str) -> None:
        self.path = path
        asked = OPENAPI["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        self.fields = SchemaFields(OPENAPI)
        self.schema, self.good = asked, BODIES[path]

    @asynccontextmanager
    async def sender(self, on: Stage) -> AsyncIterator[PostedBody]:
        made = await on.http.post("/v1/conversations", json={})
        self._url = self.path.replace("{conversation_id}", made.json()["id"])
        self._http = on.http
        yield self

    async def send(self, data: bytes) -> Refusal | None:
        """Post a body; None if it is served."""
        answer = await self._http.post(self._url, content=data)
        if answer.status_code == 200:
            return None
        told = answer.json()
        if not self.path.startswith("/v1/messages"):
            assert set(told) == {"error"} and set(told["error"]) == {"type", "code", "message", "param"}
            error = told["error"]
            return Refusal(answer.status_code, error["type"], error["code"], error["param"], error["message"])
        assert set(told) == {"type", "error", "request_id"} and told["type"] == "error"
        assert set(told["error"]) == {"type", "message", "details"} and told["request_id"]
        error, details = told["error"], told["error"]["details"]
        return Refusal(
            answer.status_code, error["type"], details["error_code"], details.get("param"), error["message"]
        )


class SentEvent:
    """One client event of a socket, with its schema and one that is good."""

    def __init__(self, key: str) -> None:
        self.socket, _, kind = key.split(".", 2)
        self.schema = ASYNCAPI["components"]["messages"][key]["payload"]
        self.fields = SchemaFields(ASYNCAPI)
        self.good = {**self.fields.least(self.schema), "type": kind}
        if key == "v1_responses.receive.response.create":
            self.good["input"] = "Hello!"

    @asynccontextmanager
    async def sender(self, on: Stage) -> AsyncIterator[SentEvent]:
        ours, self._channel = memory_pair(4096)
        if self.socket == "v1_realtime":
            serving = on.service.converse(ours)
        else:
            socket = ResponsesSocket(ours, ResponsesFace(on.service), ClientIdentity())
            serving = on.service.serve(socket, ours)
        task = asyncio.create_task(serving)
        try:
            yield self
        finally:
            await self._channel.close(1000, "")
            await task
            await ours.close(1000, "")

    async def send(self, data: bytes) -> Refusal | None:
        """Send a frame; None if no error answers it before an event that is sent next."""
        await self._channel.send(data)
        if self.socket == "v1_realtime":
            last: Json = {"type": "conversation.item.retrieve", "item_id": "none", "event_id": "end"}
        else:
            last = {"type": "response.cancel", "response_id": "none", "stream_id": "end"}
        await self._channel.send(json.dumps(last).encode())
        found: Refusal | None = None
        while True:
            told = json.loads(await self._channel.receive())
            if told["type"] != "error":
                continue
            error = told["error"]
            if "end" in (error.get("event_id"), told.get("stream_id")):
                return found
            names = {"type", "code", "message", "param"}
            if self.socket == "v1_realtime":
                assert names <= set(error) <= names | {"event_id"}, told
            else:
                assert set(told) - {"stream_id"} == {"type", "status", "error"} and set(error) == names, told
            found = found or Refusal(
                told.get("status", 400), error["type"], error["code"], error["param"], error["message"]
            )


Way = PostedBody | SentEvent
WAYS = [*map(PostedBody, BODIES), *map(SentEvent, MESSAGES)]
ways = pytest.mark.parametrize("way", WAYS, ids=[*BODIES, *MESSAGES])


@asynccontextmanager
async def served(way: Way) -> AsyncIterator[tuple[Way, Stage]]:
    """A service for this way in."""
    async with stage(settings=GatewaySettings(limits=SMALL, default_max_tokens=3)) as on:
        on.link.model = spoken
        async with way.sender(on) as sender:
            yield sender, on


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_every_route_that_reads_a_body_is_tried() -> None:
    """But for exported sessions, which are no JSON object (tests/gateway/operator), and for adapters, which an
    engine without room for them refuses whatever they are (tests/end_to_end/test_adapters.py)."""
    read = [row for row in ROWS if row.request is not None and row.request_type == "application/json"]
    assert {*BODIES, LOAD_ADAPTER, UNLOAD_ADAPTER} == {row.path for row in read}


@ways
async def test_values_at_their_bounds_and_beyond(way: Way) -> None:
    async with served(way) as (sender, on):
        found = [(field, *pair) for field in way.fields.of(way.schema, way.good) for pair in field.bounds]
        for field, _, bad in found:
            told = await sender.send(encoded(field.holding(bad)))
            assert told is not None and (told.status, told.kind) == (400, INVALID), (field.path, bad, told)
            assert told.code in ("invalid_value", "unsupported_field"), (field.path, bad, told)
            assert told.param == field.path, (bad, told)
        assert on.link.log == [], "nothing was computed"
        for field, good, _ in found:
            told = await sender.send(encoded(field.holding(good)))
            assert told is None or not told.message.startswith("Expected"), (field.path, good, told)


@ways
async def test_values_of_other_types(way: Way) -> None:
    async with served(way) as (sender, on):
        for field in way.fields.of(way.schema, way.good):
            for bad in field.misfits:
                if bad is None and field.path in WITHOUT:
                    continue
                told = await sender.send(encoded(field.holding(bad)))
                assert told is not None and (told.status, told.kind) == (400, INVALID), (
                    field.path,
                    bad,
                    told,
                )
                if field.path == "thread":
                    assert told.code == "thread_unsupported_request"  # the code for which its package waits
                    continue
                assert told.code in ("invalid_type", "invalid_value", "unsupported_field"), (bad, told)
                assert (told.param or "").startswith(field.path), (field.path, bad, told)
        assert on.link.log == [], "nothing was computed"


@ways
async def test_fields_that_no_standard_knows(way: Way) -> None:
    async with served(way) as (sender, on):
        for path, body in way.fields.objects(way.schema, way.good):
            told = await sender.send(encoded(body))
            assert told is not None, path
            assert (told.status, told.kind, told.code) == (400, INVALID, "unknown_parameter"), (path, told)
            assert told.param == path, told
        assert on.link.log == [], "nothing was computed"


NO_JSON = {"invalid_json", "missing_required_parameter", "invalid_value"}
"""Codes for what begins as JSON: what is wrong before the fault may be named first."""
RUBBISH: dict[str, tuple[bytes, set[str]]] = {
    "nothing": (b"", NO_JSON),
    "half": (b"{", {"invalid_json"}),
    "a list": (b"[]", {"invalid_type"}),
    "null": (b"null", {"invalid_type"}),
    "a text": (b'"x"', {"invalid_type"}),
    "bytes": (b"\xff\xfe\x00", {"invalid_json"}),
    "not UTF-8": (b'{"model": "\xff"}', NO_JSON),
    "half a pair": (b'{"model": "\\ud800"}', NO_JSON),
    "not a number": (b'{"model": NaN}', NO_JSON),
    "two": (b"{}{}", NO_JSON),
    "deep lists": (b"[" * 30_000, {"invalid_json", "invalid_type"}),
    "deep objects": (b'{"model":' * 7_000, NO_JSON | {"invalid_type"}),
    "giant": (b'{"model": "' + b"x" * (1 << 16) + b'"}', {"frame_too_large"}),
}
SOCKET_WAYS = {way.socket: way for way in WAYS if isinstance(way, SentEvent)}


@pytest.mark.parametrize("way", [*WAYS[: len(BODIES)], *SOCKET_WAYS.values()], ids=[*BODIES, *SOCKET_WAYS])
async def test_what_is_no_body(way: Way) -> None:
    async with served(way) as (sender, on):
        for name, (data, codes) in RUBBISH.items():
            told = await sender.send(data)
            if data == b"" and isinstance(way, PostedBody) and way.path == "/v1/conversations":
                assert told is None, "a conversation needs no body"
                continue
            assert told is not None and told.kind == INVALID and told.code in codes, (name, told)
            assert told.status == 413 if name == "giant" and isinstance(way, PostedBody) else 400
            assert len(told.message) < 400
        assert on.link.log == [], "nothing was computed"
        assert isinstance(way, SentEvent) or await sender.send(encoded(way.good)) is None


MODEL_READERS = [path for path in BODIES if not path.startswith("/v1/conversations")]


@pytest.mark.parametrize("path", MODEL_READERS)
async def test_unknown_models(path: str) -> None:
    async with served(PostedBody(path)) as (sender, on):
        for name in ("gpt-9", "scripted ", "x" * 10_000):
            told = await sender.send(encoded({**sender.good, "model": name}))
            assert told is not None and (told.status, told.code) == (404, "model_not_found"), name[:9]
            assert told.kind == ("not_found_error" if path.startswith("/v1/messages") else INVALID)
            assert len(told.message) < 400 and on.link.log == []


async def test_unknown_keys() -> None:
    keys = ((b"x-other", b"KEY"), *((b"x-api-key", key) for key in (b"", b"\xff", b"KEYS")))
    guarded = [row for row in ROWS if row.needs_key]
    assert guarded
    async with stage(settings=GatewaySettings(api_key="KEY")) as on:
        for row, (name, key) in product(guarded, keys):
            path = re.sub(r"\{\w+\}", "x", row.path)
            answer = await on.http.request(row.method, path, headers=[(name, key)], content=b"{")
            assert answer.status_code == 401, (row.method, path, name, key)
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert error["type"] == "authentication_error"
            assert error.get("code", error.get("details", {}).get("error_code")) == "invalid_api_key"
        assert on.link.log == []


KEPT = [row for row in ROWS if "_id}" in row.path]


async def test_unknown_ids() -> None:
    async with stage() as on:
        for row, name in product(KEPT, ("x", "%FF", "%20", "a" * 5_000, "..%2f..", "%00")):
            path = re.sub(r"\{\w+\}", name, row.path)
            answer = await on.http.request(row.method, path, json=BODIES.get(row.path, {}))
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (404, INVALID), (row.method, path[:99])
            known = ("response_not_found", "conversation_not_found", "session_not_found", "not_found")
            assert error["code"] in known
            assert len(error["message"]) < 1_500 and on.link.log == []


async def test_unknown_routes() -> None:
    paths = ("/v1/chat", "/v1/responses/a/b/c", "/v2/models", "/%FF", "/v1/images", "/" + "a" * 9_000)
    async with stage() as on:
        for path, method in product(paths, ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")):
            answer = await on.http.request(method, path, content=b"{")
            error = answer.json()["error"]
            found = answer.status_code, error["type"], error["code"]
            assert found == (404, INVALID, "not_found"), (method, path[:20])
            assert len(error["message"]) < 1_500
            told = await on.http.request(method, path, headers={"anthropic-version": "2023-06-01"})
            assert told.status_code == 404 and told.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("path", "key", "status", "code"),
    [
        ("/v1/realtime?model=gpt-9", "KEY", 404, "model_not_found"),
        ("/v1/realtime", "other", 401, "invalid_api_key"),
        ("/v1/responses", "other", 401, "invalid_api_key"),
        ("/v1/chat/completions", "KEY", 404, "not_found"),
        ("/" + "a" * 9_000, "KEY", 404, "not_found"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_handshakes(path: str, key: str, status: int, code: str) -> None:
    """What begins a WebSocket is refused by an HTTP answer."""
    path, _, query = path.partition("?")
    scope = {
        "type": "websocket",
        "path": path,
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {key}".encode())],
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }
    sent: list[Json] = []

    async def receive() -> Json:
        return {"type": "websocket.connect"}

    async def send(message: Json) -> None:
        sent.append(message)

    async with stage(settings=GatewaySettings(api_key="KEY")) as on:
        await build_app(on.service)(scope, receive, send)
    assert sent[0]["type"] == "websocket.http.response.start" and sent[0]["status"] == status
    error = json.loads(sent[1]["body"])["error"]
    assert set(error) == {"type", "code", "message", "param"} and error["code"] == code
    assert len(error["message"]) < 400


async def test_other_methods() -> None:
    async with stage() as on:
        for path in BODIES:
            answer = await on.http.request("PUT", path.replace("{conversation_id}", "x"), content=b"{")
            error = answer.json()["error"]
            assert answer.status_code == 405 and "POST" in answer.headers["allow"], path
            assert error["type"] == INVALID
            assert error.get("code", error.get("details", {}).get("error_code")) == "method_not_allowed"


async def test_parameters_of_urls() -> None:
    """Each parameter of a route that reads what is kept, at its bounds and beyond."""
    async with stage() as on:
        on.link.model = spoken
        one = (await on.http.post("/v1/responses", json={"input": "Hello!"})).json()["id"]
        kept = (await on.http.post("/v1/conversations", json={"items": [ITEM]})).json()["id"]
        session = (await on.http.get("/operator/sessions")).json()["data"][0]["id"]
        tried = set()
        for path, operations in OPENAPI["paths"].items():
            url = path.replace("{response_id}", one).replace("{conversation_id}", kept)
            url = url.replace("{session_id}", session)
            for parameter in operations.get("get", {}).get("parameters", ()):
                if parameter["in"] != "query" or path == "/v1/models":  # these are Anthropic's clients' alone
                    continue
                if parameter["name"] == "tenant":  # any text is a name
                    continue
                name, schema = parameter["name"], parameter["schema"]
                tried.add(name)
                good, bad = [*schema.get("enum", ())], ["odd", "", "1.5", "1" * 30, "\0"]
                if "minimum" in schema:
                    good += [schema["minimum"], schema["maximum"]]
                    bad += [schema["minimum"] - 1, schema["maximum"] + 1]
                for value in good:
                    answer = await on.http.get(url, params={name: value})
                    assert answer.status_code == 200, (url, name, value)
                for value in bad:
                    answer = await on.http.get(url, params={name: value})
                    assert answer.status_code == 400, (url, name, value)
                    error = answer.json()["error"]
                    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", name)
        assert tried == {"limit", "order", "after", "stream", "starting_after", "items"}
