"""Bodies of Messages become transcripts and requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.gateway.messages import frames
from holdfast.gateway.messages.translate import ask_of, begun, transcript_of
from holdfast.runtime.verbs import GrammarKind
from holdfast.sdk.errors import FieldInvalid, FieldUnsupported
from holdfast.sessions.conversation.continuation import GivenConversation
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Item, Message, Preamble
from holdfast.sessions.errors import GrammarInvalid
from holdfast.sessions.turn.request import UNBOUNDED

from .messages_stage import WEATHER

HI: Any = {"role": "user", "content": "Hi"}


def body_of(*messages: Any, **fields: Any) -> frames.MessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": messages or [HI], **fields}
    return frames.REQUEST.decode(msgspec.json.encode(body))


def shapes(*messages: Any) -> list[tuple[str, ...]]:
    """The items without their ids."""
    return [_shape(item) for item in transcript_of(body_of(*messages)).items]


def _shape(item: Item) -> tuple[str, ...]:
    match item:
        case Message():
            return (item.role, item.text)
        case FunctionCall():
            return ("call", item.call_id, item.name, item.arguments)
        case FunctionCallOutput():
            return ("output", item.call_id, item.output)


def text(told: str, **more: Any) -> Any:
    return {"type": "text", "text": told, **more}


def call(call_id: str = "c1", given: Any = None) -> Any:
    return {"type": "tool_use", "id": call_id, "name": "get_weather", "input": given or {}}


def output(call_id: str = "c1", **more: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


def assistant(*blocks: Any) -> Any:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> Any:
    return {"role": "user", "content": list(blocks)}


def test_system_as_text_or_blocks() -> None:
    blocks = [text("Be brief.\n", cache_control={"type": "ephemeral"}), text("Be kind.")]
    for system in ("Be brief.\nBe kind.", blocks):
        assert transcript_of(body_of(HI, system=system)).preamble.instructions == "Be brief.\nBe kind."
    assert transcript_of(body_of(HI)).preamble.instructions == ""


def test_each_run_of_text_call_and_output_is_an_item() -> None:
    assert shapes(
        user(text("What is "), text("the weather?")),
        assistant(
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            text("I look."),
            call("c1", {"city": "Rome"}),
            call("c2", {"city": "Bonn"}),
            {"type": "redacted_thinking", "data": "x"},
        ),
        user(
            output("c2", content=[text("rain"), text("y")]),
            output("c1", content="no", is_error=True),
            text("And?"),
        ),
        {"role": "system", "content": "Be brief."},
        HI,
    ) == [
        ("user", "What is the weather?"),
        ("assistant", "I look."),
        ("call", "c1", "get_weather", '{"city":"Rome"}'),
        ("call", "c2", "get_weather", '{"city":"Bonn"}'),
        ("output", "c2", "rainy"),
        ("output", "c1", "Error: no"),
        ("user", "And?"),
        ("system", "Be brief."),
        ("user", "Hi"),
    ]


def test_an_answer_without_content_comes_back_as_nothing() -> None:
    assert shapes(HI, assistant(), HI) == [("user", "Hi"), ("user", "Hi")]
    assert shapes(user(text("Hi")), assistant(call()), user(output())) == [
        ("user", "Hi"),
        ("call", "c1", "get_weather", "{}"),
        ("output", "c1", ""),
    ]


@pytest.mark.parametrize(
    "given", [{"b": [1, 2.5, None], "a": "é"}, {"a": "é", "b": [1, 2.5, None]}], ids=["same", "sorted"]
)
def test_a_call_that_comes_back_as_an_object_is_the_call_that_was_made(given: Any) -> None:
    said = FunctionCall(
        id="i", call_id="c1", name="get_weather", arguments='{"b": [1, 2.5, null], "a": "\\u00e9"}'
    )
    (back,) = transcript_of(body_of(assistant(call("c1", given)), HI)).items[:1]
    one, other = (GivenConversation(b"", Preamble(), [item]) for item in (said, back))
    assert one.digest(1) == other.digest(1) and one.shared(Preamble(), [back]) == 1


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user(output())], "messages[0].content[0].tool_use_id"),
        ([assistant(call()), user(output(), output())], "messages[1].content[1].tool_use_id"),
        ([user(call())], "messages[0].content[0].type"),
        ([assistant(call(), output()), HI], "messages[0].content[1].type"),
        ([user({"type": "thinking", "thinking": "x", "signature": ""})], "messages[0].content[0].type"),
        ([assistant({**call(), "input": [1]}), HI], "messages[0].content[0].input"),
        ([assistant({**call(), "input": "{}"}), HI], "messages[0].content[0].input"),
        ([HI, user()], "messages[1].content"),
    ],
)
def test_blocks_where_they_may_not_be(messages: list[Any], param: str) -> None:
    with pytest.raises(FieldInvalid) as refused:
        transcript_of(body_of(*messages))
    assert refused.value.param == param


def test_a_call_with_a_deep_input_is_refused() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(FieldInvalid):
        transcript_of(body_of(assistant(call("c1", deep)), HI))


def test_the_text_that_the_reply_continues() -> None:
    assert begun(body_of(HI)) == begun(body_of(HI, assistant())) == ""
    begins: Any = assistant({"type": "thinking", "thinking": "Hm", "signature": ""}, text("I "), text("am"))
    for message in (begins, {"role": "assistant", "content": "I am"}):
        body = body_of(HI, message)
        assert begun(body) == "I am"
        assert [_shape(item) for item in transcript_of(body).items] == [("user", "Hi")]
        assert begun(body_of(HI, message, tools=[WEATHER], tool_choice={"type": "none"})) == "I am"
        for fields in ({"tools": [WEATHER]}, {"output_format": {"type": "json_schema", "schema": {}}}):
            with pytest.raises(FieldUnsupported) as refused:
                begun(body_of(HI, message, **fields))
            assert refused.value.param == "messages[1].role"
    for message in (assistant(text("I "), call()), assistant(text("I am "))):
        with pytest.raises(FieldInvalid):
            begun(body_of(HI, message))


def request_of(**fields: Any) -> Any:
    return ask_of(body_of(HI, **fields), UNBOUNDED, {"temperature": 0.5, "top_k": 3}).request


def test_sampling_overrides_the_models_own() -> None:
    assert request_of().sampling.temperature == 0.5
    given = request_of(temperature=0.25, top_p=0.75, top_k=7, stop_sequences=["x"])
    sampling = given.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.75, 7)
    assert (given.stop, given.max_output_tokens) == (("x",), 9)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None)),
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any"}, ("required", None)),
        ({"type": "tool", "name": "get_weather"}, ("required", "get_weather")),
        ({"type": "none"}, ("none", None)),
    ],
)
def test_choices_of_tools(choice: Any, expected: tuple[str, str | None]) -> None:
    request = request_of(tools=[WEATHER], tool_choice=choice)
    assert (request.tool_choice, request.tool) == expected
    assert request.parse_calls == (expected[0] != "none")


def test_one_call_at_a_time() -> None:
    for kind in ("auto", "any"):
        for disabled in (False, True):
            choice = {"type": kind, "disable_parallel_tool_use": disabled}
            body = body_of(HI, tools=[WEATHER], tool_choice=choice)
            assert ask_of(body, UNBOUNDED, {}).request.parallel_calls != disabled


def test_formats_in_either_field() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert request_of(**fields).format.kind is GrammarKind.JSON
    with pytest.raises(GrammarInvalid):
        request_of(output_config={"format": form}, output_format=form)
