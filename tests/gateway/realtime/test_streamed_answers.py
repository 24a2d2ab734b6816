"""A tool's output in pieces: the first piece names its call, and is refused where that cannot be answered."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from holdfast.gateway.realtime.conversation import Conversation, Effect, StartResponse
from holdfast.gateway.realtime.session import typed_since
from holdfast.sdk.frames import client, codec, server
from holdfast.sdk.frames.session import SessionResource
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.input_text_buffer import InputTextBuffer
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message
from holdfast.sessions.journal.records import AnyOperation, Typed
from holdfast.sessions.text.eager_prefill import PrefilledInput
from holdfast.sessions.turn.events import ReplyCallDone, ReplyCallStarted, ReplyStarted
from holdfast.sessions.turn.request import TurnRequest

from .realtime_grammar import served


class Stage:
    """A conversation that owes an answer to the call `c`."""

    def __init__(self) -> None:
        numbers = itertools.count(1)
        self.ids: Callable[[str], str] = lambda prefix: f"{prefix}_{next(numbers)}"
        self.history = History(max_items=6)
        self.history.insert(FunctionCall(id="f", call_id="c", name="look", arguments="{}"))
        self.conversation = Conversation(
            SessionResource(id="sess", model="pocket"),
            self.history,
            ids=lambda prefix: self.ids(prefix),
        )

    def does(self, kind: str, **fields: Any) -> list[Effect]:
        event = {"type": kind, "event_id": "mine", **fields}
        return served(self.conversation, codec.decode_client(msgspec.json.encode(event)))

    def appends(self, text: str, **fields: Any) -> Any:
        """The item that the text becomes, so far."""
        assert self.does("input_text_buffer.append", text=text, **fields) == []
        return self.conversation.buffer.item()

    def refused(self, kind: str, **fields: Any) -> tuple[str | None, str | None]:
        """Code and parameter."""
        (effect,) = self.does(f"input_text_buffer.{kind}", **fields)
        assert isinstance(effect, server.ErrorEvent) and effect.error.event_id == "mine"
        return effect.error.code, effect.error.param

    def commits(self) -> FunctionCallOutput | Message:
        told, *_ = self.does("input_text_buffer.commit")
        assert isinstance(told, server.TextCommitted)
        item = self.history.get(told.item_id)
        assert isinstance(item, FunctionCallOutput | Message)
        return item

    def answers(self, call_id: str) -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": "whole"}
        self.does("conversation.item.create", item=item)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_the_pieces_become_the_calls_output(stage: Stage) -> None:
    assert stage.appends("", call_id="c").output == "", "its beginning is expected before a word of it"
    assert stage.appends("21 ").output == "21 "
    assert stage.appends("degrees", call_id="c").output == "21 degrees"
    stage.does("input_text_buffer.replace", **{"from": 3, "text": "°"})
    item = stage.commits()
    assert isinstance(item, FunctionCallOutput) and (item.call_id, item.output) == ("c", "21 °")
    assert stage.history.items()[-1] is item
    assert stage.conversation.buffer == InputTextBuffer()
    assert isinstance(stage.appends("Well?"), Message), "what comes then is a user's again"


def test_what_was_committed_is_told_with_its_call_then_and_again(stage: Stage) -> None:
    """A client may type while its tools stream: what is told of the one is not the other's."""
    commit = client.TextCommit(event_id="mine")
    for call_id, name in ({"call_id": "c"}, "c"), ({}, UNSET):
        stage.appends("21", **call_id)
        told, added, _ = stage.conversation.receive(commit, PrefilledInput(3, 4))
        assert isinstance(told, server.TextCommitted) and isinstance(added, server.ItemAdded)
        assert (told.item_id, told.call_id, told.left_tokens) == (added.item.id, name, 4)
    stage.ids = lambda prefix: told.item_id
    again, *_ = stage.conversation.answered(commit)
    assert isinstance(again, server.TextCommitted) and again.call_id is UNSET


def test_a_tool_may_answer_nothing(stage: Stage) -> None:
    stage.appends("", call_id="c")
    item = stage.commits()
    assert isinstance(item, FunctionCallOutput) and item.output == ""


def test_what_was_taken_back_leaves_the_call_open(stage: Stage) -> None:
    stage.appends("21", call_id="c")
    stage.does("input_text_buffer.clear")
    assert stage.refused("commit") == ("invalid_value", None)
    stage.appends("22", call_id="c")
    assert stage.commits().id in stage.history


