"""The verbs from the SDK to a scripted engine and back: sockets that are shared, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sdk import Chat, Client, ConnectionLost, ServerError, SessionLost
from holdfast.sdk.frames import codec
from holdfast.sdk.frames.client import (
    Heard,
    ItemRetrieve,
    ItemTruncate,
    ResponseCreate,
    SessionAttach,
    SessionDetach,
)
from holdfast.sdk.frames.codec import MAX_FRAME_BYTES
from holdfast.sdk.frames.response import ResponseParams
from holdfast.sdk.frames.server import ItemTruncated, SessionDetached
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    link = Scripted(spoken, END, ahead=1)
    service = Service(GatewaySettings(), "scripted", link)
    service.open(SessionRegistry(link, Language.of(ours("chatml"))))
    yield in_memory(service)
    await service.close()


async def answer(chat: Chat, sent: str, wanted: Callable[[Any], bool] = lambda event: False) -> Any:
    """What answers an event that was sent by hand; a refusal is raised."""
    return await chat._connection.answer(sent, wanted)


async def told(chat: Chat) -> list[str]:
    return [await chat.say(line, max_output_tokens=20).text() for line in ("and", "so", "on")]


async def test_sessions_on_one_socket_behave_as_on_sockets_of_their_own(client: Client) -> None:
    async with client.session() as chat:
        await chat.say("begin").text()
        alone = await chat.fork(2)
        beside = await chat.fork(3, shared=True)
        expected = await told(alone[0])
        said: list[list[str]] = []

        async def talk(fork: Chat) -> None:
            said.append(await told(fork))

        async with anyio.create_task_group() as tasks:
            for fork in beside:
                tasks.start_soon(talk, fork)
        assert said == [expected] * 3
        await beside[0].aclose()
        assert await told(alone[1]) == expected
        assert await beside[1].say("more", max_output_tokens=9).text()
        assert await told(chat) == expected, "the first goes on as it did alone"
        connection = (await chat._connection.share(chat.session.id)).transport
        await connection.send(b'{"type":"response.cancel","session_id":"sess_nobody"}')
        with pytest.raises(ServerError) as refused:
            await answer(chat, "none")
        assert refused.value.code == "session_not_found"


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
async def test_closing_a_chat_closes_its_forks_and_theirs_and_no_session(
    client: Client, shared: bool
) -> None:
    async with client.session() as chat:
        await chat.say("begin").text()
        left, right = await chat.fork(2, shared=shared)
        (leaf,) = await left.fork(shared=shared)
        expected = await told(right)
        handle = leaf.handle
        async with left:
            pass
        for closed in (left, leaf):
            with pytest.raises(ConnectionLost):
                await closed.say("more").text()
        assert len(await chat.tree()) == 4
        async with client.resume(handle) as again:
            assert await told(again) == expected
        assert await right.say("more").text()


async def test_forks_of_a_pruned_session_are_closed_with_the_chat_that_pruned_it(client: Client) -> None:
    async with client.session() as chat:
        await chat.say("begin").text()
        (branch,) = await chat.fork()
        (leaf,) = await branch.fork()
        await chat.prune(branch)
        assert await leaf.say("go on").text()
    with pytest.raises(ConnectionLost):
        await leaf.say("more").text()


async def test_what_waits_on_a_shared_socket_ends_when_the_session_is_resumed_elsewhere(
    client: Client,
) -> None:
    async with client.session() as chat:
        (fork,) = await chat.fork(shared=True)
        waiting = asyncio.ensure_future(answer(fork, "none"))
        await asyncio.sleep(0)
        async with client.resume(fork.handle):
            with pytest.raises(ConnectionLost, match="another connection"):
                await waiting
        assert await chat.say("go on").text()


async def test_a_session_that_is_resumed_elsewhere_leaves_the_shared_socket(client: Client) -> None:
    async with client.session() as chat:
        (fork,) = await chat.fork(shared=True)
        async with client.resume(fork.handle) as elsewhere:
            detached = await answer(fork, "none", lambda event: isinstance(event, SessionDetached))
            assert detached.session_id == fork.session.id == elsewhere.session.id
            assert await elsewhere.say("go on").text() == await (await chat.fork())[0].say("go on").text()
            sent = await fork.send(ItemRetrieve(item_id="item_1"))
            with pytest.raises(ServerError, match="no such session"):
                await answer(chat, sent)


@pytest.mark.parametrize("shared", [False, True])
async def test_a_client_is_told_that_another_one_has_pruned_its_session(
    client: Client, *, shared: bool
) -> None:
    async with client.session() as chat, client.session() as host:
        await host.say("begin").text()
        (fork,) = await host.fork(shared=shared)
        await fork.say("go on").text()
        turn = asyncio.ensure_future(fork.say("and on", min_output_tokens=4000).text())
        (other,) = await host.fork()
        await other.prune(fork.session.id or "")
        with pytest.raises(SessionLost) as told_of:
            await turn
        assert told_of.value.code == "session_deleted"
        assert await chat.say("begin").text() and await host.say("more").text()


async def test_an_unknown_handle_is_not_attached(client: Client) -> None:
    async with client.session() as chat:
        for event in (SessionAttach(session="hold_nobody"), SessionDetach(session_id="sess_nobody")):
            sent = await chat.send(event)
            with pytest.raises(ServerError) as refused:
                await answer(chat, sent)
            assert refused.value.code == "session_not_found"
        assert await chat.say("go on").text()


async def test_audio_time_becomes_characters_by_the_clients_timing(client: Client) -> None:
    async with client.session() as chat:
        said = await chat.say("begin", min_output_tokens=6).text()
        item = chat.last.response.output[0].id
        timing = [Heard(ms=100, text_end=3), Heard(ms=200, text_end=5), Heard(ms=900, text_end=9)]
        for event, code in (
            (ItemTruncate(item_id=item), "missing_required_parameter"),
            (ItemTruncate(item_id=item, text_end=1, content_index=1), "invalid_value"),
            (ItemTruncate(item_id=item, text_end=len(said) + 1), "invalid_value"),
        ):
            sent = await chat.send(event)
            with pytest.raises(ServerError) as refused:
                await answer(chat, sent)
            assert refused.value.code == code
        assert (await chat.retrieve(item)).text == said
        sent = await chat.send(ItemTruncate(item_id=item, audio_end_ms=300, timing=timing))
        cut = await answer(chat, sent, lambda event: isinstance(event, ItemTruncated))
        assert (cut.text_end, cut.audio_end_ms) == (5, 300)
        assert (await chat.retrieve(item)).text == said[:5]


async def test_audio_time_alone_ends_a_reply_where_it_is(client: Client) -> None:
    """A text has no times: nothing of it is cut."""
    async with client.session() as chat:
        said = await chat.say("begin", min_output_tokens=6).text()
        item = chat.last.response.output[0].id
        sent = await chat.send(ItemTruncate(item_id=item, audio_end_ms=300))
        cut = await answer(chat, sent, lambda event: isinstance(event, ItemTruncated))
        assert (cut.text_end, cut.audio_end_ms) == (len(said), 300)
        assert (await chat.retrieve(item)).text == said
        for wrong, code in (("item_none", "item_not_found"), (chat.last.response.id, "item_not_found")):
            sent = await chat.send(ItemTruncate(item_id=wrong, audio_end_ms=300))
            with pytest.raises(ServerError) as refused:
                await answer(chat, sent)
            assert refused.value.code == code


async def test_a_frame_too_large_is_refused_and_nothing_waits_for_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a client that does not look before it sends, as this one does."""
    monkeypatch.setattr(codec, "framed", codec.encode)
    async with client.session() as chat:
        large = ResponseCreate(response=ResponseParams(instructions="x" * MAX_FRAME_BYTES))
        sent = await chat.send(large)
        with anyio.fail_after(30):
            with pytest.raises(ServerError) as refused:
                await answer(chat, sent)
            assert (refused.value.code, refused.value.event_id) == ("frame_too_large", sent)
            assert await chat.say("begin").text()


async def test_verbs_in_the_wrong_state_are_refused(client: Client) -> None:
    async with client.session() as chat:
        with pytest.raises(LookupError):
            await chat.interrupt()
        said = await chat.say("begin", min_output_tokens=6).text()
        with pytest.raises(ValueError, match="characters"):
            await chat.interrupt(heard=len(said) + 1)
        with pytest.raises(ValueError, match="begin"):
            await chat.interrupt(heard="something else")
        item = chat.last.response.output[0].id
        turn = chat.say("more", min_output_tokens=9)
        piece = await anext(turn)
        sent = await chat.send(ItemTruncate(item_id=item, text_end=2))
        await answer(chat, sent, lambda event: isinstance(event, ItemTruncated))
        rest = "".join([piece async for piece in turn])
        assert (await chat.retrieve(chat.last.response.output[0].id)).text == piece + rest
        assert (await chat.retrieve(item)).text == said[:2]
