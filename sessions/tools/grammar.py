"""What a reply may say, as one grammar for the engine: a text format, calls to be made, strict arguments.

Holds how models write calls (`SYNTAXES`); a schema's bounds are the engine's. Knows tools and tags; no tokens
but the tags that are one, and nothing of how a grammar is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.grammar.limits import excess
from ...runtime.link.messages import Grammar, GrammarKind
from ..errors import GrammarInvalid
from ..items import Tool
from ..text.tokenizer import ChatTokenizer

MAX_GRAMMAR_BYTES = 128 << 10
MAX_CALLS = 16
"""That one reply may be forced to make."""

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Arguments as templates write them."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes a call: ``opening head NAME middle ARGUMENTS tail closing``, NAME as a JSON string.

    ``between``: what stands between two calls.
    """

    opening: str
    head: str
    middle: str
    tail: str
    closing: str
    between: str


# --- of text ----------------------------------------------------------------------------------------------


def json_format(schema: dict[str, Any], *, strict: bool, param: str) -> Grammar:
    """JSON that fits ``schema``; not ``strict``: keywords that cannot be followed are passed over.

    Raises ``GrammarInvalid``.
    """
    check_schema(schema, param)
    guided = {**schema, "x-guidance": {"lenient": not strict}}
    return checked_grammar(Grammar(GrammarKind.JSON, _json(guided)), param)


def checked_grammar(grammar: Grammar, param: str) -> Grammar:
    """The grammar, if an engine may be given it. Raises ``GrammarInvalid``."""
    if not grammar.text:
        raise GrammarInvalid("A grammar must not be empty", param=param)
    if len(grammar.text) > MAX_GRAMMAR_BYTES or len(_utf8(grammar.text, param)) > MAX_GRAMMAR_BYTES:
        raise GrammarInvalid(f"A grammar has at most {MAX_GRAMMAR_BYTES} bytes", param=param)
    if grammar.kind is GrammarKind.LARK and "%json" in grammar.text:
        raise GrammarInvalid("A lark grammar has no %json here: use a json_schema format", param=param)
    return grammar


def check_schema(schema: Any, param: str) -> None:
    """Raises ``GrammarInvalid`` for what would take long to compile: depth, size, multiples."""
    bound = excess(schema)
    if bound is not None:
        raise GrammarInvalid(f"A schema to be followed has {bound}", param=param)


# --- of calls ---------------------------------------------------------------------------------------------


def check_tool(tool: Tool, param: str) -> None:
    """Raises ``GrammarInvalid`` where the tool's arguments cannot be followed: too large, or no object."""
    check_schema(tool.parameters, param)
    if tool.parameters.get("type", "object") != "object":
        raise GrammarInvalid(f"The parameters of tool {tool.name!r} are no object", param=param)


@dataclass(frozen=True, slots=True)
class CallWriter:
    """Grammars of replies that call tools, in one model's form."""

    form: CallSyntax
    tokenizer: ChatTokenizer

    def forced(self, tools: Sequence[Tool], *, one: bool) -> Grammar:
        """Nothing but calls, of these tools; ``one``: a single one."""
        calls = "call" if one else f"call (between call){{0,{MAX_CALLS - 1}}}"
        return self._grammar(f"start: {calls}", self._call(tools), self._between())

    def answered(self, answer: Grammar, tools: Sequence[Tool]) -> Grammar:
        """JSON as in ``answer``, or calls. Raises ``GrammarInvalid`` where a call begins as any JSON does."""
        if self.form.opening.startswith("{"):
            raise GrammarInvalid(
                "A format cannot go with tools whose calls are bare JSON, too", param="tools"
            )
        calls = f"call (between call){{0,{MAX_CALLS - 1}}}"
        start = f"start: answer | {calls}\nanswer: %json {_styled(json.loads(answer.text))}"
        return self._grammar(start, self._call(tools), self._between())

    def strict(self, tools: Sequence[Tool]) -> Grammar:
        """Any text; where a call is opened it is one of these tools', with its arguments."""
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
        """Whether the tag is a token of its own, which no text is: llguidance takes it for one by its look."""
        known = self.tokenizer.backend.get_added_tokens_decoder().values()
        return tag.startswith("<") and tag.endswith(">") and any(token.content == tag for token in known)

    def _others(self) -> list[int]:
        """Added tokens that are no text to llguidance and yet are the model's to say, as ``<think>`` is."""
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
    """The schema with every object that names its properties closed to others, where it says nothing of them.

    What a tool was never told of is no argument of it.
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
    """As a literal of Lark; of nothing, nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _utf8(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise GrammarInvalid("A grammar holds a lone surrogate, which is no character", param=param) from None
