"""Sends what `Shapes` draws and `damaged` spoils to every face of a server, and says what went wrong.

A round has its own seed: hypothesis draws bodies and events for it, and each is sent as it is and damaged. What
is wrong is kept as a finding: an answer that is a mistake of the server, an error that has not the face's form,
an event or an answer that does not fit its type, a connection that ends, a neighbour that is disturbed.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from holdfast.gateway.app import ROWS, SOCKETS
from holdfast.gateway.documents.api import asyncapi, openapi
from holdfast.gateway.documents.rows import RouteRow
from holdfast.sdk.errors import FieldInvalid, FrameMalformed
from holdfast.sdk.frames import codec
from holdfast.sdk.frames.exported import JSON_LINES, read_export

from .damage import damaged, encoded
from .shapes import MODEL, Json, Shapes
from .wire import HttpWire, Reply

OPENAPI, ASYNCAPI = openapi(ROWS, "1"), asyncapi(SOCKETS, "1")
PATIENCE = 120.0
"""Seconds in which an answer must come, on a machine with other work, too."""
OPTIONS: Json = {
    "compression": None,
    "proxy": None,
    "max_size": None,
    "ping_interval": None,
    "open_timeout": PATIENCE,
}
LANES = 12
"""Tasks that send at once."""
WEIGHTS = {
    "/v1/chat/completions": 12,
    "/v1/messages": 12,
    "/v1/responses": 10,
    "/v1/completions": 8,
    "/v1/messages/count_tokens": 3,
    "/v1/conversations": 3,
    "/tokenize": 3,
    "/detokenize": 2,
    "v1_realtime": 12,
    "v1_responses": 6,
}
"""How often a route or a WebSocket is drawn in a round; others once."""
MISTAKES = frozenset({"internal_error", "engine_unavailable", "turn_failed", "sequence_poisoned"})
"""Codes of errors that are the server's own."""
COMPILED = frozenset({"invalid_grammar", "grammar_stuck"})
"""Codes of faults of a client's grammar that the engine finds when it compiles or follows it."""
QUERIES = ("", "?limit=1&order=asc", "?limit=101", "?order=up", "?after=item_0", "?stream=true", "?stream=2")
CURSORS = (
    "starting_after=-2",
    "starting_after=99999999999",
    "before_id=x",
    "limit=0",
    "include=%FF",
    "model=x",
)
ENDED = ("response.completed", "response.incomplete", "response.failed")
FAREWELLS = {1002, 1007, 1008, 1009, 4001, 4004}
"""Close codes with which the server may end a socket that sends rubbish."""


