"""Strings of JSON that nothing else ends are ended, and what is there is JSON then."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from holdfast.runtime.grammar.json_strings import JsonString
from holdfast.runtime.grammar.llguidance import Compiler
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.verbs import Grammar, GrammarKind
from holdfast.sessions.conversation.items import Tool
from holdfast.sessions.tools.formats import SYNTAXES
from holdfast.sessions.tools.forms import CallForm
from holdfast.sessions.tools.grammar import STRING_BYTES, CallWriter, json_format
from holdfast.tests.sessions.text.chat_languages import ours

MOST = 40
NOTHING = np.zeros(0, dtype=np.int32)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values, st.booleans(), st.integers(0, 200), st.integers(1, 7))
def test_a_string_is_open_where_the_text_ends_inside_one(
    value: Any, plain: bool, at: int, piece: int
) -> None:
    text = json.dumps(value, ensure_ascii=plain).encode()[:at]
    string = JsonString(0)
    for start in range(0, len(text), piece):
        string.take(text[start : start + piece])
    inside, escaped = False, False
    for byte in text:  # a string ends at a quote that is not escaped
        if inside and not escaped and byte == 0x5C:
            escaped = True
        else:
            inside = not inside if byte == 0x22 and not escaped else inside
            escaped = False
    assert string.full == inside


class Writer:
    """Writes the reply that a grammar allows, preferring one piece of text."""

    def __init__(self, grammar: Grammar, said: str = "") -> None:
        folder = find_model("pocket")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        size = self.tokenizer.get_vocab_size()
        self.compiler = Compiler(folder, size, (0,))
        self.mask = np.zeros(-(-size // 64), dtype=np.int64)
        self.ids = self.tokenizer.encode(said, add_special_tokens=False).ids
        given = np.array(self.ids, dtype=np.int32)
        self.matcher = self.compiler.compile(grammar, (0,), given).result(60)

    def allowed(self) -> list[int]:
        self.matcher.fill(self.mask)
        bits = np.unpackbits(self.mask.view(np.uint8), bitorder="little")
        return np.nonzero(bits)[0].tolist()

    def write(self, piece: str, most: int = 400) -> str:
        (preferred,) = self.tokenizer.encode(piece, add_special_tokens=False).ids
        for _ in range(most):
            allowed = self.allowed()
            if allowed == [0] or not allowed:
                break
            forced = self.matcher.go_on(16)
            taken = forced or [preferred if preferred in allowed else allowed[-1]]
            if not forced:
                self.matcher.take(taken[0])
            self.ids += taken
        return self.tokenizer.decode(self.ids)


def text_schema(**bounds: Any) -> str:
    word = {"type": "string", **bounds}
    return json.dumps(
        {"type": "object", "properties": {"a": word}, "required": ["a"], "additionalProperties": False}
    )


@pytest.mark.parametrize("said", ["", '{"a": "'])
def test_a_string_without_an_end_is_ended(said: str) -> None:
    grammar = Grammar(GrammarKind.JSON, text_schema(), MOST)
    written = json.loads(Writer(grammar, said).write("e"))["a"]
    assert MOST <= len(written.encode()) <= MOST + 16, (
        "a token may pass the bound, and none is begun behind it"
    )
    unbounded = Writer(Grammar(GrammarKind.JSON, text_schema()), said)
    assert len(unbounded.write("e")) > 4 * MOST, "without the bound it goes on"


def test_a_bound_that_the_schema_gives_is_kept() -> None:
    grammar = Grammar(GrammarKind.JSON, text_schema(pattern="^e{90}$"), MOST)
    assert json.loads(Writer(grammar).write("e"))["a"] == "e" * 90
    assert json_format(json.loads(text_schema()), strict=True, param="").string_bytes == STRING_BYTES
    larger = json_format(json.loads(text_schema(maxLength=STRING_BYTES)), strict=True, param="")
    assert larger.string_bytes > STRING_BYTES


def test_forced_calls_are_bounded_and_words_are_not() -> None:
    tools = [Tool(name="f", parameters={"type": "object"}, strict=True)]
    writer = CallWriter(SYNTAXES[CallForm.HERMES], ours("chatml"))
    answer = json_format({"type": "object"}, strict=True, param="")
    assert writer.forced(tools, one=True).string_bytes == STRING_BYTES
    assert writer.answered(answer, tools).string_bytes == STRING_BYTES
    assert writer.strict(tools).string_bytes == 0, "a quote in words opens no string"
