"""Golden orders of events, and what the conversation refuses. No loop, no socket, no model."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from holdfast.gateway.realtime.conversation import CancelResponse, Conversation, Effect, StartResponse
from holdfast.runtime.verbs import Sampling
from holdfast.sdk.errors import FieldUnsupported
from holdfast.sdk.frames import codec, server
from holdfast.sdk.frames.items import MessageItem
from holdfast.sdk.frames.sampling import SamplingFields
from holdfast.sdk.frames.session import SessionResource
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCall, Message
from holdfast.sessions.conversation.tree import Draft, TurnReply
from holdfast.sessions.errors import EngineUnavailable, PromptTooLong
from holdfast.sessions.token_ids import ids_of
from holdfast.sessions.turn.events import (
    EndReason,
    MissReason,
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyReasoningDelta,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
    TokenScore,
    TurnUsage,
)
from holdfast.sessions.turn.request import RequestBounds, TurnRequest

from .realtime_grammar import Grammar, served

VOCAB = 1000
USAGE = TurnUsage(
    input_tokens=10, output_tokens=3, cached_tokens=6, new_tokens=4, prefilled_tokens=4, recomputed_tokens=0
)
TEXT_TURN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]
CALL = [
    "response.output_item.added",
    "conversation.item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "conversation.item.done",
]


class Stage:
    """A conversation with a checker behind it; the test plays the session."""

    def __init__(self, bounds: RequestBounds = RequestBounds(VOCAB), **fields: Any) -> None:  # noqa: B008
        numbers = itertools.count(1)
        self.history = History()
        self.conversation = Conversation(
            SessionResource(id="sess_1", model="pocket", **fields),
            self.history,
            ids=lambda prefix: f"{prefix}_{next(numbers)}",
            parallel_responses=3,
            bounds=bounds,
            names=frozenset({"pocket", "gpt-realtime"}),
        )
        self.grammar = Grammar()
        self.grammar.feed_all(self.conversation.greet())

    def does(self, event: dict[str, Any]) -> list[Effect]:
        effects = served(self.conversation, codec.decode_client(msgspec.json.encode(event)))
        self.grammar.feed_all(effect for effect in effects if isinstance(effect, server.ServerEvent))
        return effects

    def sends(self, kind: str, **fields: Any) -> list[server.ServerEvent]:
        effects = self.does({"type": kind, **fields})
        assert all(isinstance(effect, server.ServerEvent) for effect in effects)
        return [effect for effect in effects if isinstance(effect, server.ServerEvent)]

    def refused(self, kind: str, **fields: Any) -> server.ErrorDetails:
        (event,) = self.sends(kind, **fields)
        assert isinstance(event, server.ErrorEvent)
        return event.error

    def says(self, text: str, **fields: Any) -> list[server.ServerEvent]:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content, **fields.pop("item", {})}
        return self.sends("conversation.item.create", item=item, **fields)

    def starts(self, **response: Any) -> StartResponse:
        effects = self.does({"type": "response.create", "event_id": "asked", "response": response})
        (start,) = effects
        assert isinstance(start, StartResponse)
        return start

    def tells(self, response_id: str, *events: ReplyEvent) -> list[server.ServerEvent]:
        told = [wire for event in events for wire in self.conversation.reply(response_id, event)]
        self.grammar.feed_all(told)
        return told


def types(events: list[server.ServerEvent]) -> list[str]:
    return [event.type for event in events]


def done(*items: Message | FunctionCall, status: str = "completed", reason: str = "stop") -> ReplyDone:
    return ReplyDone(ReplyStatus(status), EndReason(reason), items, USAGE)


def answer(text: str, item_id: str = "a", **fields: Any) -> Message:
    return Message(id=item_id, role="assistant", text=text, **fields)


def call(arguments: str, **fields: Any) -> FunctionCall:
    return FunctionCall(id="f", call_id="c", name="weather", arguments=arguments, **fields)


def test_the_greeting() -> None:
    conversation = Conversation(SessionResource(id="sess_1", model="pocket"), History())
    assert types(conversation.greet()) == ["session.created", "conversation.created"]


def test_a_text_turn() -> None:
    stage = Stage()
    added = stage.says("Hello")
    assert types(added) == ["conversation.item.added", "conversation.item.done"]
    start = stage.starts()
    told = stage.tells(
        start.response_id,
        ReplyStarted(10),
        ReplyTextDelta("a", "Hi "),
        ReplyTextDelta("a", "you"),
        done(answer("Hi you")),
    )
    assert types(told) == TEXT_TURN
    stage.grammar.at_rest()
    ended = told[-1]
    assert isinstance(ended, server.ResponseDone)
    response = ended.response
    assert (response.status, response.status_details) == ("completed", None)
    assert response.conversation_id == stage.conversation.conversation_id
    assert response.usage is not None
    assert response.usage.total_tokens == 13
    assert response.usage.input_token_details.cached_tokens == 6
    assert msgspec.to_builtins(response.kv) == {
        "new": 4, "prefilled": 4, "resident": 6, "recomputed": 0, "host": 0, "disk": 0, "restore_ms": 0.0,
    }  # fmt: skip
    shown = next(event for event in told if isinstance(event, server.ItemAdded))
    assert isinstance(added[0], server.ItemAdded)
    assert shown.previous_item_id == added[0].item.id


def test_a_call() -> None:
    stage = Stage()
    start = stage.starts()
    told = stage.tells(
        start.response_id,
        ReplyStarted(10),
        ReplyCallStarted("f", "c", "weather"),
        ReplyArgumentsDelta("f", "c", '{"city":'),
        ReplyArgumentsDelta("f", "c", '"Rome"}'),
        ReplyCallDone("f", "c", "weather", '{"city":"Rome"}'),
        done(call('{"city":"Rome"}')),
    )
    assert types(told) == ["response.created", *CALL, "response.done"]
    stage.grammar.at_rest()


def test_reasoning_is_told_and_is_part_of_no_item() -> None:
    stage = Stage()
    start = stage.starts()
    told = stage.tells(
        start.response_id, ReplyStarted(3), ReplyReasoningDelta("Hm."), ReplyTextDelta("a", "Hi")
    )
    (thought,) = [event for event in told if isinstance(event, server.ReasoningDelta)]
    assert (thought.delta, thought.response_id) == ("Hm.", start.response_id)
    (ended,) = [
        event
        for event in stage.tells(start.response_id, done(answer("Hi")))
        if isinstance(event, server.ResponseDone)
    ]
    assert [item.text for item in ended.response.output if isinstance(item, MessageItem)] == ["Hi"]


def test_text_before_a_call() -> None:
    stage = Stage()
    start = stage.starts()
    told = stage.tells(
        start.response_id,
        ReplyStarted(10),
        ReplyTextDelta("a", "Let me "),
        ReplyTextDelta("a", "look."),
        ReplyCallStarted("f", "c", "weather"),
        ReplyArgumentsDelta("f", "c", "{"),
        ReplyArgumentsDelta("f", "c", "}"),
        ReplyCallDone("f", "c", "weather", "{}"),
        done(answer("Let me look."), call("{}")),
    )
    assert types(told) == [*TEXT_TURN[:-1], *CALL, "response.done"]
    assert isinstance(told[-1], server.ResponseDone)
    assert [item.status for item in told[-1].response.output] == ["completed", "completed"]
    indices = {event.output_index for event in told if isinstance(event, server.OutputFrame)}
    assert indices == {0, 1}


@pytest.mark.parametrize(
    ("status", "reason", "told_reason"),
    [
        ("cancelled", "client_cancelled", "client_cancelled"),
        ("incomplete", "max_output_tokens", "max_output_tokens"),
    ],
)
def test_a_reply_that_was_cut_is_closed_and_says_why(status: str, reason: str, told_reason: str) -> None:
    stage = Stage()
    start = stage.starts()
    cut = answer("Hi you", complete=False)
    told = stage.tells(
        start.response_id,
        ReplyStarted(10),
        ReplyTextDelta("a", "Hi "),
        ReplyTextDelta("a", "you"),
        done(cut, status=status, reason=reason),
    )
    assert types(told) == TEXT_TURN
    assert isinstance(told[-1], server.ResponseDone)
    response = told[-1].response
    assert response.status == status
    assert response.status_details is not None
    assert (response.status_details.type, response.status_details.reason) == (status, told_reason)
    assert [item.status for item in response.output] == ["incomplete"]
    stage.grammar.at_rest()


def test_a_cut_call_is_incomplete() -> None:
    stage = Stage()
    start = stage.starts()
    told = stage.tells(
        start.response_id,
        ReplyStarted(10),
        ReplyCallStarted("f", "c", "weather"),
        ReplyArgumentsDelta("f", "c", '{"ci'),
        done(call('{"ci', complete=False), status="cancelled", reason="client_cancelled"),
    )
    assert isinstance(told[-1], server.ResponseDone)
    (item,) = told[-1].response.output
    assert (item.status, getattr(item, "arguments", None)) == ("incomplete", '{"ci')
    stage.grammar.at_rest()


def test_cancelled_before_a_word_still_ends() -> None:
    stage = Stage()
    start = stage.starts()
    told = stage.tells(start.response_id, done(status="cancelled", reason="client_cancelled"))
    assert types(told) == ["response.created", "response.done"]
    stage.grammar.at_rest()


def test_a_failed_turn_is_taken_back() -> None:
    stage = Stage()
    stage.says("Hello")
    start = stage.starts()
    failure = ReplyDone(
        ReplyStatus.FAILED,
        EndReason.ERROR,
        (answer("Hi", complete=False),),
        USAGE,
        EngineUnavailable("The engine died"),
    )
    told = stage.tells(start.response_id, ReplyStarted(10), ReplyTextDelta("a", "Hi"), failure)
    assert types(told)[-4:] == [
        "response.output_item.done",
        "conversation.item.done",
        "conversation.item.deleted",
        "response.done",
    ]
    assert isinstance(told[-1], server.ResponseDone)
    details = told[-1].response.status_details
    assert details is not None and details.error is not None
    assert (details.type, details.error.code) == ("failed", "engine_unavailable")
    assert [item.id for item in stage.grammar.items] == [item.id for item in stage.history.items()]
    stage.grammar.at_rest()


def test_a_turn_that_could_not_begin_is_an_error_event_alone() -> None:
    stage = Stage()
    start = stage.starts()
    told = stage.conversation.failed(start.response_id, PromptTooLong("too long"))
    stage.grammar.feed_all(told)
    (event,) = told
    assert isinstance(event, server.ErrorEvent)
    assert (event.error.code, event.error.event_id) == ("context_length_exceeded", "asked")
    stage.grammar.at_rest()
    stage.starts()


def test_a_turn_that_broke_midway_is_closed() -> None:
    stage = Stage()
    start = stage.starts()
    stage.tells(start.response_id, ReplyStarted(10), ReplyTextDelta("a", "Hi"))
    told = stage.conversation.failed(start.response_id, RuntimeError("a secret"))
    stage.grammar.feed_all(told)
    assert isinstance(told[-1], server.ResponseDone)
    details = told[-1].response.status_details
    assert details is not None and details.error is not None
    assert details.error.code == "internal_error"
    assert "secret" not in details.error.message
    stage.grammar.at_rest()


def test_one_response_writes_the_conversation_at_a_time() -> None:
    stage = Stage()
    first = stage.starts()
    error = stage.refused("response.create", event_id="e7")
    assert error.code == "conversation_already_has_active_response"
    assert (error.type, error.event_id) == ("invalid_request_error", "e7")
    stage.tells(first.response_id, ReplyStarted(1), done())
    stage.starts()


def test_out_of_band_runs_beside_and_touches_nothing() -> None:
    stage = Stage()
    stage.says("Hello", item={"id": "u1"})
    first = stage.starts()
    beside = stage.starts(
        conversation="none",
        metadata={"topic": "aside"},
        instructions="Classify.",
        input=[{"type": "item_reference", "id": "u1"}],
    )
    assert beside.request.out_of_band
    assert beside.request.input == (stage.history.get("u1"),)
    told = stage.tells(
        beside.response_id, ReplyStarted(3), ReplyTextDelta("b", "Fine"), done(answer("Fine", "b"))
    )
    assert not [kind for kind in types(told) if kind.startswith("conversation.")]
    assert isinstance(told[-1], server.ResponseDone)
    assert told[-1].response.conversation_id is None
    assert told[-1].response.metadata == {"topic": "aside"}
    assert [item.id for item in stage.grammar.items] == ["u1"]
    stage.tells(first.response_id, ReplyStarted(1), done())
    stage.grammar.at_rest()


def test_responses_beside_each_other_are_limited() -> None:
    stage = Stage()
    for _ in range(3):
        stage.starts(conversation="none")
    assert stage.refused("response.create").code == "too_many_responses"


def test_cancelling_nothing_changes_nothing() -> None:
    stage = Stage()
    assert stage.refused("response.cancel", event_id="e1").code == "response_cancel_not_active"
    assert stage.refused("response.cancel", response_id="resp_x").code == "response_cancel_not_active"
    stage.starts(conversation="none")
    assert stage.refused("response.cancel").code == "response_cancel_not_active"


def test_cancel_names_the_response_and_acts_once() -> None:
    stage = Stage()
    aside = stage.starts(conversation="none")
    main = stage.starts()
    assert stage.does({"type": "response.cancel"}) == [CancelResponse(main.response_id)]
    assert stage.does({"type": "response.cancel"}) == []
    by_id = {"type": "response.cancel", "response_id": aside.response_id}
    assert stage.does(by_id) == [CancelResponse(aside.response_id)]


def test_items_are_inserted_and_what_is_before_them_is_shown() -> None:
    stage = Stage()
    stage.says("one", item={"id": "u1"})
    for item_id, after, told in (("u2", None, "u1"), ("u0", "root", None), ("u15", "u1", "u1")):
        behind = {} if after is None else {"previous_item_id": after}
        added = stage.says("x", item={"id": item_id}, **behind)
        assert isinstance(added[0], server.ItemAdded)
        assert added[0].previous_item_id == told
    assert [item.id for item in stage.history.items()] == ["u0", "u1", "u15", "u2"]
    assert [item.id for item in stage.grammar.items] == ["u0", "u1", "u15", "u2"]


def test_an_item_added_during_a_reply_follows_it() -> None:
    stage = Stage()
    stage.says("one", item={"id": "u1"})
    start = stage.starts()
    turn = stage.history.prepare(TurnRequest.checked()).turn
    early = stage.says("two", item={"id": "u2"})
    stage.tells(start.response_id, ReplyStarted(5), ReplyTextDelta("a", "Hi"))
    late = stage.says("three", item={"id": "u3"})
    assert isinstance(early[0], server.ItemAdded)
    assert isinstance(late[0], server.ItemAdded)
    assert (early[0].previous_item_id, late[0].previous_item_id) == ("u1", "u2")
    said = answer("Hi")
    stage.history.commit_turn(turn, Draft(None, (), 0, ids_of([])), TurnReply((said,), ids_of([1]), True))
    stage.tells(start.response_id, done(said))
    assert [item.id for item in stage.history.items()] == ["u1", "a", "u2", "u3"]
    assert [item.id for item in stage.grammar.items] == ["u1", "a", "u2", "u3"]


def test_retrieve_and_delete() -> None:
    stage = Stage()
    stage.says("one", item={"id": "u1"})
    (found,) = stage.sends("conversation.item.retrieve", item_id="u1")
    assert isinstance(found, server.ItemRetrieved)
    assert msgspec.to_builtins(found.item) == {
        "type": "message",
        "id": "u1",
        "object": "realtime.item",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "one"}],
    }
    assert types(stage.sends("conversation.item.delete", item_id="u1")) == ["conversation.item.deleted"]
    for kind in ("conversation.item.retrieve", "conversation.item.delete"):
        error = stage.refused(kind, item_id="u1", event_id="e9")
        assert (error.code, error.param, error.event_id) == ("item_not_found", "item_id", "e9")


def test_items_are_read_upwards_from_the_last() -> None:
    stage = Stage()
    assert stage.refused("conversation.item.retrieve").code == "item_not_found"
    for name in ("u1", "u2", "u3"):
        stage.says(name, item={"id": name})
    for asked, item, previous in ((None, "u3", "u2"), ("u2", "u2", "u1"), ("u1", "u1", None)):
        (found,) = stage.sends("conversation.item.retrieve", item_id=asked)
        assert isinstance(found, server.ItemRetrieved)
        assert (found.item.id, found.previous_item_id) == (item, previous)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"item": {"id": "u1"}}, "item_already_exists"),
        ({"item": {"id": "u9"}, "previous_item_id": "nobody"}, "item_not_found"),
        ({"item": {"id": "root"}}, "item_already_exists"),
    ],
)
def test_an_item_at_an_invalid_place_is_refused(fields: dict[str, Any], code: str) -> None:
    stage = Stage()
    stage.says("one", item={"id": "u1"})
    (event,) = stage.says("two", **fields)
    assert isinstance(event, server.ErrorEvent)
    assert event.error.code == code
    assert [item.id for item in stage.history.items()] == ["u1"]


def test_the_items_of_a_running_reply_are_read_as_they_are_so_far() -> None:
    stage = Stage()
    stage.says("one", item={"id": "u1"})
    start = stage.starts()
    stage.history.prepare(TurnRequest.checked())
    stage.tells(start.response_id, ReplyStarted(3), ReplyTextDelta("a", "So"))
    stage.says("two", item={"id": "u2"})
    stage.tells(start.response_id, ReplyTextDelta("a", " far"), ReplyCallStarted("b", "c", "f"))
    walk, item_id = [], None
    while walk == [] or item_id is not None:
        (found,) = stage.sends("conversation.item.retrieve", **({"item_id": item_id} if item_id else {}))
        assert isinstance(found, server.ItemRetrieved)
        walk.append((found.item.id, found.item.status))
        item_id = found.previous_item_id
    assert walk == [("u2", "completed"), ("b", "in_progress"), ("a", "completed"), ("u1", "completed")]
    (found,) = stage.sends("conversation.item.retrieve", item_id="a")
    assert isinstance(found, server.ItemRetrieved) and isinstance(found.item, MessageItem)
    assert found.item.text == "So far"


def test_what_cannot_be_done_with_an_item_of_a_running_reply_is_refused_by_name() -> None:
    stage = Stage()
    start = stage.starts()
    stage.history.prepare(TurnRequest.checked())
    stage.tells(
        start.response_id, ReplyStarted(3), ReplyTextDelta("a", "So"), ReplyCallStarted("b", "c", "f")
    )
    busy = "conversation_already_has_active_response"
    error = stage.refused("conversation.item.delete", item_id="a")
    assert (error.code, error.param) == (busy, "item_id")
    (event,) = stage.says("between", item={"id": "u1"}, previous_item_id="a")
    assert isinstance(event, server.ErrorEvent)
    assert (event.error.code, event.error.param) == (busy, "previous_item_id")
    (added, _) = stage.says("behind", item={"id": "u1"}, previous_item_id="b")
    assert isinstance(added, server.ItemAdded) and added.previous_item_id == "b"


def test_session_update_changes_what_is_there_and_clears_with_null() -> None:
    stage = Stage(instructions="Be kind.", temperature=0.7)
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    stage.sends(
        "session.update",
        session={"type": "realtime", "tools": [tool], "max_output_tokens": 50, "audio": {"input": None}},
    )
    session = stage.conversation.session
    assert (session.instructions, session.max_output_tokens, session.temperature) == ("Be kind.", 50, 0.7)
    assert not hasattr(session, "audio")
    assert [known.name for known in stage.history.preamble.tools] == ["weather"]
    stage.sends("session.update", session={"tools": [], "instructions": "", "max_output_tokens": None})
    session = stage.conversation.session
    assert (session.tools, session.instructions, session.max_output_tokens) == ([], "", "inf")
    assert stage.history.preamble.tools == ()


def test_what_is_not_served_is_listed_and_the_rest_is_applied() -> None:
    stage = Stage()
    tool = {"type": "function", "name": "weather"}
    asked = {
        "type": "realtime",
        "tools": [tool],
        "output_modalities": ["audio"],
        "audio": {"output": {"voice": "ash"}, "input": {"turn_detection": {"type": "semantic_vad"}}},
        "tracing": "auto",
        "include": None,
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low"},
    }
    (updated,) = stage.sends("session.update", session=asked)
    assert isinstance(updated, server.SessionUpdated)
    assert updated.session.unserved == ["audio", "output_modalities", "reasoning", "tracing"]
    shown = msgspec.to_builtins(updated.session)
    assert [known["name"] for known in shown["tools"]] == ["weather"]
    assert shown["output_modalities"] == ["text"], "what is in force"
    assert not {"audio", "tracing", "reasoning"} & shown.keys(), "no echo"
    (updated,) = stage.sends("session.update", session={"instructions": "Be kind."})
    assert isinstance(updated, server.SessionUpdated)
    assert "unserved" not in msgspec.to_builtins(updated.session), "it names fields of this update alone"
    for changed in (
        {"prompt": {"id": "p"}},
        {"type": "transcription"},
        {"tools": [{"type": "mcp", "server_label": "s"}]},
        {"tool_choice": {"type": "mcp", "server_label": "s"}},
        {"model": "another"},
    ):
        event = {"type": "session.update", "session": {**changed, "instructions": "Not this."}}
        try:
            (effect,) = stage.does(event)
        except FieldUnsupported:
            continue
        assert isinstance(effect, server.ErrorEvent), changed
    assert stage.conversation.session.instructions == "Be kind."


def test_a_response_lists_what_of_it_is_not_served() -> None:
    stage = Stage()
    start = stage.starts(output_modalities=["audio"], audio={"output": {}})
    note = stage.conversation.note(start.response_id)
    created, *_, ended = stage.tells(start.response_id, ReplyStarted(10), done())
    assert isinstance(created, server.ResponseCreated) and isinstance(ended, server.ResponseDone)
    assert created.response.unserved == ["audio", "output_modalities"]
    assert ended.response.output_modalities == ["text"] and ended.response.unserved is msgspec.UNSET
    stage.conversation.revive("resp_again", None, note)
    created = stage.conversation.reply("resp_again", ReplyStarted(10))[0]
    assert isinstance(created, server.ResponseCreated)
    assert created.response.unserved == ["audio", "output_modalities"]


def test_one_call_at_a_time_is_a_rule_of_the_session_or_of_a_response() -> None:
    stage = Stage()
    assert stage.starts().request.parallel_calls
    stage = Stage()
    assert not stage.starts(parallel_tool_calls=False).request.parallel_calls
    stage = Stage()
    (updated,) = stage.sends("session.update", session={"parallel_tool_calls": False})
    assert isinstance(updated, server.SessionUpdated)
    assert updated.session.parallel_tool_calls is False and updated.session.unserved is msgspec.UNSET
    assert not stage.starts().request.parallel_calls
    stage = Stage()
    stage.sends("session.update", session={"parallel_tool_calls": False})
    assert stage.starts(parallel_tool_calls=True).request.parallel_calls


def test_a_session_may_take_another_name_of_its_model() -> None:
    stage = Stage()
    (updated,) = stage.sends("session.update", session={"model": "gpt-realtime"})
    assert isinstance(updated, server.SessionUpdated) and updated.session.model == "gpt-realtime"
    error = stage.refused("session.update", session={"model": "another"})
    assert error.code == "invalid_value" and "'gpt-realtime'" in error.message and "'pocket'" in error.message
    assert stage.conversation.session.model == "gpt-realtime"


def test_session_update_is_all_or_nothing() -> None:
    stage = Stage()
    tool = {"type": "function", "name": "weather"}
    before = stage.conversation.session
    error = stage.refused("session.update", session={"instructions": "New", "tools": [tool, tool]})
    assert error.code == "invalid_value"
    other = stage.refused("session.update", session={"model": "another", "instructions": "New"})
    assert (other.code, other.param) == ("invalid_value", "session.model")
    assert stage.conversation.session == before
    assert stage.history.preamble.instructions == ""
    stage.sends("session.update", session={"model": "pocket"})


def test_a_response_takes_its_own_values_before_the_sessions() -> None:
    stage = Stage()
    stage.sends(
        "session.update",
        session={"temperature": 0.5, "top_k": 7, "seed": 1, "stop": ["\n"], "max_output_tokens": 9},
    )
    plain = stage.starts(conversation="none").request
    sampling = plain.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 1)
    assert (plain.stop, plain.max_output_tokens, plain.instructions) == (("\n",), 9, None)
    own = stage.starts(conversation="none", temperature=0, seed=2, max_output_tokens="inf", stop=[]).request
    assert (own.sampling.temperature, own.sampling.top_k, own.sampling.seed) == (0.0, 7, 2)
    assert (own.max_output_tokens, own.stop) == (None, ())


def test_every_sampling_field_is_the_sessions_or_the_responses_own() -> None:
    own = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "seed": 1,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "logit_bias": {"5": 2.0}, "bad_words": [[1, 2], "damn"], "top_logprobs": 3,
        "stop": ["x"], "stop_token_ids": [9], "min_output_tokens": 2, "max_output_tokens": 8,
    }  # fmt: skip
    assert set(own) == set(SamplingFields.__struct_fields__)
    stage = Stage()
    stage.sends("session.update", session=own)
    inherited = stage.starts(conversation="none").request
    assert inherited == Stage().starts(conversation="none", **own).request
    assert stage.starts(conversation="none", **dict.fromkeys(own)).request == inherited
    assert inherited.sampling == Sampling(0.5, 7, 0.9, 0.1, 0.8, 1.1, 1, 0.5, -0.5, ((5, 2.0),), ((1, 2),), 3)
    assert (inherited.banned, inherited.stop, inherited.stop_ids) == (("damn",), ("x",), (9,))
    assert (inherited.min_output_tokens, inherited.max_output_tokens) == (2, 8)
    (cleared,) = stage.sends("session.update", session=dict.fromkeys(own))
    assert isinstance(cleared, server.SessionUpdated)
    assert cleared.session == SessionResource(id="sess_1", model="pocket")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_output_tokens": 5, "max_output_tokens": 4}, "min_output_tokens"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"bad_words": [[VOCAB]]}, "bad_words"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ],
)
def test_an_update_that_no_response_could_follow_is_refused_at_once(
    fields: dict[str, Any], param: str
) -> None:
    """Contradictions and ids beyond the vocabulary: by name, where they are said, and nothing is changed."""
    stage = Stage()
    before = stage.conversation.session
    error = stage.refused("session.update", session=fields)
    assert (error.code, error.param) == ("invalid_value", f"session.{param}")
    assert stage.conversation.session == before
    refusal = stage.refused("response.create", response=fields)
    assert (refusal.code, refusal.param) == ("invalid_value", f"response.{param}")
    assert not stage.conversation.running


def test_tools_that_the_model_would_not_see_are_refused_and_the_session_goes_on() -> None:
    stage = Stage(RequestBounds(tools=False))
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
    error = stage.refused("session.update", session={"tools": tools})
    assert error.param == "session.tools" and "--tool-fallback" in error.message
    error = stage.refused("response.create", response={"tools": tools})
    assert error.param == "response.tools" and "--tool-fallback" in error.message
    stage.sends("session.update", session={"tools": [], "instructions": "Be brief."})
    assert stage.starts().request.tools is None


def test_logprobs_come_with_their_text() -> None:
    stage = Stage()
    start = stage.starts(top_logprobs=1)
    hi = TokenScore(5, "Hi ", -0.5, (TokenScore(6, "Ho", -0.4),))
    you = TokenScore(7, "you", -0.1)
    told = stage.tells(
        start.response_id,
        ReplyStarted(10),
        ReplyTextDelta("a", "Hi ", (hi,)),
        ReplyTextDelta("a", "you", (you,)),
        ReplyDone(ReplyStatus.COMPLETED, EndReason.STOP, (answer("Hi you"),), USAGE),
    )
    first, second = (event for event in told if isinstance(event, server.TextDelta))
    (whole,) = (event for event in told if isinstance(event, server.TextDone))
    assert [one.token for one in first.logprobs] == ["Hi "]
    assert msgspec.to_builtins(first.logprobs[0]) == {
        "token": "Hi ", "id": 5, "logprob": -0.5, "top_logprobs": [{"token": "Ho", "id": 6, "logprob": -0.4}]
    }  # fmt: skip
    assert whole.logprobs == first.logprobs + second.logprobs


def test_the_receipt_says_why_more_was_computed() -> None:
    stage = Stage()
    start = stage.starts()
    usage = TurnUsage(miss_reason=MissReason.HISTORY_EDITED)
    told = stage.tells(
        start.response_id, ReplyStarted(1), ReplyDone(ReplyStatus.COMPLETED, EndReason.STOP, (), usage)
    )
    assert isinstance(told[-1], server.ResponseDone)
    assert msgspec.to_builtins(told[-1].response)["kv"]["miss_reason"] == "history_edited"
