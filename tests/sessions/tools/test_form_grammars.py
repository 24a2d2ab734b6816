"""Grammars of calls in every form, against the library that follows them and the parser that reads them.

The tags of the forms are special tokens, as in the models' own tokenizers.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from holdfast.runtime.grammar.llguidance import Compiler
from holdfast.runtime.verbs import Grammar
from holdfast.sessions.conversation.items import Tool
from holdfast.sessions.errors import GrammarInvalid
from holdfast.sessions.text.language import Language, classify_template
from holdfast.sessions.text.streaming_tokenizer import StablePrefixRule
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.tools.formats import FORMATS, SYNTAXES, XML_FORMATS, Forms
from holdfast.sessions.tools.forms import CallForm, ReasoningForm
from holdfast.sessions.tools.grammar import json_format
from holdfast.sessions.tools.scanner import CallArguments, CallOpened, PlainText
from holdfast.sessions.turn.request import TurnRequest
from holdfast.sessions.turn.turn_grammar import TurnGrammar

from ...runtime.schemas import ARGUMENTS
from ..text.chat_languages import FAMILIES, backend
from ..turn.test_special_tokens import SPECIAL
from .call_pieces import read_all

SPECIALS = (
    *(*SPECIAL, "[TOOL_CALLS]", "<seed:tool_call>", "</seed:tool_call>"),
    *(mark for form in (*FORMATS.values(), *XML_FORMATS.values()) for mark in form.marks if mark[0] == "<"),
    *("<|tool_call_start|>", "<|tool_call_end|>"),
)
ADD = Tool(
    name="add",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    strict=True,
)
NOTE = Tool(
    name="note",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "kind": {"type": "string", "enum": ["big", "small"]},
            "at": {"$ref": "#/$defs/Place"},
        },
        "required": ["text"],
        "$defs": {"Place": {"type": "array", "items": {"type": "integer"}}},
    },
    strict=True,
)
ANY = Tool(name="any", parameters={})
ONE: dict[CallForm, str] = {
    CallForm.HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>',
    CallForm.LLAMA3_JSON: '{"name": "add", "parameters": {"a": 12}}',
    CallForm.MISTRAL: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 12}}]',
    CallForm.GRANITE: '<|tool_call|>[{"name": "add", "arguments": {"a": 12}}]',
    CallForm.PHI4_MINI: '<|tool_call|>[{"name": "add", "arguments": {"a": 12}}]<|/tool_call|>',
    CallForm.FUNCTOOLS: 'functools[{"name": "add", "arguments": {"a": 12}}]',
    CallForm.DEEPSEEK_V3: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 12}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    CallForm.DEEPSEEK_V31: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 12}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    CallForm.COMMAND_R: 'Action: ```json\n[{"tool_name": "add", "parameters": {"a": 12}}]\n```',
    CallForm.COMMAND_R7B: '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 12}}]<|END_ACTION|>',
    CallForm.QWEN3_CODER: "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n"
    "</tool_call>",
    CallForm.SEED_OSS: "<seed:tool_call>\n<function=add>\n<parameter=a>12</parameter>\n</function>\n"
    "</seed:tool_call>",
    CallForm.GLM45: "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
    CallForm.GLM47: "<tool_call>add<arg_key>a</arg_key><arg_value>12</arg_value></tool_call>",
    CallForm.KIMI_K2: "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 12}<|tool_call_end|><|tool_calls_section_end|>',
    CallForm.MINIMAX: '<tool_calls>\n{"name": "add", "arguments": {"a": 12}}\n</tool_calls>',
    CallForm.MINIMAX_M2: '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">12</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    CallForm.GEMMA4: "<|tool_call>call:add{a:12}<tool_call|>",
    CallForm.FUNCTIONGEMMA: "<start_function_call>call:add{a:12}<end_function_call>",
    CallForm.LFM2: "<|tool_call_start|>[add(a=12)]<|tool_call_end|>",
    CallForm.NEMOTRON_JSON: '<TOOLCALL>[{"name": "add", "arguments": {"a": 12}}]</TOOLCALL>',
    CallForm.HARMONY: '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 12}',
}
"""One call in each form, as the grammars have the model write it."""
SOME = {
    CallForm.GRANITE: '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "any", "arguments": {}}]',
    CallForm.DEEPSEEK_V31: '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>any<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    CallForm.QWEN3_CODER: "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=any>\n</function>\n</tool_call>",
    CallForm.GLM45: "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>any\n</tool_call>",
    CallForm.KIMI_K2: "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.any:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    CallForm.MINIMAX: '<tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n{"name": "any", "arguments": {}}\n'
    "</tool_calls>",
    CallForm.MINIMAX_M2: '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '</invoke>\n<invoke name="any">\n</invoke>\n</minimax:tool_call>',
    CallForm.GEMMA4: "<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:any{}<tool_call|>",
    CallForm.LFM2: "<|tool_call_start|>[add(a=1), any()]<|tool_call_end|>",
    CallForm.HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "any", "arguments": {}}\n</tool_call>',
}


@cache
def tokenizer(*more: str) -> ChatTokenizer:
    made = Tokenizer.from_str(backend("chatml").to_str())
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (*SPECIALS, *more)])
    return ChatTokenizer(made, FAMILIES["chatml"].template)


TOKENIZER = tokenizer()
PLAIN = ChatTokenizer(Tokenizer.from_str(backend("tools-last").to_str()), FAMILIES["chatml"].template)
"""In it, the tags of the forms are text."""
END = TOKENIZER.special_ids["<|im_end|>"]
VOCAB = 64 * (TOKENIZER.backend.get_vocab_size() // 64 + 1)
REPORT = classify_template(TOKENIZER)


def compiler_of(tokens: ChatTokenizer, folder: Path) -> Compiler:
    tokens.backend.save(str(folder / "tokenizer.json"))
    return Compiler(folder, VOCAB, (tokens.special_ids["<|im_end|>"],))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return compiler_of(TOKENIZER, tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def compilers(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Each with its tokenizer."""
    return [(TOKENIZER, compiler), (PLAIN, compiler_of(PLAIN, tmp_path_factory.mktemp("plain")))]


