"""A real server's events against the grammar: over a real socket, with cancels and replies side by side.

What the client believes of the conversation at the end, from the events alone, is what the server answers
when asked item by item.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from holdfast.gateway.net.outbox import Outbox
from holdfast.gateway.settings import GatewaySettings
from holdfast.sdk.connection.transport import Transport, dial
from holdfast.sdk.frames import codec, server
from holdfast.sdk.frames.client import (
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
)
from holdfast.sdk.frames.formats import FunctionTool
from holdfast.sdk.frames.items import AnyItem, ItemReference, MessageItem
from holdfast.sdk.frames.response import ResponseParams
from holdfast.sdk.frames.session import SessionPatch
from holdfast.tests.threaded import POCKET, serving

from .realtime_grammar import Grammar

pytestmark = pytest.mark.anyio
WEATHER = FunctionTool(
    name="get_weather",
    description="Get the weather in a city.",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


@pytest.fixture
async def socket() -> AsyncIterator[Transport]:
    async with serving(GatewaySettings(port=0), POCKET) as running:
        transport = await dial(running.url, "pocket")
        yield transport
        await transport.aclose()


LONG = ResponseParams(min_output_tokens=300)
"""Of a reply that must still run when something happens to it, although this process is late."""


class Strict:
    """A client that reads every event through the grammar."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.grammar = Grammar()

    async def sends(self, *events: ClientEvent) -> None:
        for event in events:
            await self.transport.send(codec.encode(event))

    async def until(self, wanted: Callable[[server.ServerEvent], bool]) -> server.ServerEvent:
        while True:
            event = codec.decode_server(await self.transport.receive())
            assert event is not None
            self.grammar.feed(event)
            if wanted(event):
                return event

    async def ends(self, count: int = 1) -> list[str]:
        """How the next responses ended."""
        told = []
        for _ in range(count):
            event = await self.until(lambda event: isinstance(event, server.ResponseDone))
            assert isinstance(event, server.ResponseDone)
            told.append(event.response.status)
        return told


def said(text: str, item_id: str | None = None) -> ItemCreate:
    message = MessageItem.of("user", text)
    return ItemCreate(item=MessageItem(id=item_id, role="user", content=message.content))


def is_delta(event: server.ServerEvent) -> bool:
    return isinstance(event, server.TextDelta)


async def test_the_order_holds_on_a_real_server(socket: Transport) -> None:
    strict = Strict(socket)
    await strict.sends(SessionUpdate(session=SessionPatch(tools=[WEATHER])))
    await strict.sends(said("Hello!", "hello"), ResponseCreate())
    assert await strict.ends() == ["completed"]

    await strict.sends(said("What is the weather in Rome?"), ResponseCreate())
    assert await strict.ends() == ["completed"]

    # cut in the middle, with a message typed meanwhile
    await strict.sends(said("Tell me the story of the lighthouse."), ResponseCreate(response=LONG))
    await strict.until(is_delta)
    await strict.sends(said("Enough.", "enough"), ResponseCancel())
    assert await strict.ends() == ["cancelled"]

    # cut, and the next turn in the same breath
    await strict.sends(said("Tell me the story of the fox."), ResponseCreate(response=LONG))
    await strict.until(is_delta)
    await strict.sends(ResponseCancel(), said("Hello!"), ResponseCreate())
    assert await strict.ends(2) == ["cancelled", "completed"]

    # one that writes, two beside it, and one too many
    aside = ResponseParams(conversation="none", input=[ItemReference(id="hello")])
    asides = [ResponseCreate(response=aside)] * 2
    await strict.sends(ResponseCreate(response=LONG), *asides, ResponseCreate(event_id="second"))
    assert {*await strict.ends(3)} <= {"completed", "incomplete"}, "a long reply may go round"

    # what is cut before it begins
    await strict.sends(said("Hello!"), ResponseCreate(response=LONG), ResponseCancel())
    assert await strict.ends() == ["cancelled"]
    await strict.sends(ItemDelete(item_id="hello"), ItemDelete(item_id="hello"), ResponseCancel())
    await strict.sends(said("Hello!"), ResponseCreate(response=ResponseParams(max_output_tokens=2)))
    assert await strict.ends() == ["incomplete"]

    codes = [error.code for error in strict.grammar.errors]
    assert codes == [
        "conversation_already_has_active_response",
        "item_not_found",
        "response_cancel_not_active",
    ]
    strict.grammar.at_rest()
    assert [await retrieved(strict, item) for item in strict.grammar.items] == strict.grammar.items


async def retrieved(strict: Strict, item: AnyItem) -> AnyItem:
    await strict.sends(ItemRetrieve(item_id=item.id or ""))
    event = await strict.until(lambda event: isinstance(event, server.ItemRetrieved))
    assert isinstance(event, server.ItemRetrieved)
    return event.item


async def test_only_in_brief_a_beginning_may_leave_with_what_follows(
    socket: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[tuple[bool, bool]] = []  # whether it is a beginning, and patient
    post = Outbox.post

    def seen(outbox: Outbox, frames: Iterable[bytes], *, patient: bool = False) -> None:
        frames = list(frames)
        posted.extend((b'"response.created"' in frame, patient) for frame in frames)
        post(outbox, frames, patient=patient)

    monkeypatch.setattr(Outbox, "post", seen)
    client = Strict(socket)
    await client.sends(ItemCreate(item=MessageItem.of("user", "Hello.")), ResponseCreate())
    assert await client.ends() == ["completed"]
    assert (True, False) in posted and not any(patient for _, patient in posted)
    posted.clear()
    await client.sends(ResponseCreate(response=ResponseParams(events="brief", conversation="none")))
    while not isinstance(codec.decode_server(await socket.receive()), server.ResponseDone):
        pass
    assert (True, True) in posted and not any(patient for begins, patient in posted if not begins)
