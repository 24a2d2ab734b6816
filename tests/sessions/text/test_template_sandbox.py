"""Chat templates render as in transformers, and one that was written to do harm is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from holdfast.sessions.conversation.items import Message, Preamble
from holdfast.sessions.errors import TemplateFailed
from holdfast.sessions.text.chat_template import ChatTemplate
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.template_sandbox import CHARACTERS, broken_limit, compiled
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.tests.sessions.text.test_renderer import NOON

from .chat_languages import CHATML, FAMILIES, backend, ours, reference

TOOLS = [{"type": "function", "function": {"name": "look", "description": "<ü>", "parameters": {"a": [1]}}}]
CALL = {"type": "function", "id": "c12345678", "function": {"name": "look", "arguments": {"a": "é<"}}}
TALKS = [
    [("user", "Hi")],
    [("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello"), ("user", " And? ")],
    [("user", "Hi"), ("assistant", "<think>\nhm\n</think>\n\nHello"), ("user", "{{ x }}")],
]
ODD = [
    "{%- for m in messages -%}"
    "{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m.role ~ ':' ~ 1 ~ none }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}nobody{% endfor %}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{% set x = 1 %}{{ x }}",
    "{% for m in messages recursive %}{{ m.role }}{% if loop.first and loop.depth == 1 %}"
    "{{ loop(messages) }}{% endif %}{% endfor %}",
    "{% macro say(t) %}[{{ t }}]{% endmacro %}"
    "{{ say('a') ~ say(messages|length) }}{{ 'a' * 3 + 'b' }}{{ 7 % 4 }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if ns.n > 1 %}"
    "{% break %}{% endif %}{% endfor %}{{ ns.n }}",
    "{{ messages|map(attribute='role')|join(', ') }}{{ {'b': 1, 'a': '<é>'}|tojson }}"
    "{{ {'a': [1]}|tojson(indent=2) }}",
    "{{ '%s and %5d'|format('a', 3) }}{{ '%d%%' % 5 }}{{ '{:>4}|{}'.format(1, 2) }}"
    "{{ 'aXa'.replace('X', '--') }}",
    "{{ dict(a=1).a }}{{ undefined_name }}{{ messages[9].content is defined }}",
    "{{ {'get': 1}.get('x', 2) }}{{ {'a': 1, '_b': 2}.a }}{{ {}.absent is defined }}{{ {'_b': 2}._b }}"
    "{{ 'a' + 'b' }}{{ [1] + [2] }}{% for m in messages %}{{ loop.index0 }}{{ loop.odd is defined }}"
    "{% endfor %}",
    "{% macro f(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{{ f() }}{{ f(1) }}{{ f(1, b=2) }}{{ f(1, 2, 3, c=4) }}",
    "{% macro f(a) %}{{ a }}{{ caller() }}{% endmacro %}{% for m in messages %}{% call f(loop.first) %}"
    "{{ m.role }}{% endcall %}{% endfor %}{{ f(1, 2) }}",
    "{{ 'abc'|center(9) }}{{ 2 ** 10 }}{{ 'abc'.ljust(5) }}|{{ 'a\nb'|indent(2) }}{{ ['a', 'b']|join }}",
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template", [*(family.template for family in FAMILIES.values()), *ODD])
def test_a_template_renders_as_in_transformers(template: str, tools: list | None) -> None:
    for talk in TALKS:
        messages = [{"role": role, "content": text} for role, text in talk]
        called = [*messages[:1], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        called.append({"role": "tool", "content": "21", "tool_call_id": "c12345678"})
        for given in (messages, called):
            names = {"tools": tools, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
            names["strftime_now"] = NOON.strftime
            shown = []
            for rendered in (
                lambda names=names, given=given: compiled(template).render(given, **names),
                lambda names=names, given=given: _compile_jinja_template(template).render(
                    messages=given, **names
                ),
            ):
                try:
                    shown.append(rendered())
                except Exception as refused:
                    shown.append(f"{type(refused).__name__}: {refused}")
            assert shown[0] == shown[1]


DOUBLED = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = DOUBLE %}{% endfor %}"
HOSTILE = {
    "folded": "{{ 'A' * 3000000000 }}",
    "folded in a test": "{% if 'A' * 3000000000 %}{% endif %}",
    "folded list": "{{ ([0] * 3000000000)|length }}",
    "folded filter": "{{ 'A'|center(3000000000) }}",
    "folded block": "{% autoescape 'A'|center(3000000000) %}{% endautoescape %}",
    "doubled by +": DOUBLED.replace("DOUBLE", "ns.x + ns.x"),
    "doubled by ~": DOUBLED.replace("DOUBLE", "ns.x ~ ns.x"),
    "doubled by join": DOUBLED.replace("DOUBLE", "[ns.x, ns.x]|join"),
    "doubled by a method": DOUBLED.replace("DOUBLE", "''.join([ns.x, ns.x])"),
    "doubled by a block": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ ns.x }}"
    "{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubled list": DOUBLED.replace("'a'", "[1]").replace("DOUBLE", "ns.x + ns.x"),
    "replaced": DOUBLED.replace("DOUBLE", "ns.x.replace('a', 'aaaa')"),
    "replaced by a filter": DOUBLED.replace("DOUBLE", "ns.x|replace('a', 'aaaa')"),
    "output": "{% set x = 'a' * 60000000 %}{{ x }}{{ x }}{{ x }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% for m in messages %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{{ m.content }}{% endfor %}{% endfor %}{% endfor %}",
    "width": "{{ '%3000000000d' % 1 }}",
    "width by an argument": "{{ '%*d' % (3000000000, 1) }}",
    "format": "{{ '{:>3000000000}'.format(1) }}",
    "format by a filter": "{{ '%3000000000d'|format(1) }}",
    "method": "{{ 'a'.ljust(3000000000) }}",
    "power": "{{ 10 ** 3000000000 }}",
    "lorem": "{{ lipsum(n=100000000) }}",
    "recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_template_that_makes_too_much_is_refused(how: str) -> None:
    tokenizer = ChatTokenizer(backend("chatml"), HOSTILE[how])
    said = Message(id="item", role="user", text="Hi")
    with pytest.raises(TemplateFailed):
        ChatTemplate(tokenizer, NOON).pieces(Preamble(), [said])


def test_a_long_conversation_keeps_the_bounds() -> None:
    said = [Message(id=f"item_{n}", role="user", text="Hello there. " * 40) for n in range(20_000)]
    (text,) = ChatTemplate(ours("chatml"), NOON).pieces(Preamble(), said)
    assert 10_000_000 < len(text) < CHARACTERS


def test_templates_in_use_pass_their_trial() -> None:
    for name in ("chatml", "mistral-v3", "gemma-2"):
        assert broken_limit(FAMILIES[name].template, dict(FAMILIES[name].named)) == ""
    assert reference("chatml").chat_template == CHATML


LISTS = "{% set a = ('a' * 60000000)|list %}{% set b = a|list %}{% set c = b|list %}"
SLOW = "{% for i in range(9) %}{% for j in range(9) %}{{ ('ab' * 30000000)|upper|length }}{% endfor %}"
SLOW += "{% endfor %}"


def test_a_trial_names_the_limit_that_a_template_breaks() -> None:
    assert "MiB" in broken_limit(LISTS, {})
    assert "MiB" in broken_limit("{% if messages[1].tool_calls %}" + LISTS + "{% endif %}", {})
    assert "1 s of processor time" in broken_limit("{{ messages }}" + SLOW, {}, seconds=1)


@pytest.mark.parametrize("template", [LISTS, *list(HOSTILE.values())[:2]])
def test_a_model_folder_with_such_a_template_is_not_loaded(template: str, tmp_path: Path) -> None:
    backend("chatml").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "chat_template.jinja").write_text(CHATML + template)
    with pytest.raises(TemplateFailed, match=r"chat_template\.jinja.*(MiB|value of|more than)"):
        Language.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert Language.load(tmp_path).report.tools
    shutil.rmtree(tmp_path)