def grammar(form: CallForm, *tools: Tool, tokens: ChatTokenizer = TOKENIZER, **asked: Any) -> Grammar:
    reasoning = ReasoningForm.COMMAND if form is CallForm.COMMAND_R7B else ReasoningForm.NONE
    language = Language(tokens, REPORT, StablePrefixRule(tokens), Forms(form, reasoning))
    made = TurnGrammar(language).grammar(TurnRequest.checked(offered=tools, **asked), tools)
    assert made is not None
    return made


def follows(compiler: Compiler, rules: Grammar, text: str) -> bool:
    """Whether the grammar allows the text, and an end behind it."""
    matcher = compiler.compile(rules, (END,), np.zeros(0, dtype=np.int32)).result()
    mask = np.zeros(VOCAB // 64, dtype=np.int64)
    for token in [*TOKENIZER.backend.encode(text, add_special_tokens=False).ids, END]:
        matcher.fill(mask)
        if not np.unpackbits(mask.view(np.uint8), bitorder="little")[token]:
            return False
        if token != END:
            matcher.take(token)
    return True


def texts(schema: Any) -> bool:
    """Whether a value may be a text."""
    if "anyOf" in schema:
        return any(map(texts, schema["anyOf"]))
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return schema.get("type") == "string" or any(isinstance(value, str) for value in values)


def without_texts(schema: Any) -> Any:
    """The schema with nothing asked of texts but their values."""
    if isinstance(schema, list):
        return list(map(without_texts, schema))
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "string":
        return {"type": "string"}
    return {key: value if key in ("enum", "const") else without_texts(value) for key, value in schema.items()}


def enforced(form: CallForm, schema: dict[str, Any]) -> dict[str, Any]:
    """What a form's grammar enforces of the schema of arguments."""
    syntax = SYNTAXES[form].parameter
    if syntax is not None and syntax.quote:
        return dict(without_texts(schema))
    if form in XML_FORMATS:
        properties = {name: {} if texts(one) else one for name, one in schema["properties"].items()}
        return {**schema, "properties": properties}
    return schema


def some_text(
    tokens: ChatTokenizer, compiler: Compiler, rules: Grammar, ending: str, choice: random.Random
) -> str | None:
    """A random text that the grammar allows, with ``ending`` wherever chance will have it; None if it gets too
    long."""
    end = tokens.special_ids["<|im_end|>"]
    matcher = compiler.compile(rules, (end,), np.zeros(0, dtype=np.int32)).result()
    mask, said, waiting = np.zeros(VOCAB // 64, dtype=np.int64), list[int](), list[int]()
    while len(said) < 300:
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if ending and not waiting and choice.random() < 0.3:
            waiting = tokens.backend.encode(ending, add_special_tokens=False).ids
        token, waiting = (waiting[0], waiting[1:]) if waiting else (choice.choice(allowed.tolist()), [])
        if token not in allowed:
            token, waiting = end if end in allowed else choice.choice(allowed.tolist()), []
        if token == end:
            return str(tokens.backend.decode(said, skip_special_tokens=False))
        matcher.take(token)
        said.append(token)
    return None


@settings(max_examples=8 * settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(list(SYNTAXES)), ARGUMENTS, st.integers(0, 2**32), st.integers(0, 1))
def test_whatever_is_forced_is_read_back_as_the_call(
    compilers: list[Any], form: CallForm, schema: dict[str, Any], seed: int, plain: int
) -> None:
    tokens, compiler = compilers[plain]
    if plain and form is CallForm.HARMONY:
        return  # its tags are special tokens in each model that has it
    tool = Tool(name="act", parameters=schema, strict=True)
    if form is CallForm.LFM2 and not all(
        name.isascii() and name.isidentifier() for name in schema["properties"]
    ):
        with pytest.raises(GrammarInvalid, match="cannot name an argument"):
            grammar(form, tool, tool_choice="required", tool="act")
        return
    syntax = SYNTAXES[form]
    ending = (syntax.parameter and (syntax.parameter.quote or syntax.parameter.end)) or '"'
    rules = grammar(form, tool, tokens=tokens, tool_choice="required", tool="act")
    text = some_text(tokens, compiler, rules, ending, random.Random(seed))
    assume(text is not None and "�" not in text)
    assert text is not None
    ((name, arguments),) = called(form, text, tool)
    assert name == "act"
    jsonschema.validate(arguments, enforced(form, schema))


def called(form: CallForm, text: str, *tools: Tool) -> list[tuple[str, Any]]:
    parser = Forms(form).call_parser(tools)
    events = read_all(parser, list(text))
    arguments = [json.loads(event.delta) for event in events if isinstance(event, CallArguments)]
    assert not any(isinstance(event, PlainText) for event in events)
    return list(
        zip([event.name for event in events if isinstance(event, CallOpened)], arguments, strict=True)
    )


def test_every_form_with_grammars_is_tried() -> None:
    assert set(ONE) == set(SYNTAXES) == set(CallForm) - {CallForm.PYTHONIC}


@pytest.mark.parametrize("form", ONE)
def test_a_forced_call_is_in_the_models_form(compiler: Compiler, form: CallForm) -> None:
    text, asked = ONE[form], {"tool_choice": "required", "tool": "add"}
    assert called(form, text, ADD) == [("add", {"a": 12})]
    for rules in (grammar(form, ADD, ANY, **asked), grammar(form, ADD, ANY, tool_choice="required")):
        assert follows(compiler, rules, text)
        for bad in (text.replace("12", '"x"'), text.replace("add", "sub"), "Hello", "", f"Hello{text}"):
            assert not follows(compiler, rules, bad), bad
    assert not follows(compiler, grammar(form, ADD, ANY, **asked), text.replace("add", "any"))


@pytest.mark.parametrize("form", SOME)
def test_required_calls_may_be_several(compiler: Compiler, form: CallForm) -> None:
    assert called(form, SOME[form], ADD) == [("add", {"a": 1}), ("any", {})]
    assert follows(compiler, grammar(form, ADD, ANY, tool_choice="required"), SOME[form])
    named = grammar(form, ADD, ANY, tool_choice="required", tool="add")
    assert not follows(compiler, named, SOME[form]), "a named tool is called once"


NOTHING: tuple[dict[str, Any], ...] = (
    {},
    {"type": "object"},
    {"type": "object", "properties": None},
    {"type": "object", "title": "Now", "description": "What time it is.", "$schema": "https://a.b/c"},
)
SOMETHING: tuple[dict[str, Any], ...] = (
    {"type": "object", "additionalProperties": True},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
    {"type": "object", "required": ["a"]},
    {"type": "object", "propertyNames": {"maxLength": 1}},
)


@pytest.mark.parametrize("form", ONE)
@pytest.mark.parametrize("strict", [False, True])
def test_a_tool_without_parameters_is_called_with_the_empty_object(
    compiler: Compiler, form: CallForm, strict: bool
) -> None:
    given = ONE[form]
    none = re.sub(r"\{\"?a\"?: ?12\}", "{}", given.replace("(a=12)", "()"))
    none = re.sub(r"<(parameter|arg_key).*</(parameter|arg_value)>\n?", "", none, flags=re.DOTALL)
    for schema in NOTHING:
        tool = Tool(name="add", parameters=schema, strict=strict)
        asked: list[dict[str, Any]] = [
            {"tool_choice": "required", "tool": "add"},
            {"tool_choice": "required"},
            {"tool_choice": "required", "allowed": ["add"]},
            {"allowed": ["add"]},
            *([{}] if strict else []),
        ]
        for choice in asked:
            rules = grammar(form, tool, NOTE, **choice)
            assert follows(compiler, rules, none) and not follows(compiler, rules, given), (schema, choice)
    assert called(form, none, ADD) == [("add", {})]
    for schema in SOMETHING:
        tool = Tool(name="add", parameters=schema)
        assert follows(compiler, grammar(form, tool, tool_choice="required"), given), schema


@pytest.mark.parametrize("form", ONE)
def test_strict_tools_leave_words_free_and_bind_calls(compiler: Compiler, form: CallForm) -> None:
    rules, text = grammar(form, ADD), ONE[form]
    first = "<|channel|>final<|message|>" if form is CallForm.HARMONY else ""
    assert follows(compiler, rules, f"{first}Hello there.\n\nYes [1] {{x}} <b>")
    between = "<|end|><|start|>assistant" if form is CallForm.HARMONY else "\n"
    assert follows(compiler, rules, f"{first}Hello.{between}{text}")
    assert not follows(compiler, rules, f"{first}Hello.{between}{text.replace('12', '[')}")
    assert not follows(compiler, rules, f"{first}Hello.{between}{text.replace('add', 'sub')}")


def test_strict_tools_leave_reasoning_free(compiler: Compiler) -> None:
    thought = "<|START_THINKING|>Add.<|END_THINKING|>"
    rules = grammar(CallForm.COMMAND_R7B, ADD)
    assert follows(compiler, rules, thought + ONE[CallForm.COMMAND_R7B])
    assert follows(compiler, rules, f"{thought}<|START_RESPONSE|>12<|END_RESPONSE|>")
    analysis = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
    assert follows(compiler, grammar(CallForm.HARMONY, ADD), analysis + ONE[CallForm.HARMONY])


def test_a_format_stands_in_its_channel(compiler: Compiler) -> None:
    answer = json_format({"enum": ["x", {"y": 1}]}, strict=True, param="here")
    for tools in ((), (ADD,)):
        rules = grammar(CallForm.HARMONY, *tools, format=answer)
        assert follows(compiler, rules, '<|channel|>final<|message|>"x"')
        assert not follows(compiler, rules, '"x"')
        assert follows(compiler, rules, ONE[CallForm.HARMONY]) == bool(tools)


def test_parameters_with_tags_follow_their_schema(compiler: Compiler) -> None:
    def written(*given: str) -> str:
        inner = "".join(f"<parameter={one}\n</parameter>\n" for one in given)
        return f"<tool_call>\n<function=note>\n{inner}</function>\n</tool_call>"

    rules = grammar(CallForm.QWEN3_CODER, NOTE, tool_choice="required", tool="note")
    for each in (["text>\nA <b>\n\nline"], ["text>\n", "kind>\nbig"], ["text>\nx", "at>\n[1, 2]"]):
        assert follows(compiler, rules, written(*each)), each
    for each in ([], ["kind>\nbig"], ["text>\nx", "kind>\nhuge"], ["text>\nx", 'at>\n["x"]'], ["other>\n1"]):
        assert not follows(compiler, rules, written(*each)), each
    text = written("text>\nx\n", "kind>\nsmall", "at>\n[1, 2]")
    assert called(CallForm.QWEN3_CODER, text, NOTE) == [
        ("note", {"text": "x\n", "kind": "small", "at": [1, 2]})
    ]


@pytest.mark.parametrize("form", SYNTAXES)
def test_a_value_may_have_odd_characters(compiler: Compiler, form: CallForm) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ['\x7f\x80 😀\u2028"']}}, "required": ["a"]}
    tool = Tool(name="act", parameters=schema, strict=True)
    rules = grammar(form, tool, tool_choice="required", tool="act")
    text = some_text(TOKENIZER, compiler, rules, "", random.Random(1))
    assert text is not None and called(form, text, tool) == [("act", {"a": '\x7f\x80 😀\u2028"'})]


