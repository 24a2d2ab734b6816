"""The classifier tells the families' templates apart."""

from __future__ import annotations

from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from holdfast.sessions.errors import TemplateFailed
from holdfast.sessions.items import Message, Preamble, Tool
from holdfast.sessions.text.language import Language, TemplateClass, classify_template
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.tree import Script

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
    assert report.tools


def test_a_template_without_tools_is_reported_not_refused() -> None:
    refusing = FAMILIES["chatml"].template.replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{%- endif %}",
    )
    assert not classify_template(ChatTokenizer(backend("chatml"), refusing)).tools


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
