"""The verbs of a session over a real socket: the model answers rightly after each; nothing is done twice."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from holdfast.gateway.server import Serving
from holdfast.sdk import Client, ServerError, connect
from holdfast.sdk.chat import Chat
from holdfast.sdk.frames.client import ItemTruncate
from holdfast.sdk.frames.server import ItemTruncated

from .wires import LONG

pytestmark = pytest.mark.anyio

STORY = "Tell me the story of the fox."


@pytest.fixture
async def wired(server: Serving) -> AsyncIterator[Client]:
    async with connect(server.url) as client:
        yield client


async def items_of(chat: Chat) -> list[str]:
    """The ids of the last response's items."""
    return [item.id for item in chat.last.response.output]


async def test_a_reply_is_cut_where_it_was_heard(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        turn = chat.say(STORY, **LONG)
        said = ""
        async for piece in turn:
            said += piece
            if len(said) > 40:
                kept = await chat.interrupt(heard=25)
        assert kept == said[:25]
        assert chat.last.status == "cancelled"
        item = await chat.retrieve((await items_of(chat))[0])
        assert (item.text, item.status) == (kept, "incomplete")
        assert "Marisol" in await chat.say("What is my name?").text()
        assert chat.last.kv.prefilled == chat.last.kv.new, "what was heard is not computed again"


async def test_a_reply_that_is_over_is_cut_too(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        said = await chat.say(STORY).text()
        assert await chat.interrupt(heard=said[:30]) == said[:30]
        assert "Marisol" in await chat.say("What is my name?").text()
        assert chat.last.kv.prefilled <= chat.last.kv.new
        cut = ItemTruncate(item_id=(await items_of(chat))[0], text_end=10_000)
        with pytest.raises(ServerError, match="characters"):
            await chat._connection.request(cut, ItemTruncated)


async def test_a_reply_that_was_left_is_cut_and_not_the_one_before(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        before = (await items_of(chat))[0]
        first = (await chat.retrieve(before)).text
        async for _ in chat.say(STORY, **LONG):
            break
        kept = await chat.interrupt(heard=10)
        assert len(kept) == 10
        assert (await chat.retrieve(before)).text == first
        assert "Marisol" in await chat.say("What is my name?").text()
        here = next(one for one in await chat.tree() if one.id == chat.session.id)
        assert here.items == 6, "the reply that was left stands, as far as it was heard"


async def test_another_task_interrupts(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        turn = chat.say(STORY)
        said = await anext(turn)

        async def read() -> None:
            async for _ in turn:
                pass

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(0.01)
            assert await chat.interrupt(heard=len(said)) == said
        assert "Marisol" in await chat.say("What is my name?").text()


async def test_going_back_forgets_what_came_after(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        here = (await items_of(chat))[-1]
        await chat.say("My name is Bella.").text()
        assert "Bella" in await chat.say("What is my name?").text()
        await chat.rewind(here)
        assert "Marisol" in await chat.say("What is my name?").text()
        assert chat.last.kv.prefilled <= chat.last.kv.new
        await chat.rewind("root")
        assert "not told" in await chat.say("What is my name?").text()


async def test_a_reply_is_said_again(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        first = await chat.say("What is my name?").text()
        rewound = await chat.rewind(chat.last.usage.input_tokens)
        assert rewound.tokens < chat.last.usage.input_tokens, "the question waits for its turn"
        assert await chat.say().text() == first
        with pytest.raises(ServerError, match="tokens"):
            await chat.rewind(100_000)


async def test_forks_part_ways_and_each_knows_its_own(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        one, two, three = await chat.fork(3)
        assert len({chat.session.id, one.session.id, two.session.id, three.session.id}) == 4
        await one.say("My locker code is 4821.").text()
        await two.say("My locker code is 1357.").text()
        for fork, code in ((one, "4821"), (two, "1357"), (three, "not told"), (chat, "not told")):
            assert "Marisol" in await fork.say("What is my name?").text()
            assert fork.last.kv.prefilled <= fork.last.kv.new, "what is shared is not computed again"
            assert code in await fork.say("What is my locker code?").text()


async def test_a_fork_in_mid_reply_takes_what_was_said_and_both_go_on(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        whole = await chat.say(STORY, **LONG).text()
        await chat.rewind(chat.last.usage.input_tokens)
        turn = chat.say(**LONG)
        said = "".join([await anext(turn) for _ in range(5)])
        (fork,) = await chat.fork()
        assert said + "".join([piece async for piece in turn]) == whole, "the reply goes on as if nothing was"
        assert "Marisol" in await fork.say("What is my name?").text()
        assert fork.last.kv.prefilled <= fork.last.kv.new
        here = (await items_of(chat))[0]
        shorter = (await fork.retrieve(here)).text
        assert whole.startswith(shorter) and said <= shorter < whole


async def test_a_fork_from_an_item_knows_nothing_later(wired: Client) -> None:
    async with wired.session(instructions="Be brief.") as chat:
        await chat.say("My name is Marisol.").text()
        here = (await items_of(chat))[-1]
        await chat.say("My name is Bella.").text()
        (fork,) = await chat.fork(at=here)
        async with fork:
            assert fork.session.instructions == "Be brief."
            assert "Marisol" in await fork.say("What is my name?").text()
        assert "Bella" in await chat.say("What is my name?").text()
        with pytest.raises(ServerError, match="no item"):
            await chat.fork(at="item_none")


async def test_a_reply_is_steered_to_another_question(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        turn = chat.say(STORY, **LONG)
        async for _ in turn:
            steered = chat.steer("What is my name?")
            assert "Marisol" in await steered.text()
            break
        assert "Marisol" in await chat.steer("What is my name?").text(), "where nothing runs it is a turn"
        with pytest.raises(ServerError, match="out of band"):
            await chat.steer("What is my name?", conversation="none").text()


async def test_another_task_steers(wired: Client) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        turn = chat.say(STORY, **LONG)
        await anext(turn)

        async def read() -> None:
            async for _ in turn:
                pass

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(0.01)
            assert "Marisol" in await chat.steer("What is my name?").text()
        (finished,) = turn.rounds
        assert (finished.status, finished.response.status_details.reason) == ("incomplete", "steered")


async def test_many_sessions_talk_over_one_socket(wired: Client, server: Serving) -> None:
    async with wired.session() as chat:
        await chat.say("My name is Marisol.").text()
        before = (await server.service.snapshot()).gateway["sockets"]
        forks = await chat.fork(3, shared=True)
        assert (await server.service.snapshot()).gateway["sockets"] <= before + 1
        said: dict[int, str] = {}

        async def talk(number: int, fork: Chat) -> None:
            await fork.say(f"My locker code is 482{number}.").text()
            said[number] = await fork.say("What is my locker code?").text()

        async with anyio.create_task_group() as tasks:
            for number, fork in enumerate(forks):
                tasks.start_soon(talk, number, fork)
        assert all(f"482{number}" in said[number] for number in range(3))
        assert "Marisol" in await chat.say("What is my name?").text()
        await forks[0].aclose()
        assert "Marisol" in await forks[1].say("What is my name?").text()
