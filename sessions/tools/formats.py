"""How models write tool calls and reasoning: a table of the forms, and which form a model uses.

A form of calls is a `CallFormat` in `FORMATS` if a call's arguments are an object, an `XmlFormat` in
`XML_FORMATS` if each argument has tags of its own, and a pair of tags in `PYTHON_TAGS` if calls are Python. One
form has a parser of its own instead: messages in channels. A form with a `CallSyntax` in `SYNTAXES` can also be
enforced by a grammar. `REASONING` has the forms of reasoning.

A model's form is found by texts that are typical of it (`_SIGNS`): first in transformers' response template
(``response_template`` in the tokenizer's configuration), then in the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex

from ..conversation.items import Tool
from .arguments import ArgumentSyntax
from .channels import CHANNEL, CONSTRAIN, MARKS, MESSAGE, ChannelParser
from .forms import CallForm, ReasoningForm
from .grammar import CallSyntax
from .objects import SPACE
from .python_calls import PythonCallParser
from .reasoning import THINK, ReasoningSplitter, ReasoningTags
from .scanner import CallFormat, CallParser, CallScanner, TextParser
from .xml_calls import XmlCallParser, XmlFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
GRANITE_OPEN, GRANITE_CLOSE = "<|tool_call|>", "<|/tool_call|>"
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
SEED_OPEN, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"
DEEPSEEK_CALLS, DEEPSEEK_CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
DEEPSEEK_SEP, DEEPSEEK_END, DEEPSEEK_CLOSE = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
KIMI_CALLS, KIMI_CALL, KIMI_SEP = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
)
KIMI_END, KIMI_CLOSE = "<|tool_call_end|>", "<|tool_calls_section_end|>"
CALLS, CALLS_CLOSE = "<tool_calls>", "</tool_calls>"
TOOLCALL, TOOLCALL_CLOSE = "<TOOLCALL>", "</TOOLCALL>"
MINIMAX_OPEN, MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
GLM_MARKS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FUNCTION_OPEN, FUNCTION_CLOSE, FUNCTION_QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
LFM_OPEN, LFM_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


_STRING = r'"(?:[^"\\]|\\.)*"'
_OBJECT = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>STRING)\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*\{'.replace("STRING", _STRING)
)
_TAGGED = re.compile(
    r'\s*(?:\[\s*)?\{S"name"S:S(?P<name>STRING)S,S"arguments"S:S\{'.replace("STRING", _STRING).replace(
        "S", f"[{SPACE}]*"
    )
)
_ACTION = re.compile(
    r'\s*(?:\[\s*)?\{\s*(?:"tool_call_id"\s*:\s*STRING\s*,\s*)?"tool_name"\s*:\s*(?P<name>STRING)\s*,\s*'
    r'"parameters"\s*:\s*\{'.replace("STRING", _STRING)
)
_NAME = r"(?P<name>[A-Za-z0-9_.-]+)"

_DEEPSEEK = CallFormat(
    openings=(DEEPSEEK_CALLS, DEEPSEEK_CALL),
    head=_OBJECT,
    named=regex.compile(
        rf"(?:{DEEPSEEK_CALL}\s*)?(?:function{DEEPSEEK_SEP})?{_NAME}\s*(?:{DEEPSEEK_SEP}|```json)\s*\{{"
    ),
    over=DEEPSEEK_CLOSE,
    marks=(DEEPSEEK_CALLS, DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_END, DEEPSEEK_CLOSE),
)
_GEMMA_CALL = regex.compile(r"\s*call:\s*(?P<name>[^\s{}:<>]+)\s*\{")
FORMATS = {
    CallForm.HERMES: CallFormat(openings=(OPEN,), closing=CLOSE, head=_TAGGED, no_arguments=b"{}", bare=True),
    CallForm.LLAMA3_JSON: CallFormat(head=_OBJECT, optional=PYTHON_TAG, marks=(PYTHON_TAG,)),
    CallForm.MISTRAL: CallFormat(
        openings=(TOOL_CALLS,),
        head=_OBJECT,
        listed=True,
        named=regex.compile(_NAME + r"\s*(?:\[CALL_ID\][^\[\s]*\s*)?(?:\[ARGS\])?\s*\{"),
        marks=(TOOL_CALLS, "[ARGS]", "[CALL_ID]"),
    ),
    CallForm.GRANITE: CallFormat(
        openings=(GRANITE_OPEN, OPEN), head=_OBJECT, listed=True, marks=(GRANITE_OPEN, OPEN)
    ),
    CallForm.PHI4_MINI: CallFormat(
        openings=(GRANITE_OPEN,),
        closing=GRANITE_CLOSE,
        head=_TAGGED,
        no_arguments=b"{}",
        marks=(GRANITE_OPEN, GRANITE_CLOSE),
    ),
    CallForm.FUNCTOOLS: CallFormat(openings=("functools",), head=_OBJECT, listed=True),
    CallForm.DEEPSEEK_V3: _DEEPSEEK,
    CallForm.DEEPSEEK_V31: _DEEPSEEK,
    CallForm.COMMAND_R: CallFormat(
        openings=("Action:",), head=_ACTION, optional="```json", listed=True, key="tool_name"
    ),
    CallForm.COMMAND_R7B: CallFormat(
        openings=(ACTION,), closing=ACTION_END, head=_ACTION, key="tool_name", marks=(ACTION, ACTION_END)
    ),
    CallForm.KIMI_K2: CallFormat(
        openings=(KIMI_CALLS, KIMI_CALL),
        over=KIMI_CLOSE,
        named=regex.compile(
            rf"(?:{re.escape(KIMI_CALL)}\s*)?(?:functions\.)?{_NAME}:[0-9]+\s*{re.escape(KIMI_SEP)}\s*\{{"
        ),
        marks=(KIMI_CALLS, KIMI_CALL, KIMI_SEP, KIMI_END, KIMI_CLOSE),
    ),
    CallForm.MINIMAX: CallFormat(
        openings=(CALLS,), closing=CALLS_CLOSE, head=_TAGGED, no_arguments=b"{}", marks=(CALLS, CALLS_CLOSE)
    ),
    CallForm.NEMOTRON_JSON: CallFormat(
        openings=(TOOLCALL,), closing=TOOLCALL_CLOSE, head=_TAGGED, marks=(TOOLCALL, TOOLCALL_CLOSE)
    ),
    CallForm.GEMMA4: CallFormat(
        openings=(GEMMA_OPEN,),
        over=GEMMA_CLOSE,
        named=_GEMMA_CALL,
        quote=GEMMA_QUOTE,
        marks=(GEMMA_OPEN, GEMMA_CLOSE, GEMMA_QUOTE),
    ),
    CallForm.FUNCTIONGEMMA: CallFormat(
        openings=(FUNCTION_OPEN,),
        over=FUNCTION_CLOSE,
        named=_GEMMA_CALL,
        quote=FUNCTION_QUOTE,
        marks=(FUNCTION_OPEN, FUNCTION_CLOSE, FUNCTION_QUOTE),
    ),
}
"""How a parser reads each form in which a call's arguments are an object."""

