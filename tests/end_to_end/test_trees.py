"""A session's tree over real sockets: listed, named, pruned; those that stay know what they know."""

from __future__ import annotations

import pytest

from holdfast.gateway.server import Serving
from holdfast.sdk import SDKError, ServerError, connect
from holdfast.sdk.chat import Chat

from .wires import LONG

pytestmark = pytest.mark.anyio


async def names(chat: Chat) -> dict[str, str]:
    return {one.id: one.name for one in await chat.tree()}


async def test_branches_are_listed_named_and_pruned(server: Serving) -> None:
    async with connect(server.url) as client, client.session() as chat:
        await chat.say("My name is Marisol.").text()
        left, right = await chat.fork(2)
        await left.say("My locker code is 4821.").text()
        (leaf,) = await left.fork()
        await left.name("with a code")
        ids = [one.session.id for one in (chat, left, right, leaf)]
        tree = await chat.tree()
        assert [one.id for one in tree] == ids
        assert [one.parent for one in tree] == [None, ids[0], ids[0], ids[1]]
        assert [one.name for one in tree] == ["", "with a code", "", ""]
        assert [one.items for one in tree] == [2, 4, 2, 4]
        await chat.prune(left)
        assert set(await names(chat)) == {ids[0], ids[2], ids[3]}
        assert "4821" in await leaf.say("What is my locker code?").text()
        assert leaf.last.kv.prefilled <= leaf.last.kv.new, "what it shared is still there"
        await leaf.name("with a code")


async def test_invalid_names_and_prunes_are_refused(server: Serving) -> None:
    async with connect(server.url) as client, client.session() as chat, client.session() as stranger:
        await chat.say("My name is Marisol.").text()
        (fork,) = await chat.fork()
        await fork.name("fork")
        for asked, code in (
            (chat.name("fork"), "invalid_value"),
            (chat.prune(stranger.session.id or ""), "session_not_found"),
            (chat.prune("sess_none"), "session_not_found"),
            (chat.prune(chat.session.id or ""), "invalid_value"),
            (chat.prune(chat), "invalid_value"),
        ):
            with pytest.raises(ServerError) as refused:
                await asked
            assert refused.value.code == code
        assert len(await chat.tree()) == 2 and len(await stranger.tree()) == 1


async def test_a_pruned_branch_ends_in_mid_reply_for_its_client(server: Serving) -> None:
    async with connect(server.url) as here, here.session() as chat:
        await chat.say("My name is Marisol.").text()
        (fork,) = await chat.fork()
        story = fork.say("Tell me the story of the fox.", **LONG)
        await anext(story)
        await chat.prune(fork.session.id or "")
        with pytest.raises(SDKError):
            async for _ in story:
                pass
        assert set(await names(chat)) == {chat.session.id}
        assert "Marisol" in await chat.say("What is my name?").text()
