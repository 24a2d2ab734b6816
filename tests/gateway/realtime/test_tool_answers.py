"""What tools answer, in any order and at any time: taken once for each call there is, refused by name else."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from holdfast.gateway.realtime.conversation import Conversation, StartResponse
from holdfast.sdk.frames import codec, server
from holdfast.sdk.frames.session import SessionResource
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCallOutput
from holdfast.sessions.turn.events import ReplyCallDone, ReplyCallStarted, ReplyStarted
from holdfast.sessions.turn.request import TurnRequest

from .realtime_grammar import served


@pytest.fixture
def stage() -> Stage:
    return Stage()


class Stage:
    """A conversation; the test writes its items."""

    def __init__(self) -> None:
        numbers = itertools.count(1)
        self.history = History()
        self.conversation = Conversation(
            SessionResource(id="sess", model="pocket"),
            self.history,
            ids=lambda prefix: f"{prefix}_{next(numbers)}",
        )

    def does(self, event: dict[str, Any]) -> list[Any]:
        return served(self.conversation, codec.decode_client(msgspec.json.encode(event)))

    def adds(self, **item: Any) -> str | None:
        """The code of the refusal; None where it was taken."""
        first = self.does({"type": "conversation.item.create", "item": item, "event_id": "mine"})[0]
        if not isinstance(first, server.ErrorEvent):
            return None
        assert (first.error.param, first.error.event_id) == ("item.call_id", "mine")
        return first.error.code

    def calls(self, call_id: str) -> None:
        assert self.adds(type="function_call", name="f", arguments="{}", call_id=call_id) is None

    def answers(self, call_id: str, output: str = "1") -> str | None:
        return self.adds(type="function_call_output", call_id=call_id, output=output)

    def outputs(self) -> list[str]:
        return [item.call_id for item in self.history.items() if isinstance(item, FunctionCallOutput)]


def test_out_of_order_and_late_are_no_faults(stage: Stage) -> None:
    for name in ("a", "b", "c"):
        stage.calls(name)
    assert [stage.answers("c"), stage.answers("a")] == [None, None]
    content = [{"type": "input_text", "text": "Still there?"}]
    assert stage.adds(type="message", role="user", content=content) is None
    assert stage.answers("b") is None
    assert stage.outputs() == ["c", "a", "b"]


def test_an_answer_to_no_call_is_refused(stage: Stage) -> None:
    assert stage.answers("nobody") == "invalid_tool_call_id"
    stage.calls("a")
    assert stage.answers("b") == "invalid_tool_call_id"
    assert stage.outputs() == []


def test_a_second_answer_is_refused(stage: Stage) -> None:
    stage.calls("a")
    assert stage.answers("a", "1") is None
    assert stage.answers("a", "2") == "tool_call_already_answered"
    assert stage.outputs() == ["a"]


def test_an_answer_to_a_call_that_was_deleted_is_refused(stage: Stage) -> None:
    stage.calls("a")
    item_id = stage.history.items()[0].id
    stage.does({"type": "conversation.item.delete", "item_id": item_id})
    assert stage.answers("a") == "invalid_tool_call_id"


def test_a_call_may_be_answered_while_its_reply_still_runs(stage: Stage) -> None:
    (start,) = stage.does({"type": "response.create"})
    assert isinstance(start, StartResponse)
    stage.history.prepare(TurnRequest.checked())
    assert stage.answers("c") == "invalid_tool_call_id"
    for event in (ReplyStarted(3), ReplyCallStarted("f", "c", "f"), ReplyCallDone("f", "c", "f", "{}")):
        stage.conversation.reply(start.response_id, event)
    assert stage.answers("c") is None
    assert stage.answers("c") == "tool_call_already_answered"
    assert stage.outputs() == ["c"]