def test_mistrals_form_is_that_of_its_tokens() -> None:
    forms = Forms(CallForm.MISTRAL)
    assert forms.syntax(TOKENIZER.special_ids) is SYNTAXES[CallForm.MISTRAL]
    named = forms.syntax(tokenizer("[ARGS]").special_ids)
    assert named is not None and (named.opening, named.middle) == ("[TOOL_CALLS]", "[ARGS]")


def test_forms_without_grammars_are_refused_by_name() -> None:
    with pytest.raises(GrammarInvalid, match="Calls in the pythonic form can be neither forced nor strict"):
        grammar(CallForm.PYTHONIC, ADD, tool_choice="required")


def test_a_name_that_a_form_cannot_write_leaves_the_other_tools_bound(compiler: Compiler) -> None:
    odd = {"type": "object", "properties": {"is it?": {"type": "integer"}}}
    rules = grammar(CallForm.LFM2, ADD, Tool(name="odd", parameters=odd), tool_choice="required")
    text = ONE[CallForm.LFM2]
    assert follows(compiler, rules, text) and not follows(compiler, rules, text.replace("12", '"x"'))
    assert follows(compiler, rules, text.replace("add(a=12)", 'odd(b="x")'))
    with pytest.raises(GrammarInvalid, match="cannot name an argument"):
        grammar(CallForm.LFM2, ADD, Tool(name="odd", parameters=odd, strict=True), tool_choice="required")
