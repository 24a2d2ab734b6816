"""Turns as values: awaited, never read, out of band side by side, as a repr, and without `async`."""

from __future__ import annotations

import gc
import linecache
import re
import warnings
from collections.abc import Iterator

import anyio
import msgspec
import pytest

from holdfast.sdk import RunDone, UnreadTurn, connect, errors
from holdfast.sdk.connection.responses import ASIDE, labelled
from holdfast.sdk.frames import client, server
from holdfast.sdk.frames.response import Response, ResponseParams
from holdfast.sdk.frames.session import SessionPatch
from holdfast.sdk.params import ResponseOptions, UpdateOptions, create_of

from .scripted import Script, add, chatting, response

pytestmark = pytest.mark.anyio


def test_every_field_of_the_wire_is_a_typed_keyword() -> None:
    assert set(ResponseOptions.__annotations__) >= set(ResponseParams.__struct_fields__) - {"tools"}
    assert set(ResponseParams.__struct_fields__) == set(ResponseOptions.__optional_keys__)
    assert set(SessionPatch.__struct_fields__) - {"tools"} == set(UpdateOptions.__optional_keys__)


async def test_an_awaited_turn_gives_its_last_response() -> None:
    script = Script([("add", '{"a":1,"b":2}')], ["It is |3."], ["Hel|lo"], ["By|e"])
    async with chatting(script, tools=[add]) as chat:
        finished = await chat.say("1 + 2?")
        assert (finished.text, finished) == ("It is 3.", chat.last)
        assert (await chat.respond()).text == "Hello"
        done = await chat.run("Go")
        assert isinstance(done, RunDone) and done.text == "Bye"


async def test_pieces_read_before_are_not_asked_for_again() -> None:
    script = Script(["a|b|c"])
    async with chatting(script) as chat:
        turn = chat.say("Go")
        assert await anext(turn) == "a"
        assert (await turn).text == "abc"
    assert script.kinds().count("response.create") == 1


async def test_a_turn_that_is_never_read_warns_once_with_its_line() -> None:
    script = Script(["a"])
    async with chatting(script) as chat:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            for _ in range(3):
                chat.say("Go")
                gc.collect()
            chat.respond()
            await chat.say("read").text()
        (say, respond) = told
    here = linecache.getlines(__file__)
    assert say.category is UnreadTurn and say.filename == __file__
    assert here[say.lineno - 1].strip() == 'chat.say("Go")' and "chat.say(...) was never read" in str(
        say.message
    )
    assert here[respond.lineno - 1].strip() == "chat.respond()"
    assert script.kinds().count("response.create") == 1


async def test_reprs_tell_id_and_state() -> None:
    script = Script(["a|b"], None)
    async with chatting(script) as chat:
        assert re.fullmatch(rf"<Chat {chat.session.id} with {chat.session.model}, idle>", repr(chat))
        turn = chat.say("Go")
        assert repr(turn) == "<Turn not begun, 0 responses ended>"
        await anext(turn)
        assert re.fullmatch(r"<Turn \w+ being read, 0 responses ended>", repr(turn))
        assert repr(chat).endswith("a turn is being read>")
        await turn
        assert re.fullmatch(r"<Turn \w+ over, 1 responses ended>", repr(turn))
    assert repr(chat).endswith("closed>")
    async with connect("ws://127.0.0.1:1", "pocket") as offline:
        assert repr(offline) == "<Client of ws://127.0.0.1:1/v1/realtime, model pocket>"


def out_of_band(response_id: str, labels: dict[str, str], status: str) -> Response:
    made = response(response_id, status)
    return msgspec.structs.replace(made, conversation_id=None, metadata=labels)


def _conversation(event: client.ResponseCreate) -> object:
    return None if event.response is None else event.response.conversation


def two_beside(script: Script, event: client.ClientEvent) -> Iterator[server.ServerEvent]:
    """Answers two responses out of band at once: the later one begins first, then both come alternately."""
    if not isinstance(event, client.ResponseCreate) or _conversation(event) != "none":
        yield from script.usual(event)
        return
    held = [one for one in script.got if one.type == event.type and _conversation(one) == "none"]
    if len(held) < 2:
        return
    begun = [(script.id(), one.response.metadata) for one in reversed(held)]
    for one in begun:
        yield server.ResponseCreated(event_id=script.id(), response=out_of_band(*one, "in_progress"))
    for word in ("one", "two"):
        for response_id, labels in begun:
            yield script.delta(response_id, 0, f"{labels['name']}-{word} ")
    for one in begun:
        yield server.ResponseDone(event_id=script.id(), response=out_of_band(*one, "completed"))


async def test_replies_out_of_band_are_read_side_by_side_and_beside_a_turn() -> None:
    script = Script(["main| reply"], answer=two_beside)
    async with chatting(script) as chat:
        turn = chat.say("Go")
        assert await anext(turn) == "main"
        texts: dict[str, str] = {}

        async def aside(name: str) -> None:
            asked = chat.respond(conversation="none", metadata={"name": name})
            pieces = [event.delta async for event in asked if isinstance(event, server.TextDelta)]
            texts[name] = "".join(pieces)
            assert asked.finished is not None and asked.finished.response.metadata == {"name": name}

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(aside, "left")
                group.start_soon(aside, "right")
            assert [piece async for piece in turn] == [" reply"]
        assert texts == {"left": "left-one left-two ", "right": "right-one right-two "}
        assert chat.last.text == "main reply" and "response.cancel" not in script.kinds()


async def test_a_refused_reply_out_of_band_leaves_the_turn_alone() -> None:
    def refusing(script: Script, event: client.ClientEvent) -> Iterator[server.ServerEvent]:
        if isinstance(event, client.ResponseCreate) and _conversation(event) == "none":
            yield script.error("too_many_responses", event.event_id)
        else:
            yield from script.usual(event)

    async with chatting(Script(["main| reply"], answer=refusing)) as chat:
        turn = chat.say("Go")
        await anext(turn)
        with pytest.raises(errors.ServerError) as refused:
            await chat.respond(conversation="none")
        assert refused.value.code == "too_many_responses"
        assert [piece async for piece in turn] == [" reply"]


def test_the_label_leaves_a_full_metadata_alone() -> None:
    full = {str(number): "" for number in range(16)}
    create = create_of({"conversation": "none", "metadata": full})
    assert labelled(create, "c") is create
    some = labelled(create_of({"conversation": "none", "metadata": {"a": "b"}}), "c").response
    assert some is not None and some.metadata == {"a": "b", ASIDE: "c"}
