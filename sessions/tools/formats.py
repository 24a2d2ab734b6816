"""How each model writes calls and reasoning: the tables of the forms, chosen by name or by its templates.

A form of calls is a `CallFormat` in `FORMATS`, and a `CallSyntax` in `SYNTAXES` where grammars can write it;
calls in Python have a parser of their own. Which form a model uses is told by the response template that
transformers has for it (``response_template`` in its tokenizer's configuration), or else by its chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import regex

from .grammar import CallSyntax
from .python_calls import PythonCallParser
from .reasoning import BEGIN, END, ReasoningSplitter
from .scanner import SPACE, CallFormat, CallParser, CallScanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"


class CallForm(StrEnum):
    """How calls are written."""

    HERMES = "hermes"
    """``<tool_call>{"name": "f", "arguments": {…}}</tool_call>``: Qwen2.5, Qwen3, Hermes, the pocket model. One
    tag may hold several objects, or a list of them."""
    LLAMA3_JSON = "llama3-json"
    """``{"name": "f", "parameters": {…}}; {"name": "g", …}``, which is the whole reply."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]`` or ``[TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]g…``."""
    PYTHONIC = "pythonic"
    """``[f(city="Oslo"), g(a=1)]``: Llama 3.2, Llama 4, ToolACE."""


class ReasoningForm(StrEnum):
    """How reasoning is written."""

    NONE = "none"
    THINK = "think"
    OPENED = "think-opened"
    """The template writes the tag that opens it."""


_OBJECT = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*\{'
)

FORMATS = {
    CallForm.HERMES: CallFormat(
        opening=OPEN,
        closing=CLOSE,
        head=re.compile(
            r'\s*(?:\[\s*)?\{S"name"S:S(?P<name>"(?:[^"\\]|\\.)*")S,S"arguments"S:S\{'.replace(
                "S", f"[{SPACE}]*"
            )
        ),
        no_arguments=b"{}",
    ),
    CallForm.LLAMA3_JSON: CallFormat(head=_OBJECT, optional=PYTHON_TAG, marks=(PYTHON_TAG,)),
    CallForm.MISTRAL: CallFormat(
        opening=TOOL_CALLS,
        head=_OBJECT,
        listed=True,
        named=regex.compile(r"(?P<name>[A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][^\[\s]*\s*)?(?:\[ARGS\])?\s*\{"),
        marks=(TOOL_CALLS, "[ARGS]", "[CALL_ID]"),
    ),
}
"""The forms whose arguments are JSON."""

SYNTAXES = {
    CallForm.HERMES: CallSyntax(OPEN, '\n{"name": ', ', "arguments": ', "}\n", CLOSE, "\n"),
    CallForm.LLAMA3_JSON: CallSyntax('{"name": ', "", ', "parameters": ', "}", "", "; "),
}
"""The forms that a grammar can hold a model to: JSON arguments, behind what tells a call from text."""

_SIGNS = (
    (OPEN, CallForm.HERMES),
    (TOOL_CALLS, CallForm.MISTRAL),
    (PYTHON_TAG, CallForm.LLAMA3_JSON),
    ("func_name1(params_name1=", CallForm.PYTHONIC),
    ("<|header_start|>", CallForm.PYTHONIC),
    ("<|start_header_id|>ipython", CallForm.LLAMA3_JSON),
    ('"parameters": dictionary', CallForm.LLAMA3_JSON),
)
"""What tells a form where it stands in a template; the first that is found counts."""


@dataclass(frozen=True, slots=True)
class Forms:
    """How one model writes its replies."""

    calls: CallForm = CallForm.HERMES
    reasoning: ReasoningForm = ReasoningForm.NONE

    def call_parser(self) -> CallParser:
        """A parser for one reply."""
        form = FORMATS.get(self.calls)
        return PythonCallParser() if form is None else CallScanner(form)

    def splitter(self) -> ReasoningSplitter | None:
        """A splitter for one reply; None where the model writes no reasoning."""
        if self.reasoning is ReasoningForm.NONE:
            return None
        return ReasoningSplitter(opened=self.reasoning is ReasoningForm.OPENED)

    def without_reasoning(self) -> Forms:
        """For a reply that a grammar binds from its first token on, which leaves no room for reasoning."""
        return replace(self, reasoning=ReasoningForm.NONE)

    def marks(self, specials: Mapping[str, int]) -> dict[int, str]:
        """The special tokens of the form, whose text detokenizing leaves out, by id; ``specials``: all ids."""
        form = FORMATS.get(self.calls)
        return {} if form is None else {specials[text]: text for text in form.marks if text in specials}


HERMES = Forms()


def find_forms(template: str, opening: str, response_template: Any = None) -> Forms:
    """The forms that a model's templates tell. ``opening``: what the chat template writes before a reply."""
    return Forms(
        _call_form(template, response_template), _reasoning_form(template, opening, response_template)
    )


def _call_form(template: str, response_template: Any) -> CallForm:
    for text in (_openings(response_template, "tool_calls"), template):
        for sign, form in _SIGNS:
            if sign in text:
                return form
    return CallForm.HERMES


def _reasoning_form(template: str, opening: str, response_template: Any) -> ReasoningForm:
    if opening.rstrip().endswith(BEGIN):
        return ReasoningForm.OPENED
    openings = _openings(response_template, "thinking") + _openings(response_template, "reasoning")
    return ReasoningForm.THINK if BEGIN in openings or END in template else ReasoningForm.NONE


def _openings(response_template: Any, name: str) -> str:
    """What a response template's fields of this name begin with, as text to search for signs."""
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    if not isinstance(fields, dict):
        return ""
    found = [field for key, field in fields.items() if name in key and isinstance(field, dict)]
    openings = json.dumps([[field.get("open"), field.get("open_pattern")] for field in found])
    return openings.replace("\\", "")  # patterns escape brackets
