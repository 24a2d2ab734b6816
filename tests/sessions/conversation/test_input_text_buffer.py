"""The input text buffer against a plain string: append, replace, clear, commit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sessions.conversation import input_text_buffer
from holdfast.sessions.conversation.input_text_buffer import InputTextBuffer
from holdfast.sessions.conversation.items import FunctionCallOutput
from holdfast.sessions.errors import InputInvalid

moves = st.lists(
    st.tuples(st.sampled_from(["append", "replace", "clear"]), st.integers(0, 30), st.text(max_size=8))
)


@given(moves)
def test_it_holds_what_a_string_would(steps: list[tuple[str, int, str]]) -> None:
    buffer, shadow = InputTextBuffer(), ""
    for verb, start, text in steps:
        if verb == "append":
            buffer.append(text)
            shadow += text
        elif verb == "clear":
            buffer.clear()
            shadow = ""
        elif start > len(shadow):
            with pytest.raises(InputInvalid) as refused:
                buffer.replace(start, text)
            assert refused.value.param == "from"
        else:
            buffer.replace(start, text)
            shadow = shadow[:start] + text
        assert buffer.text == shadow
    if shadow:
        assert buffer.commit().text == shadow
    with pytest.raises(InputInvalid):
        buffer.commit()


def test_the_role_comes_with_the_first_piece_and_stays() -> None:
    buffer = InputTextBuffer()
    buffer.append("Be ", "system")
    buffer.append("brief.")
    with pytest.raises(InputInvalid):
        buffer.append("no", "user")
    message = buffer.commit()
    assert (message.role, message.text) == ("system", "Be brief.")
    buffer.append("Hello")
    assert buffer.commit().role == "user"


def test_the_item_keeps_its_id_while_its_text_grows() -> None:
    buffer = InputTextBuffer()
    buffer.append("a")
    first = buffer.item()
    buffer.append("b")
    assert first is not None and buffer.commit().id == first.id


def test_a_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_text_buffer, "MAX_CHARACTERS", 3)
    buffer = InputTextBuffer()
    buffer.append("abc")
    with pytest.raises(InputInvalid):
        buffer.append("d")
    assert buffer.text == "abc"


def test_the_buffer_may_hold_what_a_tool_answers_be_it_nothing() -> None:
    buffer = InputTextBuffer()
    buffer.append("", call_id="call_1")
    begun = buffer.item()
    assert isinstance(begun, FunctionCallOutput) and (begun.call_id, begun.output) == ("call_1", "")
    buffer.append("21 ", call_id="call_1")
    buffer.append("degrees")
    buffer.replace(3, "°")
    assert buffer.commit() == FunctionCallOutput(id=begun.id, call_id="call_1", output="21 °")
    assert buffer == InputTextBuffer()
    buffer.append("", call_id="call_2")
    nothing = buffer.commit()
    assert isinstance(nothing, FunctionCallOutput) and nothing.output == ""


@pytest.mark.parametrize(
    ("first", "then", "param"),
    [
        ({}, {"role": "user", "call_id": "c"}, "call_id"),
        ({"call_id": "c"}, {"role": "user"}, "role"),
        ({"call_id": "c"}, {"call_id": "d"}, "call_id"),
        ({"role": "user"}, {"call_id": "c"}, "call_id"),
        ({"role": "user"}, {"role": "system"}, "role"),
    ],
)
def test_text_of_one_kind_takes_no_other(first: dict, then: dict, param: str) -> None:
    buffer = InputTextBuffer()
    if first:
        buffer.append("a", **first)
    before = replace(buffer)
    with pytest.raises(InputInvalid) as refused:
        buffer.append("b", **then)
    assert refused.value.param == param and buffer == before
