"""A turn that is refused leaves all as it was: what runs goes on, no item stays, no reply is counted."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sdk import Chat, Client, ServerError
from holdfast.sdk.frames import codec
from holdfast.sdk.frames.client import ResponseCreate, ResponseSteer
from holdfast.sdk.frames.items import AnyItem, FunctionCallOutputItem, MessageItem
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings, SessionSettings, TenantLimits
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio
ONE = SessionSettings(tenants={b"": TenantLimits(turns=1)})


@asynccontextmanager
async def scripted(store: Path, settings: SessionSettings | None = None) -> AsyncIterator[Client]:
    link = Scripted(lambda tokens: WORDS[len(tokens) % len(WORDS)], END, ahead=1)
    service = Service(GatewaySettings(), "scripted", link)
    journal = await Journal.open(store, b"model", JournalSettings(reserve_bytes=0))
    service.open(SessionRegistry(link, Language.of(ours("chatml")), settings, journal), journal)
    try:
        yield in_memory(service)
    finally:
        await service.close()
        await journal.aclose()


def user(text: str, item_id: str) -> MessageItem:
    return msgspec.structs.replace(MessageItem.of("user", text), id=item_id)


async def items(chat: Chat) -> int | None:
    return next(one.items for one in await chat.tree() if one.id == chat.session.id)


async def refusal(chat: Chat, event: ResponseCreate | ResponseSteer) -> str:
    """The code of it; the frame goes past the chat, which would wait for a response to it."""
    event_id = f"by_hand_{secrets.token_hex(4)}"
    frame = codec.encode(msgspec.structs.replace(event, event_id=event_id))
    await chat._connection._transport.send(frame)
    with pytest.raises(ServerError) as refused:
        await chat._connection.answer(event_id, lambda event: False)
    return refused.value.code or ""


@pytest.mark.parametrize(
    ("input_", "code"),
    [
        ([user("one", "u2"), user("two", "u1")], "item_already_exists"),
        ([user("one", "u2"), user("two", "u2")], "item_already_exists"),
        ([user("one", "root")], "item_already_exists"),
        (
            [user("one", "u2"), FunctionCallOutputItem(call_id="call_nobody", output="7")],
            "invalid_tool_call_id",
        ),
    ],
)
async def test_a_steer_that_is_refused_ends_nothing(
    tmp_path: Path, input_: Sequence[AnyItem], code: str
) -> None:
    async with scripted(tmp_path) as client, client.session() as chat:
        await chat.add(user("begin", "u1"))
        turn = chat.say("go on", max_output_tokens=40)
        said = await anext(turn)
        assert await refusal(chat, ResponseSteer(input=list(input_))) == code
        said += await turn.text()
        assert chat.last.response.status_details is not None
        assert chat.last.response.status_details.reason == "max_output_tokens"
        assert await items(chat) == 3
        assert await refusal(chat, ResponseSteer(input=list(input_))) == code
        assert await items(chat) == 3, "nor where nothing runs"


async def test_a_turn_beyond_the_limit_leaves_no_item_and_is_not_counted(tmp_path: Path) -> None:
    async with scripted(tmp_path, ONE) as client, client.session() as chat, client.session() as other:
        turn = other.say("begin", max_output_tokens=900)
        await anext(turn)
        create = ResponseCreate(items=[user("one", "u1"), user("two", "u2")])
        for _ in range(3):
            assert await refusal(chat, create) == "too_many_responses"
        assert await refusal(chat, ResponseSteer(input=[user("one", "u1")])) == "too_many_responses"
        assert await items(chat) == 0
        await other.cancel()
        await turn.text()
        assert await chat.say("begin", max_output_tokens=9).text()
        before = chat._connection.resumption()
    async with scripted(tmp_path) as client:
        back = client._resumption(before.handle)
        assert back is not None
        back.last_event = before.last_event
        async with Chat.resumed(back, await back.connect(), {}) as resumed:
            said = await resumed.say("go on", max_output_tokens=9).text()
        (item,) = resumed.last.response.output
        assert isinstance(item, MessageItem)
        assert said == item.text, "all of the first reply after the restart is told"
