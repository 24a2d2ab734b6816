"""Calls with odd JSON as arguments: templates get an object where they can write it, else the text."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message

from ..session_stage import LANGUAGE, renderer_of

DEEP = '{"a":' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize(
    "arguments",
    ['{"a":"\\ud800"}', '{"\\udfff":1}', DEEP, '{"a":' + "9" * 5000 + "}", '{"a":1e999}', "[1]", "none", ""],
)
def test_a_conversation_goes_on_whatever_the_arguments_of_a_call_are(arguments: str) -> None:
    history = History()
    history.insert(Message(id="1", role="user", text="Go"))
    history.insert(FunctionCall(id="2", call_id="c", name="f", arguments=arguments))
    history.insert(FunctionCallOutput(id="3", call_id="c", output="seen"))
    draft = renderer_of(LANGUAGE, datetime(2026, 1, 1)).draft(history.script())
    text = LANGUAGE.tokenizer.backend.decode(draft.tokens().tolist())
    assert "seen" in text
    assert "Infinity" in text or arguments in text or json.dumps(arguments) in text
