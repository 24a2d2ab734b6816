"""Makes the grammar that a reply has to follow: a text format, required tool calls, or strict arguments.

The engine compiles the grammar. It also enforces the limits of a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...runtime.verbs import Grammar, GrammarKind
from ..conversation.items import Tool
from ..errors import GrammarInvalid
from .arguments import EMPTY, ArgumentRules, ArgumentSyntax, followed, parameters, quoted, styled

if TYPE_CHECKING:
    from ..text.tokenizer import ChatTokenizer

MAX_GRAMMAR_BYTES = 128 << 10
MAX_CALLS = 16
"""The most calls that a reply with required calls may make."""

STRING_BYTES = 32 << 10
"""The most bytes of UTF-8 in a string of a JSON reply, unless a `maxLength` in its schema allows more."""
MOST_ESCAPED = 12
"""Bytes of one character that is written as two escapes of JSON, as an emoji can be."""


class CallSyntax:
    """How a model writes a call: ``written`` as ``opening«head NAME middle ARGUMENTS tail»closing``, with
    STRING for a name that is a JSON string, and ``NAME:0`` for one that a colon and a number follow.

    ``between``: the text between two calls. ``listed``: opening and closing are around all calls together, not
    around each one. ``parameter``: how each argument is written; None if the arguments are a JSON object.
    ``channels``: calls and texts are messages in channels; then a call ends the reply.
    """

    def __init__(
        self,
        written: str,
        between: str = "",
        *,
        listed: bool = False,
        parameter: ArgumentSyntax | None = None,
        channels: bool = False,
    ) -> None:
        found = _WRITTEN.fullmatch(written)
        assert found is not None, "a call has a name and arguments"
        self.opening, self.head, name, number, self.middle, self.tail, self.closing = found.groups("")
        self.bare, self.numbered = name == "NAME", bool(number)
        self.between, self.listed = between, listed
        self.parameter, self.channels = parameter, channels


_WRITTEN = re.compile("(.*)«(.*)(NAME|STRING)(:0)?(.*)ARGUMENTS(.*)»(.*)", re.DOTALL)


# --- of text ----------------------------------------------------------------------------------------------


def json_format(schema: dict[str, Any], *, strict: bool, param: str) -> Grammar:
    """A grammar of JSON that fits ``schema``. ``strict``: what cannot be enforced is refused; else it is left
    out. ``param``: the field that an error names. Raises ``GrammarInvalid``."""
    guided = {**followed(schema, strict=strict, param=param), "x-guidance": {"lenient": not strict}}
    written = json.dumps(guided, ensure_ascii=False)
    return checked_grammar(Grammar(GrammarKind.JSON, written, string_bytes(schema)), param)


def string_bytes(*schemas: Any) -> int:
    """The most bytes that a string may have in JSON of these schemas: `STRING_BYTES`, or more where a schema
    allows more."""
    longest, waiting = 0, list(schemas)
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            bound = node.get("maxLength")
            longest = max(longest, bound if isinstance(bound, int) else 0)
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return max(STRING_BYTES, min(longest * MOST_ESCAPED, 2**62))


def checked_grammar(grammar: Grammar, param: str) -> Grammar:
    """Check that the client's ``grammar`` is not empty nor too large, and has no embedded JSON Schema if it
    is in Lark; returns it. ``param``: the field that an error names. Raises ``GrammarInvalid``."""
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


# --- of calls ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallWriter:
    """Makes grammars for replies with tool calls in the form ``form``. ``marks``: ids of special tokens that
    may also occur between texts and calls."""

    form: CallSyntax
    tokenizer: ChatTokenizer
    marks: frozenset[int] = frozenset()

    def forced(self, tools: Sequence[Tool], *, one: bool) -> Grammar:
        """A grammar that allows only calls of these tools. ``one``: exactly one call; else up to
        `MAX_CALLS`."""
        start = f"start: {self._calls(1 if one else MAX_CALLS)}"
        return self._grammar(start, *self._rules(tools, one=one), string_bytes=self._string_bytes(tools))

    def answered(self, answer: Grammar, tools: Sequence[Tool]) -> Grammar:
        """A grammar that allows either calls of these tools, or JSON that fits ``answer``. Raises
        ``GrammarInvalid`` if calls are bare JSON, too."""
        if self.form.opening.startswith("{"):
            raise GrammarInvalid(
                "A format cannot go with tools if their calls are bare JSON, too", param="tools"
            )
        start = f"start: answer | {self._calls(MAX_CALLS)}" if tools else "start: answer"
        final = self._tag("<|channel|>final<|message|>") if self.form.channels else ""
        schema = json.loads(answer.text)
        written = f"answer: {final} %json {styled(schema, lenient=schema['x-guidance']['lenient'])}"
        most = self._string_bytes(tools) and max(answer.string_bytes, self._string_bytes(tools))
        return self._grammar(start, written, *(self._rules(tools) if tools else ()), string_bytes=most)

    def strict(self, tools: Sequence[Tool]) -> Grammar:
        """A grammar that allows any text, with calls of these tools only and with valid arguments."""
        rules = self._rules(tools)
        if self.form.channels:
            channel, message = map(self._tag, ("<|channel|>", "<|message|>"))
            said = f"said: {channel} /analysis|commentary|final/ {message} WORDS"
            start = f"start: (said {self._tag('<|end|><|start|>assistant')})* (said | call)"
            return self._grammar(start, said, "WORDS: /(.|\\n)*/", *rules)
        first, *others = self._parts(self.form.opening)
        opening = re.escape(first).replace("/", "\\/").replace("\n", "n")
        words = f"WORDS: /(.|\\n)*/ & ~/(.|\\n)*{opening}(.|\\n)*/"
        marks = ",".join(map(str, self._marks()))
        mark = f"mark: <[{marks}]>" if marks else ""
        marked = "| WORDS mark" if marks else ""
        if self._token(first) is not None:
            return self._grammar(f"start: (WORDS call {marked})* WORDS", words, mark, *rules)
        opened = f"opened[lazy]: /(.|\\n)*/ {quoted(first)}"
        start = f"start: (opened {self._tag(''.join(others))} rest {marked})* WORDS"
        return self._grammar(start, words, mark, opened, *rules)

    def _grammar(self, *rules: str, string_bytes: int = 0) -> Grammar:
        return Grammar(GrammarKind.LARK, "\n".join(rule for rule in rules if rule) + "\n", string_bytes)

    def _string_bytes(self, tools: Sequence[Tool]) -> int:
        """The most bytes of a string in a call's arguments; 0 if they are not JSON."""
        return 0 if self.form.parameter is not None else string_bytes(*(tool.parameters for tool in tools))

    def _calls(self, most: int) -> str:
        """A Lark expression for one to ``most`` calls. A list of calls counts as one call."""
        more = not self.form.listed and not self.form.channels and most > 1
        return f"call (between call){{0,{most - 1}}}" if more else "call"

    def _rules(self, tools: Sequence[Tool], *, one: bool = False) -> Iterator[str]:
        """The Lark rules that define ``call``, which is a call with its tags or a list of calls, and ``rest``,
        which is a ``call`` without its opening. ``one``: a list has exactly one call."""
        form = self.form
        more = f"(between body){{0,{MAX_CALLS - 1}}}" if form.listed and not one else ""
        yield f"call: {self._tag(form.opening)} rest"
        yield f"rest: body {more} {self._tag(form.closing)}"
        yield f"between: {self._tag(form.between) or EMPTY}"
        names = [tool.name if form.bare else json.dumps(tool.name, ensure_ascii=False) for tool in tools]
        number, middle = ('":" /[0-9]{1,4}/', form.middle) if form.numbered else ("", "")
        arguments = [
            f"%json {styled(parameters(tool), lenient=not tool.strict)}"
            if form.parameter is None
            else f"given{at}"
            for at, tool in enumerate(tools)
        ]
        options = " | ".join(
            f"{self._tag(name if number else name + form.middle)} {number} {self._tag(middle)} {given}"
            for name, given in zip(names, arguments, strict=True)
        )
        yield f"body: {self._tag(form.head)} ({options}) {self._tag(form.tail)}"
        if form.parameter is not None:
            rules = ArgumentRules(form.parameter, self._tag, self._until)
            yield from rules.shared()
            for at, tool in enumerate(tools):
                yield from rules.of_tool(at, tool)

    def _tag(self, text: str) -> str:
        """``text``, a text such as `form.opening` that the model writes around calls, as a Lark expression:
        special tokens in it are written by name or number. Empty for an empty text."""
        found = [(part, self._token(part)) for part in self._parts(text)]
        return " ".join(
            quoted(part) if token is None else part if _TOKEN_NAME.fullmatch(part) else f"<[{token}]>"
            for part, token in found
        )

    def _until(self, text: str) -> str:
        """The Lark rule ``text``: any text up to ``text``, and that. If it has a special token, any text in
        ``text`` before that token counts as free."""
        parts = self._parts(text)
        tokens = [at for at, part in enumerate(parts) if self._token(part) is not None]
        if not tokens:
            return f"text[lazy]: /(.|\\n)*/ {quoted(text)}"
        return f"text: FREE {self._tag(''.join(parts[tokens[0] :]))}\nFREE: /(.|\\n)*/"

    def _parts(self, text: str) -> list[str]:
        """The text cut into parts. Each part is one token, or text that contains no such token."""
        tokens = [tag for tag in _TAG.findall(text) if self._token(tag) is not None]
        if not tokens:
            return [text]
        return [part for part in re.split(f"({'|'.join(map(re.escape, tokens))})", text) if part]

    def _token(self, tag: str) -> int | None:
        """The id of an added token that llguidance would not match as text: a special token, or one that looks
        like ``<…>``. None for any other text."""
        special = self.tokenizer.special_ids.get(tag)
        if special is not None or not (tag.startswith("<") and tag.endswith(">")):
            return special
        token = self.tokenizer.backend.token_to_id(tag)
        return token if token in self.tokenizer.added else None

    def _marks(self) -> list[int]:
        """The ids in `marks`, and other added tokens that the model may write and llguidance would not match as
        text, such as ``<think>``."""
        form = self.form
        tags = [form.opening, form.head, form.middle, form.tail, form.closing]
        if form.parameter is not None:
            tags += [form.parameter.before, form.parameter.behind, form.parameter.end, form.parameter.quote]
        own = {part for tag in tags for part in self._parts(tag)}
        known = self.tokenizer.backend.get_added_tokens_decoder().items()
        return sorted(
            number
            for number, token in known
            if (not token.special or number in self.marks)
            and token.content not in own
            and self._token(token.content) is not None
        )


_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""What may be a single token inside the texts of a form."""
_TOKEN_NAME = re.compile(r"</?[\w|]+>", re.ASCII)
"""A token that Lark can refer to by its name."""
