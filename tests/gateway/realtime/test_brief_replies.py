"""`response.create` with items, and replies told in brief: each thing once."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from holdfast.gateway.realtime.conversation import Conversation, Effect, StartResponse
from holdfast.sdk.frames import codec, server
from holdfast.sdk.frames.session import SessionResource
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCall, Message
from holdfast.sessions.turn.events import (
    EndReason,
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
    TurnUsage,
)
from holdfast.sessions.turn.request import TurnRequest

from .realtime_grammar import served

BRIEF = {"events": "brief"}
REPLY: tuple[ReplyEvent, ...] = (
    ReplyStarted(10),
    ReplyTextDelta("a", "Let me "),
    ReplyTextDelta("a", "look."),
    ReplyCallStarted("f", "c", "weather"),
    ReplyArgumentsDelta("f", "c", "{"),
    ReplyArgumentsDelta("f", "c", "}"),
    ReplyCallDone("f", "c", "weather", "{}"),
    ReplyDone(
        ReplyStatus.COMPLETED,
        EndReason.STOP,
        (
            Message(id="a", role="assistant", text="Let me look."),
            FunctionCall(id="f", call_id="c", name="weather", arguments="{}"),
        ),
        TurnUsage(),
    ),
)


class Stage:
    """A conversation; the test plays the session."""

    def __init__(self) -> None:
        numbers = itertools.count(1)
        self.history = History()
        session = SessionResource(id="sess_1", model="pocket")
        self.conversation = Conversation(session, self.history, ids=lambda kind: f"{kind}_{next(numbers)}")

    def asks(self, *items: dict[str, Any], **response: Any) -> list[Effect]:
        event = {"type": "response.create", "event_id": "asked", "items": items, "response": response}
        return served(self.conversation, codec.decode_client(msgspec.json.encode(event)))

    def runs(self, start: Effect, *events: ReplyEvent) -> list[server.ServerEvent]:
        assert isinstance(start, StartResponse)
        return [wire for event in events for wire in self.conversation.reply(start.response_id, event)]


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def answered(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "3"}


def types(effects: list[Effect]) -> list[str]:
    return [effect.type for effect in effects if isinstance(effect, server.ServerEvent)]


def test_a_reply_in_brief_tells_each_thing_once() -> None:
    stage = Stage()
    (start,) = stage.asks(said("Hello"), **BRIEF)
    told = stage.runs(start, *REPLY)
    assert [event.type for event in told] == [
        "response.created",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_item.done",
        "response.output_item.done",
        "response.done",
    ]
    whole = [event for event in told if isinstance(event, server.OutputItemDone)]
    assert [(one.output_index, one.item.id, one.item.status) for one in whole] == [
        (0, "a", "completed"),
        (1, "f", "completed"),
    ]
    assert isinstance(told[-1], server.ResponseDone)
    assert told[-1].response.output == [] and told[-1].response.usage is not None


def test_a_brief_reply_is_told_again_in_brief() -> None:
    stage, other = Stage(), Stage()
    (start,) = stage.asks(said("Hello"), **BRIEF)
    assert isinstance(start, StartResponse)
    other.conversation.revive(start.response_id, start.request, stage.conversation.note(start.response_id))
    assert [event.type for event in other.runs(start, *REPLY)] == [
        event.type for event in stage.runs(start, *REPLY)
    ]


def test_a_call_of_a_brief_reply_can_be_answered_while_that_runs() -> None:
    stage = Stage()
    (start,) = stage.asks(said("Hello"), **BRIEF)
    stage.history.prepare(TurnRequest.checked())
    stage.runs(start, *REPLY[:-1])
    event = {"type": "conversation.item.create", "item": answered("c")}
    effects = served(stage.conversation, codec.decode_client(msgspec.json.encode(event)))
    assert types(effects) == ["conversation.item.added", "conversation.item.done"]
    added = effects[0]
    assert isinstance(added, server.ItemAdded)
    assert added.previous_item_id == "f"


def test_items_of_a_response_create_are_shown_unless_in_brief() -> None:
    stage = Stage()
    *told, start = stage.asks(said("One"), said("Two"))
    assert types(told) == ["conversation.item.added", "conversation.item.done"] * 2
    assert isinstance(start, StartResponse)
    assert [item.text for item in stage.history.items() if isinstance(item, Message)] == ["One", "Two"]


@pytest.mark.parametrize(
    ("items", "response", "code"),
    [
        ([said("One"), answered("nobody")], {}, "invalid_tool_call_id"),
        ([{**said("One"), "id": "x"}, {**said("Two"), "id": "x"}], {}, "item_already_exists"),
        ([answered("nobody")], {"conversation": "none"}, "invalid_tool_call_id"),
        ([said("One")], {"tool_choice": {"type": "function", "name": "none"}}, "invalid_value"),
    ],
)
def test_items_are_refused_together_with_their_response(
    items: list[dict[str, Any]], response: dict[str, Any], code: str
) -> None:
    stage = Stage()
    effects = stage.asks(*items, **response)
    assert types(effects) == ["error"]
    assert isinstance(effects[0], server.ErrorEvent)
    assert (effects[0].error.code, effects[0].error.event_id) == (code, "asked")
    assert stage.history.items() == () and not stage.conversation.running


def test_items_with_a_response_are_refused_while_a_reply_runs() -> None:
    stage = Stage()
    stage.asks(said("One"))
    assert types(stage.asks(said("Two"))) == ["error"]
    assert len(stage.history.items()) == 1


def test_the_items_of_a_response_are_answered_again() -> None:
    event = codec.decode_client(msgspec.json.encode({"type": "response.create", "items": [said("One")]}))
    told: list[list[str]] = []
    stage = Stage()
    stage.conversation.receive(event)
    (item,) = stage.history.items()
    again = msgspec.structs.replace(event, items=[msgspec.structs.replace(event.items[0], id=item.id)])
    told.append([one.type for one in stage.conversation.answered(again)])
    assert told == [["conversation.item.added", "conversation.item.done"]]
