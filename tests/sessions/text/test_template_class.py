"""The classifier tells the families' templates apart."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message, Preamble, Tool
from holdfast.sessions.conversation.tree import Script
from holdfast.sessions.errors import TemplateFailed
from holdfast.sessions.text.language import Language, TemplateClass, classify_template
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.tools.forms import CallForm

from ..session_stage import renderer_of
from .chat_languages import FAMILIES, backend, end_id, ours


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("chatml", TemplateClass.APPEND_ONLY),
        ("llama3", TemplateClass.APPEND_ONLY),
        ("qwen3", TemplateClass.REWRITES_REASONING),
        ("thinks-open", TemplateClass.REWRITES_REASONING),
        ("tools-last", TemplateClass.REWRITES_MORE),
    ],
)
def test_kind(name: str, kind: TemplateClass) -> None:
    report = classify_template(ours(name))
    assert report.kind is kind
    assert report.closing == end_id(name)
    assert report.tools == (name not in ("llama3", "qwen3")), "these two are without their part for tools"
    assert report.rules.outputs == report.tools, "a role that only passes through is not a tool's"


def test_a_template_that_refuses_outputs_is_reported_not_refused() -> None:
    refusing = FAMILIES["chatml"].template.replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{%- endif %}",
    )
    report = classify_template(ChatTokenizer(backend("chatml"), refusing))
    assert report.tools and not report.rules.outputs


SILENT = (
    "{%- for message in messages %}{%- if message.role in ['system', 'user', 'assistant'] %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def test_what_a_template_accepts_and_does_not_write_is_found() -> None:
    report = classify_template(ChatTokenizer(backend("chatml"), SILENT))
    assert not report.tools
    assert (report.rules.schemas, report.rules.outputs, report.rules.calls) == (False, False, False)


def test_a_template_that_shows_tools_only_without_instructions_does_not_show_them() -> None:
    some = "{%- if messages[0].role != 'system' %}{{ tools | tojson }}{%- endif %}" + SILENT
    assert not classify_template(ChatTokenizer(backend("chatml"), some)).tools


@pytest.mark.parametrize("instructions", ["", "Be brief."])
def test_the_fallback_writes_tools_calls_and_outputs_as_text(instructions: str) -> None:
    language = Language.of(ChatTokenizer(backend("chatml"), SILENT), CallForm.MISTRAL)
    assert not language.shows_tools and language.forms.calls is CallForm.MISTRAL and language.forms.known
    assert not Language.of(ChatTokenizer(backend("chatml"), SILENT)).forms.known
    language = Language.of(ChatTokenizer(backend("chatml"), SILENT), tool_fallback=True)
    assert language.shows_tools and language.forms.calls is CallForm.HERMES and language.forms.known
    tool = Tool(name="weather", description="Tells it.", parameters={"type": "object", "properties": {}})
    call = FunctionCall(id="c", call_id="call_1", name="weather", arguments='{"city": "Oslo"}')
    output = FunctionCallOutput(id="o", call_id="call_1", output="7 degrees")
    question = Message(id="u", role="user", text="How is it in Oslo?")
    script = Script(Preamble(instructions=instructions, tools=(tool,)), (question, call, output))
    ids = renderer_of(language, datetime(2025, 1, 1)).draft(script).tokens().tolist()
    text = backend("chatml").decode(ids, skip_special_tokens=False)
    head, *rest = text.split("<|im_end|>\n")
    assert head.startswith(f"<|im_start|>system\n{instructions}") and head.count("# Tools") == 1
    schema = {
        "type": "function",
        "function": {"name": "weather", "description": "Tells it.", "parameters": tool.parameters},
    }
    assert f"<tools>\n{json.dumps(schema)}\n</tools>" in head
    assert rest == [
        "<|im_start|>user\nHow is it in Oslo?",
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "<|im_start|>user\n<tool_response>\n7 degrees\n</tool_response>",
        "<|im_start|>assistant\n",
    ]


LISTED = {
    "default": FAMILIES["chatml"].template,
    "tool_use": "{{ tools | tojson }}" + FAMILIES["chatml"].template,
}


@pytest.mark.parametrize("tools", [(), (Tool(name="f", parameters={"type": "object", "properties": {}}),)])
@pytest.mark.parametrize("instructions", ["", "Be brief."])
def test_of_two_templates_that_for_tools_renders_conversations_with_tools(
    tools: tuple[Tool, ...], instructions: str
) -> None:
    chat = ChatTokenizer(backend("chatml"), LISTED["default"], tool_template=LISTED["tool_use"])
    language = Language.of(chat)
    script = Script(
        Preamble(instructions=instructions, tools=tools), (Message(id="u", role="user", text="Hi"),)
    )
    ids = renderer_of(language, datetime(2025, 1, 1)).draft(script).tokens().tolist()
    told = [{"role": "system", "content": instructions}] if instructions else []
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend("chatml"), chat_template=LISTED)
    schemas = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in tools
    ]
    assert ids == theirs.apply_chat_template(
        [*told, {"role": "user", "content": "Hi"}],
        tools=schemas or None,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert language.report.kind is TemplateClass.APPEND_ONLY and language.report.tools
    assert language.digest() != Language.of(ours("chatml")).digest()


def test_a_template_that_loses_replies_is_refused() -> None:
    losing = FAMILIES["tools-last"].template.replace(
        "{%- for message in messages %}", "{%- for message in messages[-1:] %}"
    )
    with pytest.raises(TemplateFailed, match="lost, doubled or moved a reply"):
        classify_template(ChatTokenizer(backend("tools-last"), losing))


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(TemplateFailed, match="does not compile"):
        classify_template(ChatTokenizer(backend("chatml"), "{% for %}"))
