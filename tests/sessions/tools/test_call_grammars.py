"""Grammars of calls, against the library that follows them: which texts may come, and where an end may.

In the form of the pocket model, with tags that are tokens, and in one with tags that are mere text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.runtime.grammar.llguidance import Compiler
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.verbs import Grammar
from holdfast.sessions.conversation.items import Tool
from holdfast.sessions.errors import GrammarInvalid
from holdfast.sessions.text.language import Language, classify_template
from holdfast.sessions.text.streaming_tokenizer import StablePrefixRule
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.tools.formats import SYNTAXES, Forms
from holdfast.sessions.tools.forms import CallForm
from holdfast.sessions.tools.grammar import CallSyntax, CallWriter, json_format
from holdfast.sessions.turn.request import TurnRequest
from holdfast.sessions.turn.turn_grammar import TurnGrammar

END, VOCAB = 1529, 1536
FOLDER = find_model("pocket")
TOKENIZER = ChatTokenizer.load(FOLDER)
ADD = Tool(
    name="add",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    strict=True,
)
LOOK = Tool(name="look.up", parameters={"additionalProperties": True})
PLAIN = CallSyntax('[TOOL_CALLS]«{"name": STRING, "arguments": ARGUMENTS}»')


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(FOLDER, VOCAB, (END,))


class Reading:
    """How far a text is allowed by a grammar."""

    def __init__(self, compiler: Compiler, grammar: Grammar, text: str) -> None:
        matcher = compiler.compile(grammar, (END,), np.zeros(0, dtype=np.int32)).result()
        mask = np.zeros(VOCAB // 64, dtype=np.int64)
        allowed = mask.view(np.uint8)
        self.read, self.refused = "", ""
        for token in TOKENIZER.backend.encode(text, add_special_tokens=False).ids:
            matcher.fill(mask)
            word = TOKENIZER.text_of(token)
            if not np.unpackbits(allowed, bitorder="little")[token]:
                self.refused = word
                return
            matcher.take(token)
            self.read += word
        matcher.fill(mask)
        self.may_end = bool(np.unpackbits(allowed, bitorder="little")[END])
        self.complete = matcher.complete

    @property
    def whole(self) -> bool:
        return not self.refused and self.may_end


@pytest.fixture(params=["hermes", "llama3-json", "plain"])
def writer(request: pytest.FixtureRequest) -> CallWriter:
    return CallWriter({**SYNTAXES, "plain": PLAIN}[request.param], TOKENIZER)


def call(writer: CallWriter, arguments: str, name: str = "add") -> str:
    form = writer.form
    return f'{form.opening}{form.head}"{name}"{form.middle}{arguments}{form.tail}{form.closing}'


def test_words_are_free_and_calls_are_bound(compiler: Compiler, writer: CallWriter) -> None:
    grammar = writer.strict([ADD, LOOK])
    good = call(writer, '{"a": 12}')
    for text in ("", "Hello there! <b> [T", "é\n\n{", f"One{good}", f"{good} and {good}\nand more"):
        assert Reading(compiler, grammar, text).whole, text
    assert Reading(compiler, grammar, f"<tools>thinking</tools>{good}").whole, "a mark of the model's own"
    assert Reading(compiler, grammar, call(writer, '{"any": [1, null]}', "look.up")).whole
    for bad in ('{"b": 1}', '{"a": "x"}', "{}", '{"a":1}', "[]"):
        assert Reading(compiler, grammar, call(writer, bad)).refused, bad
    assert Reading(compiler, grammar, call(writer, '{"a": 1}', "subtract")).refused
    assert not Reading(compiler, grammar, good[:-3]).whole, "no end within a call"


def test_forced_calls_are_all_there_is(compiler: Compiler, writer: CallWriter) -> None:
    good = call(writer, '{"a": 12}')
    one, some = writer.forced([ADD], one=True), writer.forced([ADD, LOOK], one=False)
    assert Reading(compiler, one, good).complete
    assert Reading(compiler, some, good).whole and not Reading(compiler, some, good).complete
    assert Reading(compiler, some, writer.form.between.join([good] * 3)).whole
    for grammar in (one, some):
        assert (
            Reading(compiler, grammar, "Hello").refused and Reading(compiler, grammar, good + " so").refused
        )
        assert not Reading(compiler, grammar, "").may_end
    assert Reading(compiler, one, good + writer.form.between + good).refused


BEYOND: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (  # a keyword that is not enforced: the others are
        {
            "type": "object",
            "properties": {"ids": {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}},
        },
        ['{"ids": [1, 1]}', "{}"],
        ['{"ids": [2]}', '{"b": 1}'],
    ),
    (
        {"properties": {"a": {"type": "string", "pattern": "^(?!x)y$", "maxLength": 3}, "b": {"enum": [1]}}},
        ['{"a": "abc", "b": 1}'],
        ['{"a": "abcd"}', '{"a": "abc", "b": 2}'],
    ),
    (
        {"properties": {"a": {"type": "float"}, "b": {"type": "boolean", "required": True}}},
        ['{"a": [1.5], "b": true}'],
        ['{"a": 1, "b": 1}', '{"c": 1}'],
    ),
    (
        {
            "properties": {
                "a": {"$ref": "https://a.b/c"},
                "b": {"enum": [*range(5001)]},
                "c": {"const": 2**60},
            }
        },
        ['{"a": "x", "b": "y", "c": 0}'],
        ['{"d": 1}'],
    ),
    # no schema that can be enforced: any object
    ({"properties": 5}, ['{"a": [1, null]}', "{}"], ["[]", "5"]),
    ({"type": "array", "items": {"type": "string"}}, ['{"a": [1, null]}', "{}"], ["[]", "5"]),
    (
        {"type": "object", "properties": {"a": {"enum": [1], "type": "null"}}, "required": ["a"]},
        ['{"a": 1}', "{}"],
        ["[]"],
    ),
    ({"properties": {str(at): {} for at in range(1001)}}, ['{"a": 1}', "{}"], ["[]"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), BEYOND)
def test_what_cannot_be_enforced_of_one_tool_leaves_the_rest_and_the_other_tools_bound(
    compiler: Compiler, writer: CallWriter, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    tools = [ADD, Tool(name="odd", parameters=schema), LOOK]
    for grammar in (writer.strict(tools), writer.forced(tools, one=False)):
        assert Reading(compiler, grammar, call(writer, '{"a": 12}')).whole
        assert Reading(compiler, grammar, call(writer, '{"a": "x"}')).refused
        for arguments in good:
            assert Reading(compiler, grammar, call(writer, arguments, "odd")).whole, arguments
        for arguments in bad:
            assert Reading(compiler, grammar, call(writer, arguments, "odd")).refused, arguments
    if writer.form.opening.startswith("{"):
        return
    answer = json_format(schema, strict=False, param="here")
    for grammar in (answer, writer.answered(answer, [ADD])):
        shut = schema.get("type") != "array"
        assert Reading(compiler, grammar, good[0] if shut else "[]").whole


def test_an_answer_or_calls(compiler: Compiler, writer: CallWriter) -> None:
    answer = json_format({"enum": ["x", {"y": 1}]}, strict=True, param="here")
    if writer.form.opening.startswith("{"):
        with pytest.raises(GrammarInvalid, match="bare JSON"):
            writer.answered(answer, [ADD])
        return
    grammar = writer.answered(answer, [ADD])
    assert Reading(compiler, grammar, '"x"').complete and Reading(compiler, grammar, '{"y": 1}').complete
    assert Reading(compiler, grammar, call(writer, '{"a": 12}')).whole
    assert Reading(compiler, grammar, '"z"').refused and Reading(compiler, grammar, "x").refused


def test_forms_with_arguments_that_are_no_json_are_refused_by_name() -> None:
    language = Language(
        TOKENIZER, classify_template(TOKENIZER), StablePrefixRule(TOKENIZER), Forms(CallForm.PYTHONIC)
    )
    with pytest.raises(GrammarInvalid, match="pythonic form"):
        TurnGrammar(language).grammar(TurnRequest(tool_choice="required"), [ADD])