_TAGS = XmlFormat(
    openings=(OPEN, SEED_OPEN, "<function="),
    closings=(CLOSE, SEED_CLOSE),
    head=regex.compile(r"(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[^<>\s]+)\s*>"),
    end="</function>",
    begin="<parameter=",
    parameter=regex.compile(r"<parameter=(?P<name>[^<>]+)>"),
    parameter_end="</parameter>",
    marks=(OPEN, CLOSE, SEED_OPEN, SEED_CLOSE),
)
_GLM = XmlFormat(
    openings=(OPEN,),
    closings=(),
    head=regex.compile(r"<tool_call>\s*(?P<name>[^\s<>{}\[\]\"]+)(?=\s*<(?:arg_key>|/tool_call>))"),
    end=CLOSE,
    begin="<arg_key>",
    parameter=regex.compile(r"<arg_key>(?P<name>[^<>]+)(?:</arg_key>)?\s*<arg_value>"),
    parameter_end="</arg_value>",
    exact=True,
    marks=(OPEN, CLOSE, *GLM_MARKS),
)
XML_FORMATS = {
    CallForm.QWEN3_CODER: _TAGS,
    CallForm.SEED_OSS: _TAGS,
    CallForm.GLM45: _GLM,
    CallForm.GLM47: _GLM,
    CallForm.MINIMAX_M2: XmlFormat(
        openings=(MINIMAX_OPEN, "<invoke name="),
        closings=(MINIMAX_CLOSE,),
        head=regex.compile(rf'(?:{MINIMAX_OPEN}\s*)?<invoke name="?(?P<name>[^"<>\s]+)"?\s*>'),
        end="</invoke>",
        begin="<parameter name=",
        parameter=regex.compile(r'<parameter name="?(?P<name>[^<>]+?)"?\s*>'),
        parameter_end="</parameter>",
        marks=(MINIMAX_OPEN, MINIMAX_CLOSE),
    ),
}
"""How a parser reads each form in which each argument has tags of its own."""

