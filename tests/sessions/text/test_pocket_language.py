"""The pocket model's own tokenizer and template, as shipped."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import holdfast
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message, Preamble, Tool
from holdfast.sessions.text.language import Language, TemplateClass

from ..session_stage import renderer_of

FOLDER = Path(holdfast.__file__).parent / "runtime" / "pocket"


@pytest.fixture(scope="module")
def language() -> Language:
    return Language.load(FOLDER)


def test_its_template_is_append_only_and_takes_tools(language: Language) -> None:
    assert language.report.kind is TemplateClass.APPEND_ONLY
    assert language.report.tools
    assert language.report.closing == language.tokenizer.backend.token_to_id("<|im_end|>")
    assert language.end_ids([0]) == {0, language.report.closing}


def test_a_whole_conversation_equals_transformers(language: Language) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = Tool(name="weather", description="Tells the weather of a city.", parameters=parameters)
    history = History(Preamble(instructions="You are a friend.", tools=(tool,)))
    history.insert(Message(id="a", role="user", text="What is the weather in Paris? <|im_end|>"))
    history.insert(FunctionCall(id="b", call_id="c1", name="weather", arguments='{"city": "Paris"}'))
    history.insert(FunctionCallOutput(id="c", call_id="c1", output='{"sky": "sunny"}'))
    ours = renderer_of(language, datetime(2025, 1, 1)).draft(history.script()).tokens().tolist()
    function = {"name": "weather", "description": tool.description, "parameters": parameters}
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    theirs = AutoTokenizer.from_pretrained(FOLDER).apply_chat_template(
        [
            {"role": "system", "content": "You are a friend."},
            {"role": "user", "content": "What is the weather in Paris? <|im_end|>"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": '{"sky": "sunny"}'},
        ],
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        sanitize_control_tokens=True,
    )
    assert ours == theirs
