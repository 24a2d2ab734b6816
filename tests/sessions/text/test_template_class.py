"""The classifier tells the families' templates apart."""

from __future__ import annotations

import pytest

from holdfast.sessions.errors import TemplateFailed
from holdfast.sessions.text.language import TemplateClass, probe
from holdfast.sessions.text.tokenizer import ChatTokenizer

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
    report = probe(ours(name))
    assert report.kind is kind
    assert report.closing == end_id(name)
    assert report.tools


def test_a_template_without_tools_is_reported_not_refused() -> None:
    refusing = FAMILIES["chatml"].template.replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}{{ raise_exception('no tools') }}{%- endif %}",
    )
    assert not probe(ChatTokenizer(backend("chatml"), refusing)).tools


def test_a_template_that_loses_replies_is_refused() -> None:
    losing = FAMILIES["tools-last"].template.replace(
        "{%- for message in messages %}", "{%- for message in messages[-1:] %}"
    )
    with pytest.raises(TemplateFailed, match="lost, doubled or moved a reply"):
        probe(ChatTokenizer(backend("tools-last"), losing))


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(TemplateFailed, match="does not compile"):
        probe(ChatTokenizer(backend("chatml"), "{% for %}"))
