"""Replies that a grammar binds from their first token, by models with templates that open their reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.runtime.verbs import Grammar, GrammarKind
from holdfast.sessions.conversation.items import FunctionCall, Message, Tool
from holdfast.sessions.tools.formats import Forms
from holdfast.sessions.tools.forms import ReasoningForm
from holdfast.sessions.tools.grammar import json_format
from holdfast.sessions.turn.reply_reader import ReplyReader
from holdfast.sessions.turn.request import TurnRequest

from ..session_stage import LANGUAGE

ADD = Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OBJECT = json_format({"type": "object"}, strict=True, param="format")
YES = Grammar(GrammarKind.CHOICE, '["yes"]')


def read(text: str, reasoning: ReasoningForm, **asked: Any) -> list[Any]:
    language = replace(LANGUAGE, forms=Forms(reasoning=reasoning))
    request = TurnRequest.checked(offered=[ADD], **asked)
    reader = ReplyReader(language, request, frozenset(), "response")
    reader.feed(LANGUAGE.tokenizer.encode(text, leads=False))
    reader.finish(cut=False)
    return list(reader.items())


@pytest.mark.parametrize("reasoning", list(ReasoningForm))
def test_what_a_grammar_binds_is_no_reasoning(reasoning: ReasoningForm) -> None:
    (call,) = read(CALL, reasoning, tool_choice="required")
    assert isinstance(call, FunctionCall) and call.arguments == '{"a": 1}'
    for text, bound in (('{"b": 2}', OBJECT), ("yes", YES)):
        (message,) = read(text, reasoning, format=bound)
        assert isinstance(message, Message) and message.text == text


def test_free_words_are_reasoning_up_to_its_end() -> None:
    (message,) = read("Hm.</think>Yes.", ReasoningForm.OPENED)
    assert message.text == "Yes."
    assert not read("Hm.", ReasoningForm.OPENED)
