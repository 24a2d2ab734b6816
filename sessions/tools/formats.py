"""How models write tool calls and reasoning: the tables of the forms, and which form a model uses.

A form of calls is a `CallFormat` in `FORMATS`, and a `CallSyntax` in `SYNTAXES` if grammars can be made for
it. Calls in Python have a parser of their own. A model's form is found by signs in transformers' response
template for it (``response_template`` in its tokenizer's configuration), or else in its chat template.
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
    """``{"name": "f", "parameters": {…}}; {"name": "g", …}``, as the whole reply."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]`` or ``[TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]g…``."""
    PYTHONIC = "pythonic"
    """``[f(city="Oslo"), g(a=1)]``: Llama 3.2, Llama 4, ToolACE."""


class ReasoningForm(StrEnum):
    """How reasoning is written."""

    NONE = "none"
    THINK = "think"
    OPENED = "think-opened"
    """The template writes the opening tag, so the reply begins with reasoning."""


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
"""The forms with JSON arguments."""

SYNTAXES = {
    CallForm.HERMES: CallSyntax(OPEN, '\n{"name": ', ', "arguments": ', "}\n", CLOSE, "\n"),
    CallForm.LLAMA3_JSON: CallSyntax('{"name": ', "", ', "parameters": ', "}", "", "; "),
}
"""The forms that grammars can be made for."""

_SIGNS = (
    (OPEN, CallForm.HERMES),
    (TOOL_CALLS, CallForm.MISTRAL),
    (PYTHON_TAG, CallForm.LLAMA3_JSON),
    ("func_name1(params_name1=", CallForm.PYTHONIC),
    ("<|header_start|>", CallForm.PYTHONIC),
    ("<|start_header_id|>ipython", CallForm.LLAMA3_JSON),
    ('"parameters": dictionary', CallForm.LLAMA3_JSON),
)
"""Texts in a template that show its form; the first one found counts."""


@dataclass(frozen=True, slots=True)
class Forms:
    """How one model writes its replies. ``known``: the form of calls was given or found, not assumed."""

    calls: CallForm = CallForm.HERMES
    reasoning: ReasoningForm = ReasoningForm.NONE
    known: bool = True

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
        """The forms for a reply that a grammar constrains from its first token on."""
        return replace(self, reasoning=ReasoningForm.NONE)

    def marks(self, specials: Mapping[str, int]) -> dict[int, str]:
        """The texts of the form's special tokens, by id. The detokenizer leaves these out. ``specials``: ids
        by text."""
        form = FORMATS.get(self.calls)
        return {} if form is None else {specials[text]: text for text in form.marks if text in specials}


HERMES = Forms()


def find_forms(template: str, opening: str, response_template: Any = None) -> Forms:
    """The forms that a model's templates show. ``opening``: what the chat template writes before a reply."""
    texts = _openings(response_template, "tool_calls"), template
    found = (form for text in texts for sign, form in _SIGNS if sign in text)
    sign = next(found, None)
    calls, known = sign or CallForm.HERMES, sign is not None
    openings = _openings(response_template, "thinking") + _openings(response_template, "reasoning")
    if opening.rstrip().endswith(BEGIN):
        return Forms(calls, ReasoningForm.OPENED, known)
    thinks = BEGIN in openings or END in template
    return Forms(calls, ReasoningForm.THINK if thinks else ReasoningForm.NONE, known)


def _openings(response_template: Any, name: str) -> str:
    """The openings of a response template's fields with this name, as one text."""
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    if not isinstance(fields, dict):
        return ""
    found = [field for key, field in fields.items() if name in key and isinstance(field, dict)]
    openings = json.dumps([[field.get("open"), field.get("open_pattern")] for field in found])
    return openings.replace("\\", "")  # patterns escape brackets
