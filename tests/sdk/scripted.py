"""A server for the SDK's tests: a transport with an other end that follows a script, in memory, in one task.

It speaks through our own frames: each client event is answered at once by a function of the test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from holdfast.sdk.chat import Chat
from holdfast.sdk.client import Client
from holdfast.sdk.errors import ConnectionLost
from holdfast.sdk.frames import client, codec, items, server
from holdfast.sdk.frames.response import Response, StatusDetails, StatusError
from holdfast.sdk.frames.session import SessionResource

Answer = Callable[["Script", client.ClientEvent], Iterable[server.ServerEvent]]


class Script:
    """The other end. `turns` are lists of texts and calls, one list per response; None leaves it running."""

    def __init__(self, *turns: list[str | tuple[str, str]] | None, answer: Answer | None = None) -> None:
        self.turns = list(turns)
        self.got: list[client.ClientEvent] = []
        self.closed = False
        self.session = SessionResource(id="sess", model="pocket")
        self._answer = answer
        self._numbers = itertools.count(1)
        self.running: list[str] = []
        self._out, self._in = anyio.create_memory_object_stream[bytes](math.inf)
        self.tell(server.SessionCreated(event_id=self.id(), session=self.session))
        conversation = server.ConversationResource(id="conv")
        self.tell(server.ConversationCreated(event_id=self.id(), conversation=conversation))

    # --- the transport ---

    async def send(self, frame: bytes) -> None:
        if self.closed:
            raise ConnectionLost("closed", 1006)
        event = codec.decode_client(frame)
        self.got.append(event)
        for told in (self._answer or Script.usual)(self, event):
            self.tell(told)

    async def receive(self) -> bytes:
        try:
            return await self._in.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise ConnectionLost("The server closed the connection: 1011", 1011) from None

    async def aclose(self) -> None:
        self.closed = True
        self._out.close()
        self._in.close()

    # --- the script ---

    def id(self) -> str:
        return f"event_{next(self._numbers)}"

    def tell(self, event: server.ServerEvent) -> None:
        self.tell_raw(codec.encode(event))

    def tell_raw(self, frame: bytes) -> None:
        self._out.send_nowait(frame)

    def hang_up(self) -> None:
        self._out.close()

    def kinds(self) -> list[str]:
        """The types of the events the client has sent."""
        return [event.type for event in self.got]

    def added(self) -> list[items.AnyItem]:
        """The items that the client has sent."""
        sent = [event for event in self.got if isinstance(event, client.ItemCreate | client.ResponseCreate)]
        return [item for event in sent for item in _items(event)]

    def outputs(self) -> list[str]:
        """Of the tools' outputs that the client has sent, the texts."""
        return [item.output for item in self.added() if isinstance(item, items.FunctionCallOutputItem)]

    def usual(self, event: client.ClientEvent) -> Iterable[server.ServerEvent]:
        match event:
            case client.SessionUpdate(session=patch):
                given = {
                    name: value
                    for name in patch.__struct_fields__
                    if (value := getattr(patch, name)) is not msgspec.UNSET
                }
                self.session = msgspec.structs.replace(self.session, **given)
                yield server.SessionUpdated(event_id=self.id(), session=self.session)
            case client.ItemCreate(item=item):
                shown = msgspec.structs.replace(item, id=item.id or self.id(), status="completed")
                yield server.ItemAdded(event_id=self.id(), item=shown, previous_item_id=None)
                yield server.ItemDone(event_id=self.id(), item=shown, previous_item_id=None)
            case client.ItemRetrieve(item_id=item_id):
                found = items.MessageItem(id=item_id, role="user", content=[])
                yield server.ItemRetrieved(event_id=self.id(), item=found)
            case client.ItemDelete(item_id=item_id):
                yield server.ItemDeleted(event_id=self.id(), item_id=item_id)
            case client.ResponseCreate():
                yield from self.respond()
            case client.ResponseCancel():
                yield from self.cancel(event)
            case client.SessionBlocks():
                yield server.SessionBlocksListed(
                    event_id=self.id(),
                    blocks=server.BlockCounts(device=2, host=0, disk=0, shared=0, none=0, total=2),
                    runs=[server.BlockRun(tier="device", shared=False, count=2)],
                    tokens=20,
                    block_tokens=16,
                )
            case client.SessionLease():
                yield server.SessionLeased(
                    event_id=self.id(),
                    status="granted",
                    priority=0,
                    ttl=1.0,
                    returns_in=1.0,
                    tokens=0,
                    host_tokens=0,
                )

    def respond(self) -> Iterable[server.ServerEvent]:
        response_id = self.id()
        yield server.ResponseCreated(event_id=self.id(), response=response(response_id, "in_progress"))
        turn = self.turns.pop(0)
        if turn is None:
            self.running.append(response_id)
            yield self.delta(response_id, 0, "Once ")
            return
        output: list[items.AnyItem] = []
        for index, part in enumerate(turn):
            if isinstance(part, str):
                yield from (self.delta(response_id, index, word) for word in part.split("|"))
                content = [items.TextPart(type="output_text", text=part.replace("|", ""))]
                output.append(
                    items.MessageItem(id=f"i{index}", status="completed", role="assistant", content=content)
                )
            else:
                call = items.FunctionCallItem(
                    id=f"i{index}", status="completed", name=part[0], call_id=f"c{index}", arguments=part[1]
                )
                output.append(call)
        ended = msgspec.structs.replace(response(response_id, "completed"), output=output)
        yield server.ResponseDone(event_id=self.id(), response=ended)

    def cancel(self, event: client.ResponseCancel) -> Iterable[server.ServerEvent]:
        if not self.running:
            yield self.error("response_cancel_not_active", event.event_id)
            return
        response_id = self.running.pop()
        yield self.delta(response_id, 0, "upon")
        yield server.ResponseDone(
            event_id=self.id(),
            response=msgspec.structs.replace(
                response(response_id, "cancelled"),
                status_details=StatusDetails(type="cancelled", reason="client_cancelled"),
            ),
        )

    def delta(self, response_id: str, index: int, text: str) -> server.TextDelta:
        return server.TextDelta(
            event_id=self.id(),
            response_id=response_id,
            output_index=index,
            item_id=f"i{index}",
            content_index=0,
            delta=text,
        )

    def error(self, code: str, event_id: str | None) -> server.ErrorEvent:
        details = server.ErrorDetails(
            type="invalid_request_error", code=code, message="No", param=None, event_id=event_id
        )
        return server.ErrorEvent(event_id=self.id(), error=details)


@asynccontextmanager
async def chatting(script: Script, **fields: Any) -> AsyncIterator[Chat]:
    """A session with the script as its server."""

    async def dial(model: str | None) -> Script:
        return script

    async with Client(dial).session(**fields) as chat:
        yield chat


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}"


async def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def response(response_id: str, status: Any) -> Response:
    return Response(id=response_id, status=status, conversation_id="conv", max_output_tokens="inf")


def failed(response_id: str) -> Response:
    error = StatusError(type="server_error", code="engine_unavailable", message="The engine died")
    return msgspec.structs.replace(
        response(response_id, "failed"), status_details=StatusDetails(type="failed", error=error)
    )


def _items(event: client.ItemCreate | client.ResponseCreate) -> list[items.AnyItem]:
    return event.items if isinstance(event, client.ResponseCreate) else [event.item]


async def given_up(reading: Callable[[], Awaitable[object]]) -> None:
    """Read, and be cancelled once nothing more comes."""
    async with anyio.create_task_group() as group:
        group.start_soon(reading)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
