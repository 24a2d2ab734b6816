"""How a model writes calls and reasoning: chosen by name, or found out from its chat template.

Where transformers has a response template for the model (``response_template`` in its tokenizer's
configuration), what that opens a call with decides; else what the chat template writes. Knows nothing of
streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from .hermes import OPEN, CallParser, Parser
from .json_calls import PYTHON_TAG, TOOL_CALLS, JSONCalls
from .python_calls import PythonicCalls
from .reasoning import BEGIN, END, ReasoningSplitter


class CallForm(StrEnum):
    """How calls are written."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3-json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"


class ReasoningForm(StrEnum):
    """How reasoning is written."""

    NONE = "none"
    THINK = "think"
    OPENED = "think-opened"
    """The template writes the tag that opens it."""


_PARSERS: dict[CallForm, Callable[[], Parser]] = {
    CallForm.HERMES: CallParser,
    CallForm.LLAMA3_JSON: lambda: JSONCalls(None),
    CallForm.MISTRAL: lambda: JSONCalls(TOOL_CALLS),
    CallForm.PYTHONIC: PythonicCalls,
}
_MARKS = {CallForm.LLAMA3_JSON: (PYTHON_TAG,), CallForm.MISTRAL: (TOOL_CALLS, "[ARGS]", "[CALL_ID]")}


@dataclass(frozen=True, slots=True)
class Forms:
    """One model's."""

    calls: CallForm = CallForm.HERMES
    reasoning: ReasoningForm = ReasoningForm.NONE

    def call_parser(self) -> Parser:
        """For one reply."""
        return _PARSERS[self.calls]()

    def splitter(self) -> ReasoningSplitter | None:
        """For one reply; None where nothing is split off."""
        if self.reasoning is ReasoningForm.NONE:
            return None
        return ReasoningSplitter(opened=self.reasoning is ReasoningForm.OPENED)

    def bound(self) -> Forms:
        """For a reply that a grammar binds: it says what it says, though the template opened a thought."""
        return replace(self, reasoning=ReasoningForm.NONE)

    def marks(self, specials: Mapping[str, int]) -> dict[int, str]:
        """Special tokens, which give no text otherwise, that begin a call here."""
        return {specials[text]: text for text in _MARKS.get(self.calls, ()) if text in specials}


HERMES = Forms()


def found_forms(template: str, opening: str, response_template: Any = None) -> Forms:
    """What the templates tell. ``opening``: what the chat template writes before a reply."""
    return Forms(
        _call_form(template, response_template), _reasoning_form(template, opening, response_template)
    )


def _call_form(template: str, response_template: Any) -> CallForm:
    told = _opens(response_template, "tool_calls")
    for text in (told, template):
        for mark, form in (
            (OPEN, CallForm.HERMES),
            (TOOL_CALLS, CallForm.MISTRAL),
            (PYTHON_TAG, CallForm.LLAMA3_JSON),
            ("func_name1(params_name1=", CallForm.PYTHONIC),
            ("<|header_start|>", CallForm.PYTHONIC),
        ):
            if mark in text:
                return form
    llama = "<|start_header_id|>ipython" in template or '"parameters": dictionary' in template
    return CallForm.LLAMA3_JSON if llama else CallForm.HERMES


def _reasoning_form(template: str, opening: str, response_template: Any) -> ReasoningForm:
    if opening.rstrip().endswith(BEGIN):
        return ReasoningForm.OPENED
    told = _opens(response_template, "thinking") + _opens(response_template, "reasoning")
    return ReasoningForm.THINK if BEGIN in told or END in template else ReasoningForm.NONE


def _opens(response_template: Any, name: str) -> str:
    """What a response template begins this field with, as text to look for marks in."""
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    if not isinstance(fields, dict):
        return ""
    found = [field for key, field in fields.items() if name in key and isinstance(field, dict)]
    told = json.dumps([[field.get("open"), field.get("open_pattern")] for field in found])
    return told.replace("\\", "")  # patterns escape brackets
