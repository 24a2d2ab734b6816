"""Makes the grammar that a reply has to follow: a text format, required tool calls, or strict arguments.

The engine compiles the grammar. It also enforces the limits of a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...runtime.grammar.limits import excess
from ...runtime.link.messages import Grammar, GrammarKind
from ..errors import GrammarInvalid
from ..items import Tool

if TYPE_CHECKING:
    from ..text.tokenizer import ChatTokenizer

MAX_GRAMMAR_BYTES = 128 << 10
MAX_CALLS = 16
"""The most calls that a reply with required calls may make."""

_CALLS = f"call (between call){{0,{MAX_CALLS - 1}}}"

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Separators of JSON arguments, as templates write them."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes a call: ``opening head NAME middle ARGUMENTS tail closing``, with NAME as a JSON
    string.

    ``between`` separates two calls.
    """

    opening: str
    head: str
    middle: str
    tail: str
    closing: str
    between: str


# --- of text ----------------------------------------------------------------------------------------------


def json_format(schema: dict[str, Any], *, strict: bool, param: str) -> Grammar:
    """The grammar of JSON that fits ``schema``. Unless ``strict``, unsupported keywords are ignored.

    Raises ``GrammarInvalid``.
    """
    check_schema(schema, param)
    guided = {**schema, "x-guidance": {"lenient": not strict}}
    return checked_grammar(Grammar(GrammarKind.JSON, _json(guided)), param)


def checked_grammar(grammar: Grammar, param: str) -> Grammar:
    """Return the grammar if it is within bounds. Raises ``GrammarInvalid``."""
    if not grammar.text:
        raise GrammarInvalid("A grammar must not be empty", param=param)
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError:
        raise GrammarInvalid("A grammar holds a lone surrogate, which is no character", param=param) from None
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarInvalid(f"A grammar has at most {MAX_GRAMMAR_BYTES} bytes", param=param)
    if grammar.kind is GrammarKind.LARK and "%json" in grammar.text:
        raise GrammarInvalid("A lark grammar has no %json here: use a json_schema format", param=param)
    return grammar


def check_schema(schema: Any, param: str) -> None:
    """Raises ``GrammarInvalid`` if the schema would take too long to compile."""
    bound = excess(schema)
    if bound is not None:
        raise GrammarInvalid(f"A schema to be followed has {bound}", param=param)


# --- of calls ---------------------------------------------------------------------------------------------


def check_tool(tool: Tool, param: str) -> None:
    """Raises ``GrammarInvalid`` if the schema of the tool's arguments is too large, or not of an object."""
    check_schema(tool.parameters, param)
    if tool.parameters.get("type", "object") != "object":
        raise GrammarInvalid(f"The parameters of tool {tool.name!r} are no object", param=param)


@dataclass(frozen=True, slots=True)
class CallWriter:
    """Makes grammars of replies with tool calls in one form."""

    form: CallSyntax
    tokenizer: ChatTokenizer

    def forced(self, tools: Sequence[Tool], *, one: bool) -> Grammar:
        """A grammar of only calls of these tools. ``one``: exactly one call."""
        return self._grammar(f"start: {'call' if one else _CALLS}", self._call(tools), self._between())

    def answered(self, answer: Grammar, tools: Sequence[Tool]) -> Grammar:
        """A grammar of either JSON as in ``answer``, or calls. Raises ``GrammarInvalid`` if calls are bare
        JSON."""
        if self.form.opening.startswith("{"):
            raise GrammarInvalid(
                "A format cannot go with tools if their calls are bare JSON, too", param="tools"
            )
        start = f"start: answer | {_CALLS}\nanswer: %json {_styled(json.loads(answer.text))}"
        return self._grammar(start, self._call(tools), self._between())

    def strict(self, tools: Sequence[Tool]) -> Grammar:
        """A grammar of any text in which each call is of one of these tools and has valid arguments."""
        opening = re.escape(self.form.opening).replace("/", "\\/")
        words = f"WORDS: /(.|\\n)*/ & ~/(.|\\n)*{opening}(.|\\n)*/"
        others = self._others()
        mark = f"mark: <[{','.join(map(str, others))}]>" if others else ""
        marked = "| WORDS mark" if others else ""
        if self._is_token(self.form.opening):
            start = f"start: (WORDS call {marked})* WORDS"
            return self._grammar(start, words, mark, self._call(tools))
        start = f"start: (opened body {marked})* WORDS"
        opened = f"opened[lazy]: /(.|\\n)*/ {_quoted(self.form.opening)}"
        return self._grammar(start, words, mark, opened, self._call(tools))

    def _grammar(self, *rules: str) -> Grammar:
        return Grammar(GrammarKind.LARK, "\n".join(rule for rule in rules if rule) + "\n")

    def _call(self, tools: Sequence[Tool]) -> str:
        form = self.form
        options = " | ".join(
            f"{_quoted(json.dumps(tool.name, ensure_ascii=False) + form.middle)} %json {_arguments(tool)}"
            for tool in tools
        )
        body = f"body: {_quoted(form.head)} ({options}) {_quoted(form.tail)} {self._tag(form.closing)}"
        return f"call: {self._tag(form.opening)} body\n{body}"

    def _between(self) -> str:
        return f"between: {json.dumps(self.form.between)}"

    def _tag(self, tag: str) -> str:
        return tag if self._is_token(tag) else _quoted(tag)

    def _is_token(self, tag: str) -> bool:
        """Whether the tag is an added token that looks like ``<…>``: llguidance does not take it for text
        then."""
        known = self.tokenizer.backend.get_added_tokens_decoder().values()
        return tag.startswith("<") and tag.endswith(">") and any(token.content == tag for token in known)

    def _others(self) -> list[int]:
        """Other added tokens that llguidance does not take for text and the model may write, such as
        ``<think>``."""
        known = self.tokenizer.backend.get_added_tokens_decoder().items()
        tags = (self.form.opening, self.form.closing)
        return sorted(
            number
            for number, token in known
            if not token.special and token.content not in tags and self._is_token(token.content)
        )


def _arguments(tool: Tool) -> str:
    schema = closed({"type": "object", **tool.parameters}) if tool.parameters else {"type": "object"}
    return _styled(schema, lenient=not tool.strict)


def closed(schema: Any) -> Any:
    """The schema in which an object with ``properties`` allows no other ones, unless it says that it does.

    So the model cannot invent arguments.
    """
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) if key in _NESTED else value for key, value in schema.items()}
    for key in _NAMED:
        if isinstance(found.get(key), dict):
            found[key] = {name: closed(inner) for name, inner in found[key].items()}
    if isinstance(found.get("properties"), dict) and not _OPEN.intersection(found):
        found["additionalProperties"] = False
    return found


_NESTED = frozenset({"items", "prefixItems", "anyOf", "oneOf"})
_NAMED = ("properties", "$defs", "definitions")
_OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
)


def _styled(schema: dict[str, Any], *, lenient: bool = False) -> str:
    own = schema.get("x-guidance")
    lenient = lenient or (isinstance(own, dict) and own.get("lenient") is True)
    return _json({**schema, "x-guidance": {**STYLE, "lenient": lenient}})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    """A literal of Lark; empty for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""
