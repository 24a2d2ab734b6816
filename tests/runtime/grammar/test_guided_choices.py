"""Choices in any number and of any characters; what nothing fits is refused before a step, in words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from holdfast.runtime.errors import GrammarInvalid
from holdfast.runtime.grammar.llguidance import Compiler
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.verbs import Grammar, GrammarKind
from holdfast.sdk.frames.formats import MAX_CHOICES

FILE = find_model("pocket") / "tokenizer.json"
END, VOCAB = 1529, 1536
NOTHING = np.zeros(0, dtype=np.int32)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(FILE.parent, VOCAB, (END,))


def choice(*choices: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(choices, ensure_ascii=False))


def drawn(compiler: Compiler, grammar: Grammar, seed: int) -> str:
    """A text of the grammar, each token drawn from those allowed."""
    matcher, rng = compiler.compile(grammar, (END,), NOTHING).result(), np.random.default_rng(seed)
    mask, said = np.zeros(VOCAB // 64, dtype=np.int64), list[int]()
    while not matcher.complete:
        said += matcher.go_on(1000)
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if matcher.complete:
            break
        assert len(allowed), matcher.fault
        token = int(rng.choice(allowed))
        if token == END:
            break
        matcher.take(token)
        said.append(token)
    text: str = Tokenizer.from_file(str(FILE)).decode(said, skip_special_tokens=False)
    return text


def test_as_many_choices_as_the_wire_takes(compiler: Compiler) -> None:
    choices = [f"v{number}" for number in range(MAX_CHOICES)]
    for seed in range(4):
        assert drawn(compiler, choice(*choices), seed) in choices


@pytest.mark.parametrize(
    "text", ["a\x00b", "\x7f", "line\u2028line", 'a"b\\c\n\t', "/x/", "a|b", "😀 é", "[(*", " ", "<b>"]
)
def test_a_choice_of_any_characters(compiler: Compiler, text: str) -> None:
    assert drawn(compiler, choice(text), 0) == text
    assert drawn(compiler, choice(text, "other"), 1) in (text, "other")


def json_of(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON, json.dumps(schema))


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (json_of({"$ref": "#"}), "no text fits"),
        (Grammar(GrammarKind.LARK, "start: start"), "no text fits"),
        (Grammar(GrammarKind.REGEX, "[^\\s\\S]"), "no text fits"),
        (json_of({"$defs": {"a": ENDLESS}, "$ref": "#/$defs/a"}), "items"),
        (Grammar(GrammarKind.LARK, 'start: (("a"{1000}){1000}){1000}'), "items"),
    ],
)
def test_what_cannot_be_begun_is_refused_when_it_is_compiled(
    compiler: Compiler, grammar: Grammar, why: str
) -> None:
    with pytest.raises(GrammarInvalid, match=why) as refused:
        compiler.compile(grammar, (END,), NOTHING).result()
    assert "<" not in refused.value.message