def drawn(number: int, count: int, shape: st.SearchStrategy[Any]) -> list[Any]:
    """``count`` values of a strategy, the same for the same number."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(shape)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found


def targets() -> list[tuple[RouteRow | str, st.SearchStrategy[Any]]]:
    """Each route with its bodies, and each WebSocket with runs of events."""
    bodies, events = Shapes(OPENAPI), Shapes(ASYNCAPI)
    found: list[tuple[RouteRow | str, st.SearchStrategy[Any]]] = []
    for row in ROWS:
        asked = OPENAPI["paths"][row.path][row.method.lower()].get("requestBody")
        schema = {"type": "null"} if asked is None else asked["content"][row.request_type]["schema"]
        found.append((row, bodies.of(schema)))
    for name, channel in ASYNCAPI["channels"].items():
        keys = [key for key in channel["messages"] if f"{name}.receive." in key]
        shapes = {key: events.of(ASYNCAPI["components"]["messages"][key]["payload"]) for key in keys}
        likely = [shape for key, shape in shapes.items() if key.endswith("response.create")]
        found.append((name, st.lists(st.one_of(*shapes.values(), *likely * 4), min_size=1, max_size=8)))
    return found


class Fuzzer:
    """One server's rounds. ``forms``: how often each body and each run of events is damaged.

    ``sent``: frames and bodies by their face. ``statuses``, ``codes``: of the answers and errors.
    """

    def __init__(self, port: int, forms: int) -> None:
        self._port = port
        self._forms = forms
        self._targets = targets()
        self._known: dict[str, deque[str]] = {
            name: deque(maxlen=50)
            for name in ("response", "conversation", "item", "handle", "session", "call")
        }
        self.sent = Counter[str]()
        self.statuses = Counter[int]()
        self.codes = Counter[str]()
        self.findings: list[str] = []

    @property
    def total(self) -> int:
        """Frames and bodies so far."""
        return sum(self.sent.values())

    async def round(self, number: int) -> None:
        """Draw cases of every face, and send each of them whole and damaged, while a neighbour talks."""
        works = [
            (target, body, whole)
            for target, shape in self._targets
            for body in drawn(number, WEIGHTS.get(_name(target), 1), shape)
            for whole in (True, *[False] * (1 if body is None else self._forms))
        ]
        random.Random(number).shuffle(works)
        left = iter(works)
        async with self._neighbour(number), asyncio.TaskGroup() as tasks:
            for lane in range(LANES):
                tasks.create_task(self._send(random.Random(number * LANES + lane), left))

    async def _send(self, dice: random.Random, works: Iterator[tuple[Any, Any, bool]]) -> None:
        http = HttpWire(self._port)
        for target, body, whole in works:
            try:
                async with asyncio.timeout(PATIENCE):
                    if isinstance(target, str):
                        await self._converse(dice, target, body, whole=whole)
                    else:
                        await self._post(dice, http, target, body, whole=whole)
            except (TimeoutError, OSError, EOFError, ConnectionClosed) as error:
                self._find(_name(target), f"{type(error).__name__} {error}", encoded(body))
                await http.close()
        await http.close()

    def _find(self, where: str, what: str, sent: bytes) -> None:
        self.findings.append(f"{where}: {what[:600]}\n    sent {sent[:1_500]!r}")
        print(self.findings[-1], flush=True)

    def _filled(self, dice: random.Random, data: bytes) -> bytes:
        """The JSON text with ids of the server instead of ``@response`` and such."""
        if b'"@' in data:
            for name, ids in self._known.items():
                if ids and (mark := f'"@{name}"'.encode()) in data:
                    data = data.replace(mark, encoded(dice.choice(ids)))
        return data

    # --- HTTP -----------------------------------------------------------------------------------------------

    async def _post(
        self, dice: random.Random, http: HttpWire, row: RouteRow, body: Any, *, whole: bool
    ) -> None:
        data = b"" if body is None else encoded(body) if whole else damaged(dice, body)
        data = self._filled(dice, data)
        path = row.path
        for part in path.split("/"):
            if part.startswith("{"):
                path = path.replace(part, self._path_id(dice, part.strip("{}").removesuffix("_id")))
        if row.request is None and not whole:
            path += dice.choice(QUERIES) or f"?{dice.choice(CURSORS)}"
        headers = {"anthropic_version": "2023-06-01"} if dice.random() < 0.02 else {}
        leave = dice.randrange(400) if dice.random() < 0.03 else None
        self.sent[row.path] += 1
        reply = await http.ask(row.method, path, data, leave=leave, **headers)
        if reply is not None and (wrong := self._wrong(row, path, reply, anthropic=bool(headers))):
            self._find(f"{row.method} {path}", f"{wrong}: {reply.status} {reply.body[:400]!r}", data)

    def _path_id(self, dice: random.Random, kind: str) -> str:
        ids = self._known.get(kind)
        if kind == "model":
            return dice.choice([MODEL, "x", "a/b", "%00", "%FF"])
        known = [quote(name, safe="") for name in ids or ()]
        return dice.choice(known if known and dice.random() < 0.8 else ["x", "%20", "a" * 300, "%FF"])

    def _wrong(self, row: RouteRow, path: str, reply: Reply, *, anthropic: bool) -> str | None:
        """What is wrong with an answer; None if nothing is."""
        self.statuses[reply.status] += 1
        if row.path in ("/metrics", "/openapi.json", "/asyncapi.json") and reply.status == 200:
            return None
        if row.media_type == JSON_LINES and reply.status == 200:
            read_export(reply.body)
            return None
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            return self._wrong_stream(row.path, reply.body)
        try:
            told = json.loads(reply.body)
        except ValueError:
            return "no JSON"
        if reply.status == 200:
            self._learn(told)
            if row.response is not None and not anthropic:
                form = row.response[0] if isinstance(row.response, tuple) else row.response
                try:
                    msgspec.json.decode(reply.body, type=form)
                except msgspec.ValidationError as error:
                    return f"it does not fit its type: {error}"
            return None
        return self._wrong_error(row.path.startswith("/v1/messages") or anthropic, told)

    def _wrong_error(self, anthropic: bool, told: Any) -> str | None:
        if anthropic:
            if set(told) != {"type", "error", "request_id"} or told["type"] != "error":
                return "it has not the form of Anthropic's errors"
            code = told["error"]["details"]["error_code"]
        else:
            if set(told) != {"error"} or set(told["error"]) != {"type", "code", "message", "param"}:
                return "it has not the form of OpenAI's errors"
            code = told["error"]["code"]
        self.codes[code] += 1
        return "a mistake of the server" if code in MISTAKES else None

    def _wrong_stream(self, path: str, body: bytes) -> str | None:
        events = [part for part in body.decode().split("\n\n") if part]
        last = "event: message_stop" if path == "/v1/messages" else "data: [DONE]"
        for event in events:
            data = event.rpartition("data: ")[2]
            told = None if data == "[DONE]" else json.loads(data)
            if isinstance(told, dict) and told.get("error") is not None:
                anthropic = path == "/v1/messages"
                return self._wrong_error(anthropic, told if anthropic else {"error": told["error"]})
            failed = told["response"]["error"]["type"] if kind_of(told) == "response.failed" else None
            if failed is not None and failed not in COMPILED:
                return f"the response failed: {failed}"
        return None if events and events[-1].startswith(last) else "the stream did not end"

    def _learn(self, told: Any) -> None:
        """Remember the ids in an answer or event, for later cases."""
        if not isinstance(told, dict):
            return
        name = told.get("id")
        kind = {"response": "response", "conversation": "conversation"}.get(told.get("object", ""))
        if kind is not None and isinstance(name, str):
            self._known[kind].append(name)
        for item in [*(told.get("output") or ()), *(told.get("data") or ()), told.get("item")]:
            if isinstance(item, dict) and isinstance(item.get("id"), str):
                self._known["item"].append(item["id"])
                if isinstance(item.get("call_id"), str):
                    self._known["call"].append(item["call_id"])

    # --- WebSockets -----------------------------------------------------------------------------------------

    async def _converse(self, dice: random.Random, name: str, events: list[Any], *, whole: bool) -> None:
        """Send a run of events on a socket of its own, and see that the socket goes on."""
        frames = [
            encoded(event) if whole or dice.random() < 0.5 else damaged(dice, event) for event in events
        ]
        frames = [self._filled(dice, frame) for frame in frames]
        realtime = name == "v1_realtime"
        query = "?resumable=true" if realtime and dice.random() < 0.3 else ""
        address = f"ws://127.0.0.1:{self._port}/{name.replace('_', '/')}{query}"
        self.sent[name] += len(frames)
        talk = self._realtime if realtime else self._lanes
        async with connect(address, **OPTIONS) as socket:
            try:
                for frame in frames:
                    await socket.send(_text(frame))
                if dice.random() < 0.1:
                    return  # it leaves
                wrong = await talk(dice, socket)
            except ConnectionClosed as closed:
                code = None if closed.rcvd is None else closed.rcvd.code
                wrong = None if code in FAREWELLS else f"the socket was closed: {closed}"
            if wrong is not None:
                self._find(name, wrong, b" ".join(frames))

    async def _realtime(self, dice: random.Random, socket: ClientConnection) -> str | None:
        """Read until an event of our own, sent last, is answered. Returns what is wrong."""
        mark = f"end-{dice.random()}"
        await socket.send(
            json.dumps({"type": "conversation.item.retrieve", "item_id": "none", "event_id": mark})
        )
        while True:
            frame = await socket.recv()
            try:
                codec.decode_server(frame)
            except (FieldInvalid, FrameMalformed) as error:
                return f"an event does not fit its type: {error}: {frame[:400]!r}"
            told = json.loads(frame)
            self._learn(told)
            match told["type"]:
                case "session.created":
                    self._known["session"].append(told["session"]["id"])
                    if isinstance(told.get("handle"), str):
                        self._known["handle"].append(told["handle"])
                case "error":
                    if told["error"].get("event_id") == mark:
                        return None
                    self.codes[told["error"]["code"]] += 1
                    if told["error"]["code"] in MISTAKES:
                        return f"a mistake of the server: {told['error']}"
                case "response.done" if told["response"]["status"] == "failed":
                    details = told["response"]["status_details"]
                    if details["error"]["code"] not in COMPILED:
                        return f"a response failed: {details}"

    async def _lanes(self, dice: random.Random, socket: ClientConnection) -> str | None:
        """Read until a response in a lane of our own has ended. Returns what is wrong."""
        mark = f"end-{dice.random()}"
        last = {"type": "response.create", "input": "Hello!", "max_output_tokens": 1, "store": False}
        await socket.send(json.dumps({**last, "stream_id": mark}))
        while True:
            told = json.loads(await socket.recv())
            self._learn(told.get("response"))
            match told["type"]:
                case "error":
                    code = told["error"]["code"]
                    self.codes[code] += 1
                    if set(told) - {"stream_id"} != {"type", "status", "error"}:
                        return f"it has not the form of an error: {told}"
                    if code in MISTAKES:
                        return f"a mistake of the server: {told}"
                    if told.get("stream_id") == mark:
                        return None if code.startswith("websocket_") else f"the socket does not go on: {told}"
                case "response.failed" if told["response"]["error"]["type"] not in COMPILED:
                    return f"a response failed: {told['response']['error']}"
                case kind if kind in ENDED and told.get("stream_id") == mark:
                    return None

    # --- beside it ------------------------------------------------------------------------------------------

    def _neighbour(self, number: int) -> Neighbour:
        address = f"ws://127.0.0.1:{self._port}/v1/realtime"
        return Neighbour(address, lambda what: self._find("neighbour", what, b""))


def _name(target: RouteRow | str) -> str:
    return target if isinstance(target, str) else target.path


def kind_of(told: Any) -> str | None:
    """The type of an event."""
    return told.get("type") if isinstance(told, dict) else None


def _text(frame: bytes) -> str | bytes:
    """A text frame, or a binary one for what is no text."""
    try:
        return frame.decode()
    except UnicodeDecodeError:
        return frame


class Neighbour:
    """A session that begins before a round and is asked after it what it was told."""

    def __init__(self, address: str, find: Callable[[str], None]) -> None:
        self._address = address
        self._find = find

    async def __aenter__(self) -> None:
        self._socket = await connect(self._address, **OPTIONS)
        await self._say("My name is Marisol.")

    async def __aexit__(self, *_: object) -> None:
        told = await self._say("What is my name?")
        if told["status"] != "completed" or "Marisol" not in json.dumps(told["output"]):
            self._find(json.dumps(told))
        await self._socket.close()

    async def _say(self, text: str) -> Json:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        response = {"max_output_tokens": 40}
        await self._socket.send(
            json.dumps({"type": "response.create", "items": [item], "response": response})
        )
        while (told := json.loads(await self._socket.recv()))["type"] != "response.done":
            if told["type"] == "error":
                self._find(json.dumps(told))
        response_told: Json = told["response"]
        return response_told