def test_bad_pieces_are_refused_by_name_and_change_nothing(stage: Stage) -> None:
    append = "append"
    assert stage.refused(append, text="x", call_id="nobody") == ("invalid_tool_call_id", "call_id")
    assert stage.refused(append, text="x", call_id="c", role="user") == ("invalid_value", "call_id")
    assert stage.refused("commit") == ("invalid_value", None)
    stage.appends("21", call_id="c")
    assert stage.refused(append, text="x", call_id="d") == ("invalid_value", "call_id")
    assert stage.refused(append, text="x", role="user") == ("invalid_value", "role")
    assert stage.refused("replace", **{"from": 3, "text": "x"}) == ("invalid_value", "from")
    assert stage.refused("commit", call_id="d") == ("invalid_value", "call_id")
    item = stage.commits()
    assert isinstance(item, FunctionCallOutput) and item.output == "21"
    assert stage.refused(append, text="x", call_id="c") == ("tool_call_already_answered", "call_id")
    stage.appends("Hello")
    assert stage.refused(append, text="x", call_id="c") == ("invalid_value", "call_id")


def test_a_call_that_was_deleted_meanwhile_is_refused_at_the_commit(stage: Stage) -> None:
    stage.appends("21", call_id="c")
    stage.history.delete("f")
    assert stage.refused("commit") == ("invalid_tool_call_id", "call_id")
    assert stage.conversation.buffer.text == "21", "it is the client's to take back"
    assert not [item for item in stage.history.items() if isinstance(item, FunctionCallOutput)]


def test_a_commit_after_another_client_answered_the_call_is_refused(stage: Stage) -> None:
    stage.appends("21", call_id="c")
    stage.answers("c")
    assert stage.refused("commit", call_id="c") == ("tool_call_already_answered", "call_id")
    assert stage.refused("append", text="2", call_id="c") == ("tool_call_already_answered", "call_id")
    assert stage.refused("commit") == ("invalid_value", None)


def test_an_item_that_finds_no_room_stays_in_the_buffer(stage: Stage) -> None:
    for number in range(5):
        stage.history.insert(Message(id=f"m{number}", role="user", text="x"))
    stage.appends("21", call_id="c")
    assert stage.refused("commit")[1] == "item"
    stage.history.delete("m0")
    item = stage.commits()
    assert isinstance(item, FunctionCallOutput) and item.output == "21"


def test_the_first_piece_may_come_while_the_reply_still_runs(stage: Stage) -> None:
    (start,) = stage.does("response.create")
    assert isinstance(start, StartResponse)
    stage.history.prepare(TurnRequest.checked())
    assert stage.refused("append", text="x", call_id="d") == ("invalid_tool_call_id", "call_id")
    for event in (ReplyStarted(3), ReplyCallStarted("g", "d", "look"), ReplyCallDone("g", "d", "look", "{}")):
        stage.conversation.reply(start.response_id, event)
    stage.appends("21", call_id="d")
    item = stage.commits()
    assert isinstance(item, FunctionCallOutput) and item.call_id == "d"


def test_the_journal_keeps_the_call_of_the_text() -> None:
    buffer, empty = InputTextBuffer(), InputTextBuffer()
    buffer.append("", call_id="c")
    assert typed_since(empty, buffer) == Typed(start=0, text="", item=buffer.id, call="c")
    before = InputTextBuffer(buffer.text, buffer.role, buffer.id, buffer.call_id)
    buffer.append("21")
    assert typed_since(before, buffer) == Typed(start=0, text="21", item=buffer.id, call="c")
    assert typed_since(buffer, empty) == Typed(start=0)


def test_an_earlier_journal_has_no_calls() -> None:
    old = {"op": "typed", "start": 2, "text": "x", "role": "user", "item": "i"}
    read: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=AnyOperation)
    assert read == Typed(start=2, text="x", role="user", item="i", call=None)
    assert "call" not in msgspec.msgpack.decode(msgspec.msgpack.encode(read))


@pytest.mark.parametrize("way", ["item", "response"])
def test_an_output_that_comes_whole_replaces_its_pieces(stage: Stage, way: str) -> None:
    """A client streamed a part and is gone; another one answers the call, and the pieces do not matter."""
    stage.appends("21 deg", call_id="c")
    whole = {"type": "function_call_output", "call_id": "c", "output": "22 degrees"}
    if way == "item":
        stage.does("conversation.item.create", item=whole)
    else:
        stage.does("response.create", items=[whole])
    assert stage.conversation.buffer == InputTextBuffer()
    assert isinstance(stage.appends("And you?"), Message)


def test_another_calls_output_leaves_the_pieces_of_this_one(stage: Stage) -> None:
    stage.history.insert(FunctionCall(id="g", call_id="d", name="look", arguments="{}"))
    stage.appends("21 deg", call_id="c")
    stage.answers("d")
    assert stage.appends("rees").output == "21 degrees"