PYTHON_TAGS: dict[CallForm, tuple[str, ...]] = {CallForm.PYTHONIC: (), CallForm.LFM2: (LFM_OPEN, LFM_CLOSE)}
"""The tags around a list of calls in Python, for each form in which calls are written so."""

_CALL, _ACTED = '{"name": STRING, "arguments": ARGUMENTS}', '{"tool_name": STRING, "parameters": ARGUMENTS}'
_NAMED = CallSyntax(f"{TOOL_CALLS}«NAME[ARGS]ARGUMENTS»")
_GEMMA_ARGUMENT = ArgumentSyntax("", ":", "", ",", GEMMA_QUOTE)
SYNTAXES = {
    CallForm.HERMES: CallSyntax(f"{OPEN}«\n{_CALL}\n»{CLOSE}", "\n"),
    CallForm.LLAMA3_JSON: CallSyntax('{"name": «STRING, "parameters": ARGUMENTS}»', "; "),
    CallForm.MISTRAL: CallSyntax(f"{TOOL_CALLS}[«{_CALL}»]", ", ", listed=True),
    CallForm.GRANITE: CallSyntax(f"{GRANITE_OPEN}[«{_CALL}»]", ", ", listed=True),
    CallForm.PHI4_MINI: CallSyntax(f"{GRANITE_OPEN}[«{_CALL}»]{GRANITE_CLOSE}", ", ", listed=True),
    CallForm.FUNCTOOLS: CallSyntax(f"functools[«{_CALL}»]", ", ", listed=True),
    CallForm.DEEPSEEK_V3: CallSyntax(
        f"{DEEPSEEK_CALLS}«{DEEPSEEK_CALL}function{DEEPSEEK_SEP}NAME\n```json\nARGUMENTS\n```{DEEPSEEK_END}»"
        f"{DEEPSEEK_CLOSE}",
        "\n",
        listed=True,
    ),
    CallForm.DEEPSEEK_V31: CallSyntax(
        f"{DEEPSEEK_CALLS}«{DEEPSEEK_CALL}NAME{DEEPSEEK_SEP}ARGUMENTS{DEEPSEEK_END}»{DEEPSEEK_CLOSE}",
        listed=True,
    ),
    CallForm.COMMAND_R: CallSyntax(f"Action: ```json\n[«{_ACTED}»]\n```", ", ", listed=True),
    CallForm.COMMAND_R7B: CallSyntax(f"{ACTION}[«{_ACTED}»]{ACTION_END}", ", ", listed=True),
    CallForm.QWEN3_CODER: CallSyntax(
        f"{OPEN}«\n<function=NAME>\nARGUMENTS</function>\n»{CLOSE}",
        "\n",
        parameter=ArgumentSyntax("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    CallForm.SEED_OSS: CallSyntax(
        f"{SEED_OPEN}«\n<function=NAME>\nARGUMENTS</function>\n»{SEED_CLOSE}",
        "\n",
        parameter=ArgumentSyntax("<parameter=", ">", "</parameter>\n"),
    ),
    CallForm.GLM45: CallSyntax(
        f"{OPEN}«NAME\nARGUMENTS»{CLOSE}",
        "\n",
        parameter=ArgumentSyntax("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    CallForm.GLM47: CallSyntax(
        f"{OPEN}«NAMEARGUMENTS»{CLOSE}",
        parameter=ArgumentSyntax("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
    CallForm.KIMI_K2: CallSyntax(
        f"{KIMI_CALLS}«{KIMI_CALL}functions.NAME:0{KIMI_SEP}ARGUMENTS{KIMI_END}»{KIMI_CLOSE}", listed=True
    ),
    CallForm.MINIMAX: CallSyntax(f"{CALLS}\n«{_CALL}\n»{CALLS_CLOSE}", listed=True),
    CallForm.MINIMAX_M2: CallSyntax(
        f'{MINIMAX_OPEN}\n«<invoke name="NAME">\nARGUMENTS</invoke>\n»{MINIMAX_CLOSE}',
        listed=True,
        parameter=ArgumentSyntax('<parameter name="', '">', "</parameter>\n"),
    ),
    CallForm.GEMMA4: CallSyntax(
        f"{GEMMA_OPEN}«call:NAME{{ARGUMENTS}}»{GEMMA_CLOSE}", parameter=_GEMMA_ARGUMENT
    ),
    CallForm.FUNCTIONGEMMA: CallSyntax(
        f"{FUNCTION_OPEN}«call:NAME{{ARGUMENTS}}»{FUNCTION_CLOSE}",
        parameter=replace(_GEMMA_ARGUMENT, quote=FUNCTION_QUOTE),
    ),
    CallForm.LFM2: CallSyntax(
        f"{LFM_OPEN}[«NAME(ARGUMENTS)»]{LFM_CLOSE}",
        ", ",
        listed=True,
        parameter=ArgumentSyntax("", "=", "", ", "),
    ),
    CallForm.NEMOTRON_JSON: CallSyntax(f"{TOOLCALL}[«{_CALL}»]{TOOLCALL_CLOSE}", ", ", listed=True),
    CallForm.HARMONY: CallSyntax(
        f"«{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}ARGUMENTS»", channels=True
    ),
}
"""How a call is written in each form that grammars can be made for."""

REASONING = {
    ReasoningForm.THINK: THINK,
    ReasoningForm.OPENED: THINK,
    ReasoningForm.COMMAND: ReasoningTags(
        "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    ReasoningForm.MISTRAL: ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningForm.SEED: ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningForm.GEMMA4: ReasoningTags("<|channel>", "<channel|>", ("<channel|>",), label="thought"),
}
"""The tags of each form of reasoning."""

_ENDS = {
    CallForm.LLAMA3_JSON: frozenset({"<|eom_id|>"}),
    CallForm.PYTHONIC: frozenset({"<|eom_id|>", "<|eom|>"}),
    CallForm.HARMONY: frozenset({"<|call|>", "<|return|>"}),
    CallForm.GEMMA4: frozenset({"<|tool_response>"}),
    CallForm.FUNCTIONGEMMA: frozenset({"<start_function_response>"}),
}
"""For some forms: special tokens that end a reply, even if the model's configuration does not list them."""
_GOES_ON = {CallForm.HARMONY: frozenset({"<|end|>"})}
"""For some forms: special tokens that do not end a reply, even if the template writes them behind replies."""

_SIGNS: tuple[tuple[str, CallForm | None], ...] = (
    ("<|channel|>", CallForm.HARMONY),
    (SEED_OPEN, CallForm.SEED_OSS),
    ("]<]minimax[>[", None),
    ("<invoke name=", CallForm.MINIMAX_M2),
    ("<parameter=", CallForm.QWEN3_CODER),
    ("</function>", None),
    ("<function=", CallForm.QWEN3_CODER),
    ("{function-name}<arg_key>", CallForm.GLM47),
    ("<arg_key>", CallForm.GLM45),
    (KIMI_SEP, CallForm.KIMI_K2),
    (GEMMA_OPEN, CallForm.GEMMA4),
    (FUNCTION_OPEN, CallForm.FUNCTIONGEMMA),
    (TOOLCALL, CallForm.NEMOTRON_JSON),
    (LFM_OPEN, CallForm.LFM2),
    ("<|tool_list_start|>", CallForm.LFM2),
    ("List of tools: [", CallForm.LFM2),
    (CALLS, CallForm.MINIMAX),
    (f"function{DEEPSEEK_SEP}", CallForm.DEEPSEEK_V3),
    (f"type'] + '{DEEPSEEK_SEP}", CallForm.DEEPSEEK_V3),
    (DEEPSEEK_CALL, CallForm.DEEPSEEK_V31),
    (DEEPSEEK_CALLS, CallForm.DEEPSEEK_V31),
    (ACTION, CallForm.COMMAND_R7B),
    ('"tool_name"', CallForm.COMMAND_R),
    (GRANITE_CLOSE, CallForm.PHI4_MINI),
    ("<|/tool|>", CallForm.PHI4_MINI),
    (GRANITE_OPEN, CallForm.GRANITE),
    ("functools[", CallForm.FUNCTOOLS),
    (OPEN, CallForm.HERMES),
    (TOOL_CALLS, CallForm.MISTRAL),
    (PYTHON_TAG, CallForm.LLAMA3_JSON),
    ("func_name1(params_name1=", CallForm.PYTHONIC),
    ("<|header_start|>", CallForm.PYTHONIC),
    ("<|start_header_id|>ipython", CallForm.LLAMA3_JSON),
    ('"parameters": dictionary', CallForm.LLAMA3_JSON),
)
"""Texts in a template, and the form that each shows. None: a form that we cannot read. The first text that is
found decides."""


@dataclass(frozen=True, slots=True)
class Forms:
    """How one model writes its replies. ``calls``, ``reasoning``: the forms. ``known``: the form of calls was
    given or found; false if it is only assumed.

    ``opened``: the template writes the opening tag of the reasoning, so the reply begins inside it.
    """

    calls: CallForm = CallForm.HERMES
    reasoning: ReasoningForm = ReasoningForm.NONE
    known: bool = True
    opened: bool = False

    def __str__(self) -> str:
        calls = self.calls.value if self.known else f"unknown, read as {self.calls.value}"
        reasoning = "in channels" if self.calls is CallForm.HARMONY else self.reasoning.value
        return f"{calls}; {reasoning}"

    def parser(self, tools: Sequence[Tool] = (), *, parse_calls: bool = True) -> CallParser:
        """A new parser that splits one reply into reasoning, text and calls. ``tools``: those of the turn; a
        form without JSON takes the types of arguments from them. ``parse_calls``: if false, calls are text."""
        answer, tags = self.call_parser(tools, parse_calls=parse_calls), REASONING.get(self.reasoning)
        if tags is None or self.calls is CallForm.HARMONY:
            return answer
        opened = self.opened or self.reasoning is ReasoningForm.OPENED
        calls = KIMI_CALLS if self.calls is CallForm.KIMI_K2 else ""
        return ReasoningSplitter(tags, answer, opened=opened, calls=calls)

    def call_parser(self, tools: Sequence[Tool] = (), *, parse_calls: bool = True) -> CallParser:
        """The part of `parser` that reads an answer, behind the reasoning."""
        if self.calls is CallForm.HARMONY:
            return ChannelParser(parse_calls=parse_calls)
        if not parse_calls:
            return TextParser()
        if self.calls in XML_FORMATS:
            return XmlCallParser(XML_FORMATS[self.calls], tools)
        if self.calls in PYTHON_TAGS:
            return PythonCallParser(*PYTHON_TAGS[self.calls])
        return CallScanner(FORMATS[self.calls], {tool.name for tool in tools})

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts of which one begins a call; none if a call begins as other text may."""
        form = FORMATS.get(self.calls) or XML_FORMATS.get(self.calls)
        return () if form is None else form.openings

    def syntax(self, specials: Mapping[str, int]) -> CallSyntax | None:
        """How the model writes calls, for grammars. None if there are no grammars for its form. ``specials``:
        ids of special tokens by their text."""
        named = self.calls is CallForm.MISTRAL and "[ARGS]" in specials
        return _NAMED if named else SYNTAXES.get(self.calls)

    def without_reasoning(self) -> Forms:
        """The same forms without reasoning, for a reply that follows a grammar from its first token on."""
        return replace(self, reasoning=ReasoningForm.NONE)

    def marks(self, specials: Mapping[str, int], *, parse_calls: bool = True) -> dict[int, str]:
        """The special tokens that parsers of these forms look for: their texts by id. Decoding drops special
        tokens, so the reader of a reply puts these texts back. ``specials``: ids of special tokens by their
        text. ``parse_calls``: if false, tokens of calls are not among them."""
        form, tags = FORMATS.get(self.calls) or XML_FORMATS.get(self.calls), REASONING.get(self.reasoning)
        texts = PYTHON_TAGS.get(self.calls, ()) if form is None else form.marks
        texts = texts if parse_calls else ()
        texts += () if tags is None else (tags.begin, tags.end, *tags.around)
        texts += MARKS if self.calls is CallForm.HARMONY else ()
        return {specials[text]: text for text in texts if text in specials}

    def end_ids(self, ids: frozenset[int], specials: Mapping[str, int]) -> frozenset[int]:
        """The ids that end a reply. ``ids``: end ids from the model's configuration and template. ``specials``:
        ids of special tokens by their text."""
        ends = {specials[text] for text in _ENDS.get(self.calls, ()) if text in specials}
        return ids.union(ends) - {specials.get(text) for text in _GOES_ON.get(self.calls, ())}


HERMES = Forms()


def find_forms(template: str, opening: str, response_template: Any = None) -> Forms:
    """The forms that a model's templates show. ``template``: the text of the chat templates. ``opening``: what
    they write before a reply. ``response_template``: transformers' description of replies; None if there is
    none."""
    texts = _openings(response_template, "tool_calls"), template
    found = (form for text in texts for sign, form in _SIGNS if sign in text)
    sign = next(found, None)
    forms = Forms(sign or CallForm.HERMES, known=sign is not None)
    openings = _openings(response_template, "thinking") + _openings(response_template, "reasoning")
    for form, tags in REASONING.items():
        if opening.rstrip().endswith(tags.begin):
            form = ReasoningForm.OPENED if tags is THINK else form
            return replace(forms, reasoning=form, opened=True)
        if tags.begin in openings or tags.end in template:
            return replace(forms, reasoning=form)
    return forms


def _openings(response_template: Any, name: str) -> str:
    """The opening texts of all fields of a response template with ``name`` in their names, as one text."""
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    if not isinstance(fields, dict):
        return ""
    found = [field for key, field in fields.items() if name in key and isinstance(field, dict)]
    openings = json.dumps(
        [[field.get("open"), field.get("open_pattern")] for field in found], ensure_ascii=False
    )
    return openings.replace("\\", "")  # patterns have a backslash before brackets
